"""The HTTP side: routes, limits, streams of events, and waiting for versions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from thinwire.engines.engine import label_of
from thinwire.engines.transformers.answers import Form, Staleness
from thinwire.engines.transformers.model import Loaded, options_for, prompt_ids
from thinwire.engines.transformers.protocol import (
    ApiError,
    Asked,
    Limits,
    Wanted,
    read_chat,
    read_completion,
)
from thinwire.engines.transformers.sampling import Row, generator_for
from thinwire.engines.transformers.text import TextOf
from thinwire.engines.transformers.worker import Job, Piece, Worker, version_conflict
from thinwire.stream.version import Version
from thinwire.web import NotAllowed, Role, Tokens

_VERSION_POLL_S = 0.02
_DISCONNECT_POLL_S = 0.5
_BODY_TIMEOUT_S = 30.0

Read = Callable[[bytes, Limits, str], Asked]


class Service:
    """Answers requests with a worker.

    Args:
        loaded: The model.
        worker: Samples.
        name: The model's name.
        served: The version that is served now; None: none.
        staleness: How old a version is.
        failure: What keeps the model from being updated; empty: nothing.
        limits: What requests may ask for.
        tokens: Who may ask; any role will do.
    """

    def __init__(
        self,
        loaded: Loaded,
        worker: Worker,
        *,
        name: str,
        served: Callable[[], Version | None],
        staleness: Staleness,
        failure: Callable[[], str],
        limits: Limits,
        tokens: Tokens,
    ) -> None:
        self._loaded = loaded
        self._worker = worker
        self._name = name
        self._served = served
        self._staleness = staleness
        self._failure = failure
        self._limits = limits
        self._tokens = tokens
        self._open_count = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._guarded(self._health, is_open=True)),
                Route("/ready", self._guarded(self._ready, is_open=True)),
                Route("/v1/models", self._guarded(self._models)),
                Route(
                    "/v1/completions",
                    self._guarded(lambda request: self._answer(request, read_completion)),
                    methods=["POST"],
                ),
                Route(
                    "/v1/chat/completions",
                    self._guarded(lambda request: self._answer(request, read_chat)),
                    methods=["POST"],
                ),
            ],
            exception_handlers={404: _no_route, 405: _no_route},
        )

    def _guarded(
        self, act: Callable[[Request], Awaitable[Response]], *, is_open: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route whose errors are JSON, and which asks for the token."""

        async def guarded(request: Request) -> Response:
            try:
                if not is_open:
                    self._check_token(request)
                return await act(request)
            except ApiError as error:
                return _json(error.body(), error.status)

        return guarded

    def _check_token(self, request: Request) -> None:
        try:
            self._tokens.check(request.headers.get("authorization", ""), Role.READ)
        except NotAllowed as refused:
            raise ApiError(refused.status, refused.message, "invalid_api_key") from None

    async def _health(self, request: Request) -> Response:
        if not self._worker.is_alive:
            return _json({"status": "failed"}, 503)
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        version = self._served()
        facts: dict[str, Any] = {"ready": version is not None and self._worker.is_alive}
        status = 200 if facts["ready"] else 503
        with suppress(ApiError):
            # What is open to everybody says no more than that.
            self._check_token(request)
            facts |= self._details(version)
        return _json(facts, status)

    def _details(self, version: Version | None) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if version is not None:
            facts |= {
                "weight_version": label_of(version),
                "weight_step": version.step,
                "staleness": self._staleness(version),
            }
        if self._failure():
            facts["not_updated_because"] = self._failure()
        return facts

    async def _models(self, request: Request) -> Response:
        version = self._served()
        model = {
            "id": self._name,
            "object": "model",
            "created": 0 if version is None else version.created_ms // 1000,
            "owned_by": "thinwire",
            "max_model_len": self._limits.context_tokens,
            "weight_version": None if version is None else label_of(version),
        }
        return _json({"object": "list", "data": [model]})

    async def _answer(self, request: Request, read: Read) -> Response:
        """One of the two routes that sample."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != (
            "application/json"
        ):
            # Also what keeps a web page elsewhere from using a server on this machine.
            raise ApiError(415, "send content-type: application/json", "invalid_content_type")
        self._open()
        is_handed_over = False
        try:
            asked = read(await self._body(request), self._limits, self._name)
            prompts = await asyncio.to_thread(prompt_ids, asked, self._loaded, self._limits)
            await self._wait_for(asked.wanted, request)
            running = _Running(self._job(asked, prompts))
            form = Form.of(
                asked, secrets.token_hex(12), self._name, self._loaded.tokenizer, self._staleness
            )
            self._worker.submit(running.job)
            if asked.streams:
                # An error before the first token is an answer of its own, not an event.
                first = await running.next(request)
                is_handed_over = True
                return _Events(_events(form, running, first), running.job, self._close)
            while await running.next(request) is not None:
                pass
            return _json(form.whole(running.job))
        except ClientDisconnect:
            return Response(status_code=499)
        finally:
            if not is_handed_over:
                self._close()

    def _open(self) -> None:
        """Count a request among those that are open.

        Raises:
            ApiError: There are too many.
        """
        if self._open_count >= self._limits.requests:
            raise ApiError(
                429,
                f"{self._open_count} requests are open; no more are taken at once",
                "too_many_requests",
            )
        self._open_count += 1

    def _close(self) -> None:
        self._open_count -= 1

    async def _body(self, request: Request) -> bytes:
        size = request.headers.get("content-length", "")
        if size.isdecimal() and int(size) > self._limits.body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > self._limits.body_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", "timeout") from None
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"a body has at most {self._limits.body_bytes} bytes", "body_too_large"
        )

    async def _wait_for(self, wanted: Wanted, request: Request) -> None:
        """Wait until a version may answer that is served.

        Raises:
            ApiError: None came in time, or none can come any more.
        """
        end_s = asyncio.get_running_loop().time() + wanted.timeout_s
        while True:
            version = self._served()
            if version is None:
                if wanted.min_version is None and wanted.exact_version is None:
                    raise ApiError(503, "no version is here yet", "not_ready")
            elif wanted.allows(version):
                return
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0 or (version is not None and wanted.is_past(version)):
                raise version_conflict(wanted, version)
            await asyncio.sleep(min(_VERSION_POLL_S, left_s))
            if await request.is_disconnected():
                raise ClientDisconnect

    def _job(self, asked: Asked, prompts: list[list[int]]) -> Callable[[Any], Job]:
        def make(tell: Any) -> Job:
            rows = []
            for number, ids in enumerate(ids for ids in prompts for _ in range(asked.answer_count)):
                options = options_for(asked, ids, self._limits)
                rows.append(Row(ids, options, generator_for(options.seed, number)))
            texts = [TextOf(self._loaded.tokenizer, asked.options.stops) for _ in rows]
            return Job(rows, texts, asked.wanted, tell, asked.streams)

        return make


class _Running:
    """A job, whose pieces cross from the worker's thread to the event loop."""

    def __init__(self, make: Callable[[Any], Job]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self.job = make(self._tell)

    def _tell(self, piece: Piece | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:
            # The loop was closed: the server ends, and nobody listens.
            self.job.cancel()

    async def next(self, request: Request | None = None) -> Piece | None:
        """The next piece; None at the end.

        Raises:
            ApiError: It failed.
            ClientDisconnect: Nobody waits any more.
        """
        try:
            while True:
                try:
                    async with asyncio.timeout(None if request is None else _DISCONNECT_POLL_S):
                        piece = await self._pieces.get()
                except TimeoutError:
                    if request is not None and await request.is_disconnected():
                        raise ClientDisconnect from None
                    continue
                break
        except BaseException:
            self.job.cancel()
            raise
        if isinstance(piece, Exception):
            raise piece
        return piece


async def _events(form: Form, running: _Running, first: Piece | None) -> AsyncIterator[bytes]:
    """A request's pieces as server-sent events."""
    try:
        piece = first
        while piece is not None:
            yield _event(form.piece(running.job, piece))
            piece = await running.next()
        if form.asked.has_usage:
            yield _event(form.usage(running.job))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body())


class _Events(StreamingResponse):
    """A stream of events; however it ends, its request is not answered any further."""

    def __init__(
        self, events: AsyncIterator[bytes], job: Job, on_close: Callable[[], None]
    ) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
        self._job = job
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()
            self._on_close()


def _event(facts: Any) -> bytes:
    return b"data: " + msgspec.json.encode(facts) + b"\n\n"


def _json(facts: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(facts), status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    message = f"there is no {request.method} {request.url.path[:200]} here"
    return _json(ApiError(status, message, "not_found").body(), status)
