"""A hub: boards, watchers, and the application that answers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from thinwire.errors import InvalidArgument
from thinwire.follow import Stream, open_stream
from thinwire.hub.answers import ApiError, answer_data
from thinwire.hub.board import Board
from thinwire.hub.facade import Facade
from thinwire.hub.metrics import MEDIA_TYPE, HubMetrics
from thinwire.hub.openapi import describe
from thinwire.hub.operations import Answered, Guard, Operation, Reply, refuse_path, routes_of
from thinwire.hub.replicas import FleetLimits
from thinwire.hub.routes import Routes
from thinwire.hub.status import Rule
from thinwire.hub.watcher import Watcher
from thinwire.report.naming import check_name
from thinwire.web import Role, Tokens

MAX_STREAMS = 64
MAX_HISTORY = 10_000
# What fails for longer is asked again at the next look, and told meanwhile.
LOOK_RETRY_S = 5.0
_READERS = 8
# So many refusals are logged, each once.
_MAX_REFUSALS = 256
# How long the looks that run have, all together, when the hub ends.
_END_S = 10.0


class HubLimits(NamedTuple):
    """What one hub takes.

    Attributes:
        listeners: Who may wait for versions of one stream at once.
        fleet: What is kept of one stream's replicas.
    """

    listeners: int = 20_000
    fleet: FleetLimits = FleetLimits()


class Hub:
    """Watches streams, and tells and asks their replicas.

    It keeps nothing: versions come from the buckets, and replicas say what they are at within a
    heartbeat. Use it as a context manager, or call :meth:`start` and :meth:`close`; and
    :meth:`let_go` before the server is to stop::

        with Hub({"policy": "s3://bucket/policy"}, tokens=tokens) as hub:
            Listener(hub.app, "127.0.0.1", 8765).run()

    Args:
        streams: By name: streams, or their URLs.
        tokens: Who may do what; without any, everybody may do everything.
        poll_s: The time between two looks at a bucket that nobody signals.
        history_count: How many versions are kept of each stream.
        rule: When replicas are ready, where nothing else is asked.
        limits: What is taken.
        logger: A structlog logger; None: nothing is logged.

    Attributes:
        app: The ASGI application.

    Raises:
        InvalidArgument: A name or a URL is none, or there are too many.
    """

    def __init__(
        self,
        streams: Mapping[str, Stream | str],
        *,
        tokens: Tokens | None = None,
        poll_s: float = 1.0,
        history_count: int = 1000,
        rule: Rule | None = None,
        limits: HubLimits | None = None,
        logger: Any = None,
    ) -> None:
        limits = limits or HubLimits()
        if not 1 <= len(streams) <= MAX_STREAMS:
            raise InvalidArgument(
                f"there are {len(streams)} streams", hint=f"Give from 1 to {MAX_STREAMS}"
            )
        if not 1 <= history_count <= MAX_HISTORY:
            raise InvalidArgument(
                f"the history is of {history_count} versions", hint=f"Give from 1 to {MAX_HISTORY}"
            )
        self._logger = logger
        self._pool = ThreadPoolExecutor(_READERS, "thinwire-hub-read")
        self._boards: dict[str, Board] = {}
        self._watchers: dict[str, Watcher] = {}
        for name, given in streams.items():
            check_name("a stream's name", name)
            stream = given
            if not isinstance(stream, Stream):
                stream = open_stream(stream, retry_s=LOOK_RETRY_S)
            board = self._boards[name] = Board(
                name,
                stream,
                poll_s=poll_s,
                history_count=history_count,
                listener_limit=limits.listeners,
                fleet_limits=limits.fleet,
            )
            self._watchers[name] = Watcher(stream, board, self._pool, poll_s=poll_s, logger=logger)
        self._metrics = HubMetrics(self._boards)
        self._refusals: set[str] = set()
        self.app = self._make_app(tokens or Tokens(), rule or Rule())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begin to watch."""
        for watcher in self._watchers.values():
            watcher.start()

    def let_go(self) -> None:
        """End what listeners wait for, so that a server can stop at once. From any thread."""
        for board in self._boards.values():
            board.fanout.end()

    def close(self) -> None:
        """End watching."""
        self.let_go()
        for watcher in self._watchers.values():
            watcher.stop()
        end_s = time.monotonic() + _END_S
        for watcher in self._watchers.values():
            watcher.join(max(0.0, end_s - time.monotonic()))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_app(self, tokens: Tokens, rule: Rule) -> Starlette:
        guard = Guard(tokens, self._metrics.count, self._refuse, self._fail)
        operations = [
            *Routes(self._boards, self._wake, rule).operations(),
            *Facade(self._boards, self._wake).operations(),
            Operation(
                method="GET",
                path="/metrics",
                role=Role.READ,
                about="Metrics for Prometheus.",
                act=self._answer_metrics,
                answers={200: Answered(about="They are.", media_type="text/plain")},
            ),
        ]
        self._description = msgspec.json.encode(describe(operations))
        pages = [
            ("/openapi.json", "What can be asked.", self._answer_description),
            ("/", "The dashboard.", _answer_page),
            ("/static/{name}", "Its files.", _answer_page),
        ]
        for path, about, act in pages:
            operations.append(
                Operation(method="GET", path=path, role=None, about=about, act=act, answers={})
            )
        app = Starlette(routes=routes_of(operations, guard))
        app.router.redirect_slashes = False
        app.router.default = refuse_path(guard)
        return app

    def _wake(self, name: str, close_s: float) -> None:
        self._watchers[name].wake(close_s)

    def _refuse(self, path: str, reason: str) -> None:
        # Those who are refused ask again every few seconds, and anybody may make up names.
        if reason in self._refusals or len(self._refusals) >= _MAX_REFUSALS:
            return
        self._refusals.add(reason)
        if self._logger is not None:
            self._logger.warning("denied", path=path, reason=reason)

    def _fail(self, path: str, error: Exception) -> None:
        if self._logger is not None:
            self._logger.error("a request failed", path=path, error=repr(error))

    async def _answer_metrics(self, request: Request) -> Reply:
        return Response(
            self._metrics.text(),
            headers={"content-type": MEDIA_TYPE, "cache-control": "no-store"},
        )

    async def _answer_description(self, request: Request) -> Reply:
        return answer_data(self._description)


_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Asked for again each time, and not sent again: a new release shows at once.
    "cache-control": "no-cache",
}


async def _answer_page(request: Request) -> Reply:
    from thinwire.hub.pages import find_page

    page = find_page(request.path_params.get("name", "index.html"))
    if page is None:
        raise ApiError(404, "not-found", "the dashboard has no such file")
    etag = f'"{hashlib.sha256(page.data).hexdigest()[:32]}"'
    headers = {**_PAGE_HEADERS, "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(None, 304, headers=headers)
    return Response(page.data, headers={**headers, "content-type": page.media_type})
