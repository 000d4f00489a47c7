"""Plain HTTP requests to one server, over connections that are kept.

The standard library's client, because it does exactly what is asked: it follows no redirect, looks
for no proxy and no password of its own accord, bounds the length and the number of headers, and
lets the caller read a body piece by piece into memory of a known size. obstore's HTTP client and
httpx follow redirects or have to be told not to, and the latter is no dependency of thinwire.
"""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import SplitResult

from thinwire.errors import LimitExceeded, StoreError, Unavailable

MAX_ERROR_BYTES = 1 << 14
_KEPT = 32
_READ_BYTES = 1 << 18
# A server that gives less than this, once it has had a while, is as good as silent.
_SLOWEST_BYTES_PER_S = 4096
_PATIENCE_S = 30.0
_MAX_HEADER = 1024


class Timeouts(NamedTuple):
    """Seconds to connect, and between two pieces of an answer."""

    connect_s: float = 10.0
    read_s: float = 60.0


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
        timeouts: When to give up.
    """

    def __init__(
        self, parts: SplitResult, token: str = "", timeouts: Timeouts = DEFAULT_TIMEOUTS
    ) -> None:
        self._host = parts.hostname or ""
        self._port = parts.port
        self._is_tls = parts.scheme.lower() == "https"
        self._token = token
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._process = os.getpid()
        self._tls: ssl.SSLContext | None = None

    def request(
        self,
        method: str,
        target: str,
        *,
        limit_bytes: int,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask, and read the answer.

        Args:
            method: HTTP's.
            target: The path and query, encoded.
            limit_bytes: The most that the body of a good answer may have.
            body: What to send.
            headers: More of them.

        Raises:
            LimitExceeded: The body is longer; no more than the limit was read.
            Unavailable: No answer, or it broke off.
            StoreError: The answer is no HTTP.
        """
        while True:
            connection, is_fresh = self._connection()
            try:
                return self._ask(connection, method, target, limit_bytes, body, headers or {})
            except _WasClosed:
                # A kept connection, which the server had given up: nothing was answered.
                connection.close()
                if is_fresh:
                    raise Unavailable("the server closed the connection") from None
            except BaseException:
                connection.close()
                raise

    def _ask(
        self,
        connection: http.client.HTTPConnection,
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
            try:
                connection.request(method, target, body=body or None, headers=given)
                response = connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                raise _WasClosed from None
            found = {name.lower(): value[:_MAX_HEADER] for name, value in response.headers.items()}
            data = response.read() if method == "HEAD" else _read(response, found, limit_bytes)
        if response.isclosed() and not response.will_close:
            self._keep(connection)
        else:
            connection.close()
        return Answer(response.status, found, data)

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it is new."""
        with self._lock:
            if self._process != os.getpid():
                # The parent's connections are the parent's.
                self._idle, self._process = [], os.getpid()
            if self._idle:
                return self._idle.pop(), False
        with _errors():
            connection = self._made()
            connection.connect()
            connection.sock.settimeout(self._timeouts.read_s)
        return connection, True

    def _made(self) -> http.client.HTTPConnection:
        if not self._is_tls:
            return http.client.HTTPConnection(
                self._host, self._port, timeout=self._timeouts.connect_s
            )
        with self._lock:
            # Honours SSL_CERT_FILE, for servers with certificates of one's own.
            self._tls = self._tls or ssl.create_default_context()
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeouts.connect_s, context=self._tls
        )

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _KEPT and self._process == os.getpid():
                self._idle.append(connection)
                return
        connection.close()


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
    except TimeoutError:
        raise Unavailable("no answer in time", hint="Check the network, then retry") from None
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


def _read(
    response: http.client.HTTPResponse, headers: Mapping[str, str], limit_bytes: int
) -> bytes:
    """The body; of an error as much as is allowed."""
    is_good = response.status < 300
    limit_bytes = limit_bytes if is_good else MAX_ERROR_BYTES
    if headers.get("content-encoding", "identity") != "identity":
        raise StoreError("the server compressed its answer unasked", hint="Check proxies between")
    length = headers.get("content-length", "")
    if is_good and length.isdecimal() and int(length) > limit_bytes:
        raise _too_long(int(length), limit_bytes)
    pieces, read_bytes = [], 0
    begin_s = time.monotonic()
    while piece := response.read1(_READ_BYTES):
        pieces.append(piece)
        read_bytes += len(piece)
        if read_bytes > limit_bytes:
            if is_good:
                raise _too_long(read_bytes, limit_bytes)
            return b"".join(pieces)
        late_s = time.monotonic() - begin_s - _PATIENCE_S
        if late_s > 0 and read_bytes < late_s * _SLOWEST_BYTES_PER_S:
            raise Unavailable("the server answers too slowly", hint="Check the network")
    if length.isdecimal() and read_bytes < min(int(length), limit_bytes):
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
