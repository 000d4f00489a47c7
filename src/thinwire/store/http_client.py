"""Plain HTTP requests to one server, over connections that are kept.

The standard library's client, because it does exactly what is asked: it follows no redirect, looks
for no proxy and no password of its own accord, bounds the length and the number of headers, and
lets the caller read a body piece by piece into memory of a known size. obstore's HTTP client and
httpx follow redirects or have to be told not to, and the latter is no dependency of thinwire.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import SplitResult

from thinwire.errors import LimitExceeded, StoreError, Unavailable
from thinwire.store.lines import NO_TLS, Line, TooMuchSent

MAX_ERROR_BYTES = 1 << 14
_KEPT = 32
_READ_BYTES = 1 << 18
# Of an answer's head: interim answers and headers, however many there are.
_MAX_HEAD_BYTES = 256 << 10
_MAX_HEADER = 1024


class Timeouts(NamedTuple):
    """When to give up.

    Attributes:
        connect_s: Seconds until there is a connection.
        read_s: Seconds in which nothing at all comes.
        head_s: Seconds from the request on until the head of the answer is there.
        patience_s: Seconds that a body has in any case ...
        slowest_bytes_per_s: ... and beside them the time that it takes at this pace.
    """

    connect_s: float = 10.0
    read_s: float = 60.0
    head_s: float = 60.0
    patience_s: float = 30.0
    slowest_bytes_per_s: float = 64 << 10

    def body_s(self, size_bytes: int) -> float:
        """Seconds that a body of a size may take."""
        return self.patience_s + size_bytes / self.slowest_bytes_per_s


DEFAULT_TIMEOUTS = Timeouts()


class Answer(NamedTuple):
    """What a server said; ``body`` has at most the bytes that were allowed."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Requests to one scheme, host and port. Safe to use from many threads, and after a fork.

    Args:
        parts: Of the server's URL.
        token: The bearer token; empty: none.
    """

    def __init__(self, parts: SplitResult, token: str = "") -> None:
        self._host = parts.hostname or ""
        self._port = parts.port
        self._is_tls = parts.scheme.lower() == "https"
        self._token = token
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._process = os.getpid()
        self._tls: ssl.SSLContext | None = None

    @property
    def has_token(self) -> bool:
        """Whether requests bring a token."""
        return bool(self._token)

    def request(
        self,
        method: str,
        target: str,
        *,
        limit_bytes: int,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask, and read the answer.

        Args:
            method: HTTP's.
            target: The path and query, encoded.
            limit_bytes: The most that the body of a good answer may have.
            timeouts: When to give up.
            body: What to send.
            headers: More of them.

        Raises:
            LimitExceeded: The body is longer; no more than the limit was read.
            Unavailable: No answer, or it broke off.
            StoreError: The answer is no HTTP.
        """
        while True:
            connection, is_fresh = self._connection(timeouts)
            try:
                return self._ask(connection, method, target, limit_bytes, body, headers or {})
            except _WasClosed:
                # A kept connection, which the server had given up: nothing was answered.
                connection.shut()
                if is_fresh:
                    raise Unavailable("the server closed the connection") from None
            except BaseException:
                connection.shut()
                raise

    def _ask(
        self,
        connection: _Connection,
        method: str,
        target: str,
        limit_bytes: int,
        body: bytes,
        headers: Mapping[str, str],
    ) -> Answer:
        given = {"Accept-Encoding": "identity", **headers}
        if self._token:
            given["Authorization"] = f"Bearer {self._token}"
        with _errors():
            line, timeouts = connection.line, connection.timeouts
            line.give(timeouts.head_s, _MAX_HEAD_BYTES, silence_s=timeouts.read_s)
            try:
                connection.request(method, target, body=body or None, headers=given)
                response = connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                raise _WasClosed from None
            found = {name.lower(): value[:_MAX_HEADER] for name, value in response.headers.items()}
            data = b""
            if method == "HEAD":
                response.read()
            elif (size_bytes := _body_bytes(response, found, limit_bytes)) is not None:
                line.give(
                    timeouts.body_s(size_bytes),
                    size_bytes + _MAX_HEAD_BYTES,
                    silence_s=timeouts.read_s,
                )
                data = _read(response, size_bytes)
        if response.isclosed() and not response.will_close:
            self._keep(connection)
        else:
            connection.shut()
        return Answer(response.status, found, data)

    def _connection(self, timeouts: Timeouts) -> tuple[_Connection, bool]:
        """A connection, and whether it is new."""
        with self._lock:
            if self._process != os.getpid():
                # The parent's connections are the parent's.
                self._idle, self._process = [], os.getpid()
            if self._idle:
                connection = self._idle.pop()
                connection.timeouts = timeouts
                return connection, False
        with _errors():
            connection = self._made()
            connection.timeouts = timeouts
            connection.connect()
        return connection, True

    def _made(self) -> _Connection:
        if self._is_tls:
            with self._lock:
                # Honours SSL_CERT_FILE, for servers with certificates of one's own.
                self._tls = self._tls or ssl.create_default_context()
        return _Connection(self._host, self._port, self._tls)

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._idle) < _KEPT and self._process == os.getpid():
                self._idle.append(connection)
                return
        connection.shut()


