"""The HTTP side of a relay: routes, errors, ranges; no framework, as there are six routes.

::

    GET, HEAD    /NAME/o/KEY                     an object, also a range of it
    PUT, DELETE  /NAME/o/leases/...              a follower's lease
    GET          /NAME/list?prefix=&after=       a page of a listing
    GET          /health, /metrics

With one stream only, ``/NAME`` may be left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec

from thinwire.errors import (
    AccessDenied,
    FormatError,
    InvalidArgument,
    NotFound,
    ThinwireError,
    Unavailable,
)
from thinwire.relay.blocks import Block
from thinwire.relay.metrics import metrics_text
from thinwire.relay.ranges import Span, span_of
from thinwire.relay.records import Held
from thinwire.relay.relay import PAGE, StreamRelay
from thinwire.relay.sending import Budget, Message, Receive, Send, Sending
from thinwire.store.http_store import ABSENT_HEADER, AGE_HEADER
from thinwire.store.store import check_prefix
from thinwire.stream import keys
from thinwire.stream.blocks import digest_of
from thinwire.stream.encoding import MAX_SMALL_BYTES, parse_hint
from thinwire.stream.places import DATA, REMADE, Place, place_of
from thinwire.stream.records import Lease
from thinwire.web import NotAllowed, Role, Tokens, is_local_host

T = TypeVar("T")

_LOG = logging.getLogger("thinwire")
# Tells an object that is not there from anything else that a 404 may mean.
ABSENT = (ABSENT_HEADER.encode(), b"1")
RESERVED_NAMES = frozenset({"o", "list", "health", "metrics"})
_BODY_WITHIN_S = 10.0
# So long a follower waits to hear whether a lease can be written at all.
_LEASE_WITHIN_S = 3.0
_MAX_QUERY_FIELDS = 8
_MOST_NAMED = 20
# A record that names no such object any more is read again, unless it was read just now.
_DOUBT_AFTER_S = 1.0
_CODES = {400: "invalid-argument", 401: "access-denied", 403: "access-denied", 404: "not-found",
          405: "method-not-allowed", 408: "timeout", 413: "too-large", 416: "range",
          421: "no-such-stream"}  # fmt: skip

Headers = list[tuple[bytes, bytes]]


class _Refused(Exception):
    """An answer that is an error of the request's own."""

    def __init__(
        self,
        status: int,
        message: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status
        self.message = message
        self.headers = list(headers)


class _Request(NamedTuple):
    method: str
    path: str
    query: str
    headers: Mapping[bytes, bytes]
    receive: Receive
    send: Send


class RelayApp:
    """The ASGI application.

    Args:
        relays: The streams' relays.
        tokens: Who may ask.
    """

    def __init__(self, relays: Sequence[StreamRelay], tokens: Tokens) -> None:
        self._relays = {relay.name: relay for relay in relays}
        self._only = relays[0] if len(relays) == 1 else None
        self._tokens = tokens
        self._budget = Budget()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = _Request(
            scope["method"],
            scope["path"],
            scope["query_string"].decode("latin-1"),
            dict(scope["headers"]),
            receive,
            send,
        )
        try:
            await self._answer(request)
        except _Refused as refused:
            facts = {
                "code": _CODES[refused.status],
                "message": refused.message,
                "hint": refused.hint,
            }
            await _send_json(request, refused.status, {"error": facts}, refused.headers)
        except ThinwireError as error:
            facts = {"code": error.code, "message": error.message, "hint": error.hint}
            status, headers = _status_of(error), _age(error.context.get("age_s"))
            if status == 404:
                headers.append(ABSENT)
            if status == 503 and not error.context.get("is_away"):
                # A store that is away stays so: whoever can ask it should.
                headers.append((b"retry-after", b"1"))
            await _send_json(request, status, {"error": facts}, headers)

    async def _answer(self, request: _Request) -> None:
        if request.path == "/health":
            self._check_method(request, "GET", "HEAD")
            await _send_json(request, 200, {"status": "ok"})
            return
        self._check_host(request)
        if request.path == "/metrics":
            self._check_method(request, "GET", "HEAD")
            self._check_role(request, Role.READ)
            text = metrics_text(list(self._relays.values()), self._budget)
            await _send(request, 200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")
            return
        self._check_role(request, Role.FOLLOW)
        relay, path = self._relay_of(request.path)
        relay.request_count += 1
        if path == "/list":
            self._check_method(request, "GET", "HEAD")
            await self._list(request, relay)
            return
        place = place_of(path.removeprefix("/o/")) if path.startswith("/o/") else None
        if place is None:
            is_key = path.startswith("/o/")
            raise _Refused(
                404,
                "there is no such object in a stream",
                [ABSENT] if is_key else [],
                hint=f"Objects of {relay.name} are below /{relay.name}/o/, a listing is at "
                f"/{relay.name}/list",
            )
        if place.kind == "lease":
            await self._lease(request, relay, place)
            return
        self._check_method(request, "GET", "HEAD")
        if place.kind in DATA:
            await self._send_object(request, relay, place)
        else:
            await self._send_record(request, relay, place)

    def _relay_of(self, path: str) -> tuple[StreamRelay, str]:
        name, slash, rest = path.removeprefix("/").partition("/")
        relay = self._relays.get(name)
        if relay is not None:
            return relay, slash + rest
        if self._only is not None and (name in RESERVED_NAMES or not slash):
            return self._only, path
        known = ", ".join(sorted(self._relays)[:_MOST_NAMED])
        raise _Refused(
            421,
            "there is no such stream here",
            hint=f"Here are: {known}. Objects are below /NAME/o/, a listing is at /NAME/list",
        )

    def _check_host(self, request: _Request) -> None:
        host = request.headers.get(b"host", b"").decode("latin-1")
        if not self._tokens and not is_local_host(host):
            # A web page may have had a browser ask here under its own name.
            raise _Refused(
                421,
                "without tokens this relay answers to names of this machine only",
                hint="Ask for localhost or 127.0.0.1, or give the relay --tokens",
            )

    def _check_role(self, request: _Request, role: Role) -> None:
        given = request.headers.get(b"authorization", b"").decode("latin-1")
        try:
            self._tokens.check(given, role)
        except NotAllowed as refused:
            challenge = [(b"www-authenticate", b"Bearer")] if refused.status == 401 else []
            raise _Refused(refused.status, refused.message, challenge, hint=refused.hint) from None

    @staticmethod
    def _check_method(request: _Request, *methods: str) -> None:
        if request.method not in methods:
            allowed = (b"allow", ", ".join(methods).encode())
            raise _Refused(405, f"here is only {' and '.join(methods)}", [allowed])

    async def _send_record(self, request: _Request, relay: StreamRelay, place: Place) -> None:
        held = await _awaited(relay.records.find(place))
        if held.data is None:
            raise relay.records.missing(place, held)
        etag = f'"{digest_of(held.data)}"'.encode()
        span = _span(request, len(held.data), etag)
        headers = _object_headers(span, len(held.data), etag, b"application/json")
        body = held.data[span.start : span.stop]
        status = 206 if span.is_part else 200
        await _send_with(request, status, body, headers + _age(held.age_s))
        if request.method != "HEAD":
            relay.served_bytes += len(body)

    async def _send_object(self, request: _Request, relay: StreamRelay, place: Place) -> None:
        named_at, held = await self._object(relay, place)
        record = held.objects[place.key]
        etag = f'"{record.digest}"'.encode()
        span = _span(request, record.size, etag)
        headers = _object_headers(span, record.size, etag, b"application/octet-stream")
        if request.method == "HEAD":
            await _send_with(request, 200, b"", headers)
            return

        def count(byte_count: int) -> None:
            relay.served_bytes += byte_count

        sending = Sending(relay.blocks, relay.shelf.files, self._budget, count)
        is_passing = relay.is_too_large(held.objects_bytes)
        what = Block(place.key, record, 0, is_passing)
        try:
            await sending.answer(what, span, headers, request.receive, request.send)
        except NotFound:
            if named_at.kind in REMADE:
                # A maintainer has retired it, and may make it again.
                relay.records.forget(named_at)
            raise

    async def _object(self, relay: StreamRelay, place: Place) -> tuple[Place, Held]:
        """The record that names an object, and its place."""
        for named_at in relay.named_by(place):
            held = await _awaited(relay.records.find(named_at))
            is_named = place.key in held.objects
            if not is_named and named_at.kind in REMADE and held.data is not None:
                held = await self._read_again(relay, named_at, held)
                is_named = place.key in held.objects
            if is_named:
                return named_at, held
        raise NotFound(
            f"no manifest of {relay.upstream.url} names {place.key}", hint="Check the key"
        )

    @staticmethod
    async def _read_again(relay: StreamRelay, place: Place, held: Held) -> Held:
        if relay.upstream.away_s is not None or relay.records.age_of(held) < _DOUBT_AFTER_S:
            return held
        relay.records.forget(place)
        return await _awaited(relay.records.find(place))

    async def _list(self, request: _Request, relay: StreamRelay) -> None:
        try:
            fields = parse_qs(request.query, max_num_fields=_MAX_QUERY_FIELDS, errors="strict")
        except ValueError:
            raise _Refused(400, "the query cannot be read") from None
        prefix, after = (fields.get(name, [""])[-1] for name in ("prefix", "after"))
        check_prefix(prefix)
        found = await _awaited(relay.list_page(prefix, after))
        page = {"entries": found[:PAGE], "next": found[PAGE - 1].key if found[PAGE:] else None}
        await _send_json(request, 200, page)

    async def _lease(self, request: _Request, relay: StreamRelay, place: Place) -> None:
        self._check_method(request, "PUT", "DELETE")
        if request.method == "DELETE":
            relay.needs.drop(place.holder, place.version)
        else:
            try:
                lease = parse_hint(await _body(request), Lease, "the lease")
            except FormatError as error:
                raise _Refused(400, error.message) from None
            fits = (lease.holder, lease.version) == (place.holder, place.version)
            if not fits or not keys.is_lineage(lease.lineage):
                raise _Refused(400, "the lease is of another follower or version than its key")
            await self._need(relay, place, lease.lineage)
        await _send(request, 204, b"", b"")

    @staticmethod
    async def _need(relay: StreamRelay, place: Place, lineage: str) -> None:
        try:
            flight = relay.need(place, lineage)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEASE_WITHIN_S):
                    await _awaited(flight)
            relay.check_need(place)
        except AccessDenied as error:
            raise _Refused(403, error.message, hint=error.hint) from None


async def _awaited(flight: Future[T]) -> T:
    return flight.result() if flight.done() else await asyncio.wrap_future(flight)


async def _body(request: _Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            more = True
            while more:
                message: Message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise _Refused(408, "the body did not come")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MAX_SMALL_BYTES:
                    raise _Refused(413, f"a lease has at most {MAX_SMALL_BYTES} bytes")
    except TimeoutError:
        raise _Refused(408, "the body did not come in time") from None
    return bytes(body)


def _span(request: _Request, size_bytes: int, etag: bytes) -> Span:
    header = request.headers.get(b"range")
    condition = request.headers.get(b"if-range")
    # A range of what was asked about only; dates, which nothing here has, never fit.
    is_asked = request.method == "GET" and (condition is None or condition.strip() == etag)
    span = span_of(header.decode("latin-1") if header and is_asked else None, size_bytes)
    if span is None:
        total = (b"content-range", f"bytes */{size_bytes}".encode())
        raise _Refused(416, f"no such range, or several, of {size_bytes} bytes", [total])
    return span


def _object_headers(span: Span, size_bytes: int, etag: bytes, kind: bytes) -> Headers:
    headers = [
        (b"content-type", kind),
        (b"content-length", str(span.stop - span.start).encode()),
        (b"accept-ranges", b"bytes"),
        (b"etag", etag),
    ]
    if span.is_part:
        value = f"bytes {span.start}-{span.stop - 1}/{size_bytes}"
        headers.append((b"content-range", value.encode()))
    return headers


def _age(age_s: float | None) -> Headers:
    return [] if age_s is None else [(AGE_HEADER.encode(), f"{age_s:.1f}".encode())]


def _status_of(error: ThinwireError) -> int:
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Unavailable):
        return 503
    if isinstance(error, InvalidArgument):
        return 400
    return 502


async def _send_json(
    request: _Request, status: int, facts: Any, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    await _send(request, status, msgspec.json.encode(facts), b"application/json", headers)


async def _send(
    request: _Request, status: int, body: bytes, kind: bytes, headers: Sequence[Any] = ()
) -> None:
    more = [(b"content-type", kind)] if kind else []
    length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
    await _send_with(request, status, body, [*more, *length, *headers])


async def _send_with(request: _Request, status: int, body: bytes, headers: Headers) -> None:
    await request.send({"type": "http.response.start", "status": status, "headers": headers})
    body = b"" if request.method == "HEAD" else body
    await request.send({"type": "http.response.body", "body": body, "more_body": False})
