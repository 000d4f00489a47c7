"""Waiting for versions over HTTP: one answer when there is a newer one, or events without end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from thinwire.hub.answers import ApiError, answer_data, answer_nothing
from thinwire.hub.board import Board
from thinwire.hub.events import Ended, TooMany
from thinwire.hub.operations import Reply

# Whoever follows another lineage than the hub knows is not told so again at once.
_CALM_S = 1.0

_T = TypeVar("_T")


class Known(NamedTuple):
    """The version that a follower has; 0: none."""

    lineage: str
    version: int


async def wait_for_newer(
    request: Request, board: Board, known: Known, timeout_s: float, wake: Callable[[], None]
) -> Reply:
    """The head, once it is newer than a version.

    Args:
        request: The request; its end ends the waiting.
        board: The stream.
        known: The version.
        timeout_s: How long to wait; then the answer is empty.
        wake: Has the bucket looked at: somebody knows more than the hub.

    Raises:
        ApiError: Too many wait, or the hub is about to stop.
        ClientDisconnect: Nobody waits any more.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    calm_s = loop.time() + min(_CALM_S, timeout_s)
    gone = asyncio.ensure_future(_until_gone(request.receive))
    try:
        while True:
            # Before the head is looked at: so none that comes in between is missed.
            waiter = _taken(board.fanout.wait)
            try:
                latest, now_s, until_s = board.latest, loop.time(), end_s
                if latest is not None:
                    here = Known(latest.note.lineage, latest.note.version)
                    if here.version > known.version:
                        return answer_data(latest.data)
                    if here != known:
                        wake()
                    if here.lineage != known.lineage:
                        # The stream is another one, or the hub does not know of this lineage yet.
                        if now_s >= calm_s:
                            return answer_data(latest.data)
                        until_s = calm_s
                if now_s >= end_s:
                    return answer_nothing()
                await asyncio.wait(
                    {waiter, gone},
                    timeout=until_s - now_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if gone.done():
                    raise ClientDisconnect
            finally:
                board.fanout.forget(waiter)
    finally:
        gone.cancel()


class EventReply:
    """The answer to a listener: the head, and events until either side ends it.

    Args:
        board: The stream.
        hears_replicas: Whether it is told that replicas changed.

    Raises:
        ApiError: Too many listen, or the hub is about to stop.
    """

    status_code = 200
    _HEADERS = (
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-store"),
        # For proxies that would hold events back.
        (b"x-accel-buffering", b"no"),
    )

    def __init__(self, board: Board, *, hears_replicas: bool) -> None:
        self._fanout = board.fanout
        self._ear = _taken(partial(board.fanout.listen, hears_replicas=hears_replicas))
        if board.latest is not None:
            self._ear.put(board.latest.message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        gone = asyncio.ensure_future(_until_gone(receive))
        gone.add_done_callback(lambda _: self._ear.drop())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._HEADERS})
            # Headers alone may be held back until there is a version.
            await send({"type": "http.response.body", "body": b": hello\n\n", "more_body": True})
            while (data := await self._ear.next()) is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._fanout.leave(self._ear)


def _taken(take: Callable[[], _T]) -> _T:
    """What a fan-out gives to one more listener.

    Raises:
        ApiError: It takes no more, or ends.
    """
    try:
        return take()
    except TooMany:
        raise ApiError(
            429,
            "limit-exceeded",
            "as many listen to this stream as the hub takes",
            "Poll the bucket, or run another hub",
        ) from None
    except Ended:
        raise ApiError(
            503, "unavailable", "the hub is about to stop", "Ask again when it was started"
        ) from None


async def _until_gone(receive: Receive) -> None:
    with suppress(ClientDisconnect):
        while (await receive())["type"] != "http.disconnect":
            pass