class _Connection(http.client.HTTPConnection):
    """http.client's, over a socket that knows a deadline for all of an answer."""

    line: Line
    timeouts: Timeouts = DEFAULT_TIMEOUTS  # of what is asked now

    def __init__(self, host: str, port: int | None, tls: ssl.SSLContext | None) -> None:
        self.default_port = 80 if tls is None else 443
        super().__init__(host, port or self.default_port)
        # It would connect again by itself, under no deadline.
        self.auto_open = 0
        self._tls = tls

    def connect(self) -> None:
        """Connect."""
        plain = _connected(self.host, self.port, self.timeouts.connect_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = plain
            if self._tls is not None:
                found = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
        self.sock = self.line = Line(found)

    def shut(self) -> None:
        """Close the socket."""
        self.close()
        self.line.shut()


def _connected(host: str, port: int, within_s: float) -> socket.socket:
    """A connection to one of a name's addresses, all of them tried in the time of one."""
    end_s = time.monotonic() + within_s
    failure: OSError = TimeoutError()
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(found):
        left_s = (end_s - time.monotonic()) / (len(found) - number)
        if left_s <= 0:
            break
        one = socket.socket(family, kind, protocol)
        try:
            one.settimeout(left_s)
            one.connect(address)
        except OSError as error:
            failure = error
            one.close()
        else:
            one.settimeout(max(0.001, end_s - time.monotonic()))
            return one
    raise failure


class _WasClosed(Exception):
    """The server closed the connection before it answered anything."""


@contextmanager
def _errors() -> Iterator[None]:
    """What the network does, as errors of thinwire's; what the server said is not repeated."""
    try:
        yield
    except (StoreError, LimitExceeded, _WasClosed):
        raise
    except ssl.SSLCertVerificationError:
        raise StoreError(
            "the server's certificate is not trusted",
            hint="Set SSL_CERT_FILE to the authority's certificate",
        ) from None
    except ssl.SSLError as error:
        if error.reason not in NO_TLS:
            raise Unavailable(
                f"no secure connection ({error.reason or 'TLS failed'})",
                hint="Check the server's certificate and versions of TLS, and the network",
            ) from None
        raise StoreError(
            "the server answers with what is no TLS",
            hint="Does it speak plain HTTP? Then write http:// in place of https://",
        ) from None
    except TimeoutError:
        raise Unavailable("no answer in time", hint="Check the network, then retry") from None
    except TooMuchSent:
        raise StoreError(
            "the server sends more than any answer has", hint="Check the URL"
        ) from None
    except http.client.IncompleteRead:
        raise Unavailable("the answer broke off", hint="Check the network, then retry") from None
    except http.client.HTTPException:
        raise StoreError("the server's answer is no HTTP", hint="Check the URL") from None
    except OSError as error:
        reason = error.strerror if isinstance(error.errno, int) and error.errno > 0 else ""
        raise Unavailable(
            f"no answer, or the connection broke ({reason or type(error).__name__})",
            hint="Check the network and the URL, then retry",
        ) from None
    except ValueError:
        raise StoreError("the server's answer makes no sense", hint="Check the URL") from None


def _body_bytes(
    response: http.client.HTTPResponse, headers: Mapping[str, str], limit_bytes: int
) -> int | None:
    """How many bytes the body has that is to be read; None: it is not to be.

    Bodies in chunks are not read: a relay says how long its answers are, and chunks have room for
    extensions and trailers without end.
    """
    is_good = response.status < 300
    length = headers.get("content-length", "")
    if not is_good:
        # Only helps to say what is wrong.
        is_read = length.isdecimal() and int(length) <= MAX_ERROR_BYTES
        return int(length) if is_read else None
    if headers.get("content-encoding", "identity") != "identity":
        raise StoreError("the server compressed its answer unasked", hint="Check proxies between")
    if response.status == http.client.NO_CONTENT:
        return 0
    if "transfer-encoding" in headers or not length.isdecimal():
        raise StoreError(
            "the server does not say how long its answer is", hint="Check the URL, and proxies"
        )
    if int(length) > limit_bytes:
        raise _too_long(int(length), limit_bytes)
    return int(length)


def _read(response: http.client.HTTPResponse, size_bytes: int) -> bytes:
    """All of a body of a known size."""
    pieces, read_bytes = [], 0
    while piece := response.read1(_READ_BYTES):
        pieces.append(piece)
        read_bytes += len(piece)
    if read_bytes < size_bytes:
        raise Unavailable("the answer broke off", hint="Check the network, then retry")
    # Notices the end, so that the connection can be kept.
    response.read()
    return b"".join(pieces)


def _too_long(size_bytes: int, limit_bytes: int) -> LimitExceeded:
    return LimitExceeded(
        f"the answer has {size_bytes} bytes, more than the {limit_bytes} allowed here",
        hint="It is not what it should be, or a limit must be raised",
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )
