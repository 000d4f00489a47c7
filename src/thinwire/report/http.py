"""HTTP to a hub: bounded in time and size whatever the other end does, and ended at once if asked.

Python's own client, so that following needs nothing more installed. Redirects are not followed and
proxy variables are not read: the token goes to the hub and nowhere else.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from typing import NamedTuple
from urllib.parse import urlsplit

from thinwire.errors import InvalidArgument
from thinwire.store.http_url import url_problem
from thinwire.store.lines import NO_TLS, Line, TooMuchSent

_CONNECT_S = 5.0
# How long closing waits for a read at most.
_SLICE_S = 0.25
_READ_BYTES = 64 << 10
MAX_ANSWER_BYTES = 64 << 10
# Headers, chunk sizes and an answer's end included: what a hub may send before it must be read on.
_MAX_RECEIVED_BYTES = 256 << 10


class HubFault(Exception):
    """The hub did not do what was asked; the text names no secret and nothing that it sent."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Closed(Exception):
    """It was asked to end meanwhile."""


class Address(NamedTuple):
    """Where a hub is, checked.

    Attributes:
        is_tls: Whether it is spoken to by https.
        host: Its host.
        port: Its port; None: the scheme's.
        path: What stands in front of its routes.
        token: The bearer token; empty: none.
    """

    is_tls: bool
    host: str
    port: int | None
    path: str
    token: str

    @classmethod
    def of(cls, url: str, token: str = "") -> Address:
        """Check a hub's URL and a token.

        Raises:
            InvalidArgument: The URL is not ``http://`` or ``https://`` with a host and no more than
                a path, or the token is none.
        """
        # As it stands in a file: with the end of its line.
        token = token.strip()
        problem = url_problem(url)
        if problem:
            # What may hold a password is not repeated.
            shown = "" if "@" in url else f" {url[:200]!r}"
            raise InvalidArgument(
                f"the hub's URL{shown} {problem}",
                hint="Give the address that it listens on, such as http://127.0.0.1:8765; a token "
                "goes by itself",
            )
        if token and not (token.isascii() and token.isprintable() and " " not in token):
            raise InvalidArgument(
                "the hub's token has characters that no header may have",
                hint="Give one line of letters and digits",
            )
        parts = urlsplit(url)
        assert parts.hostname is not None
        return cls(
            parts.scheme == "https", parts.hostname, parts.port, parts.path.rstrip("/"), token
        )

    def __repr__(self) -> str:
        return f"Address({self.host!r}, {self.port}, {self.path!r})"


class Channel:
    """One connection to a hub, made when it is needed. For one thread.

    Args:
        address: Where.
        is_closed: Once set, whatever is waited for ends with :class:`Closed`.
    """

    def __init__(self, address: Address, is_closed: threading.Event) -> None:
        self._address = address
        self._is_closed = is_closed
        # Of no use to http, and slow to make.
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._connection: _Connection | None = None

    def close(self) -> None:
        """Close what is open; a later call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.shut()

    def ask(
        self, method: str, path: str, *, body: bytes | None = None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Call a route; returns its status and its answer.

        A connection that the hub had closed meanwhile is opened again once: what is asked for does
        no harm twice.

        Raises:
            HubFault: There is no answer, or none that can be used.
            Closed: It was asked to end.
        """
        was_open = self._connection is not None
        with self._failing():
            try:
                answer = self._send(method, path, body, timeout_s)
            except (ConnectionError, HTTPException):
                self.close()
                if not was_open:
                    raise
                answer = self._send(method, path, body, timeout_s)
            # One more than allowed shows that there is more.
            data = answer.read(MAX_ANSWER_BYTES + 1)
            if len(data) > MAX_ANSWER_BYTES:
                raise HubFault(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
            if answer.will_close:
                self.close()
            return answer.status, data

    def stream(self, path: str, *, silence_s: float) -> Iterator[bytes]:
        """Call a route whose answer goes on and on; yields what arrives, until it ends.

        Args:
            path: The route.
            silence_s: How long nothing may arrive.

        Raises:
            HubFault: It cannot be called, is no event stream, or nothing arrives any more.
            Closed: It was asked to end.
        """
        with self._failing():
            answer = self._send("GET", path, None, silence_s)
            if answer.status != 200:
                raise HubFault(f"it answers with status {answer.status}", answer.status)
            kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "text/event-stream":
                raise HubFault("its answer is no stream of events", answer.status)
            assert self._connection is not None
            while data := answer.read1(_READ_BYTES):
                self._connection.give_s(silence_s)
                yield data
        self.close()

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> HTTPResponse:
        if self._connection is None:
            address = self._address
            self._connection = _Connection(address, self._tls, self._is_closed)
        headers = {"Accept-Encoding": "identity"}
        if self._address.token:
            headers["Authorization"] = f"Bearer {self._address.token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._connection.give_s(timeout_s)
        self._connection.request(method, self._address.path + path, body, headers)
        return self._connection.getresponse()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Close the connection where anything goes wrong, and say what in our own words."""
        try:
            yield
        except TimeoutError as error:
            self.close()
            raise HubFault("it does not answer in time") from error
        except TooMuchSent as error:
            self.close()
            raise HubFault("it sends more than any answer has") from error
        except (OSError, HTTPException, ValueError) as error:
            self.close()
            raise HubFault(_reason(error)) from error
        except BaseException:
            self.close()
            raise


class _Connection(HTTPConnection):
    """http.client's, over a socket that knows a deadline for all of an answer."""

    def __init__(
        self, address: Address, tls: ssl.SSLContext | None, is_closed: threading.Event
    ) -> None:
        self.default_port = 80 if tls is None else 443
        super().__init__(address.host, address.port or self.default_port)
        self._tls = tls
        self._is_closed = is_closed
        self._line: Line | None = None
        self._timeout_s = _CONNECT_S

    def give_s(self, timeout_s: float) -> None:
        """Give it so long from now on, and as many bytes as one answer may have."""
        self._timeout_s = timeout_s
        if self._line is not None:
            self._line.give(timeout_s, _MAX_RECEIVED_BYTES)

    def shut(self) -> None:
        """Close the socket."""
        self.close()
        if self._line is not None:
            self._line.shut()

    def connect(self) -> None:
        """Connect; called by http.client."""
        self._check()
        if self._line is not None:
            self._line.shut()
        limit_s = min(_CONNECT_S, self._timeout_s)
        plain = socket.create_connection((self.host, self.port), limit_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = plain
            if self._tls is not None:
                found = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
        self._line = Line(found, slice_s=_SLICE_S, check=self._check)
        self._line.give(self._timeout_s, _MAX_RECEIVED_BYTES)
        self.sock = self._line

    def _check(self) -> None:
        if self._is_closed.is_set():
            raise Closed


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"its certificate is not trusted: {error.verify_message}"
        return f"{reason} (SSL_CERT_FILE names a file of authorities)"
    if isinstance(error, ssl.SSLError) and error.reason in NO_TLS:
        return "it answers with what is no TLS: does it speak plain HTTP?"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ConnectionError | IncompleteRead):
        return "the connection broke"
    return "its answer is not HTTP"
