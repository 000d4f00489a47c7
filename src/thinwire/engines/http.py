"""HTTP calls to an inference server: bounded in time and size, with one meaning for each failure.

httpx is imported at the first call, so that importing an engine's adapter needs nothing installed.
"""

from __future__ import annotations

import json as json_module
import re
import ssl
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from thinwire.engines.engine import Timer
from thinwire.errors import Deadline, EngineError, EngineUnreachable, InvalidArgument
from thinwire.store.http_url import url_problem

if TYPE_CHECKING:
    import httpx

MAX_ANSWER_BYTES = 64 << 20
"""The longest answer that is read."""

_CONNECT_S = 5.0
_SHOWN_CHARS = 300
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
_OWN_HEADERS = {
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "host",
    "transfer-encoding",
}


class Answer(NamedTuple):
    """What a route answered.

    Attributes:
        status: The HTTP status.
        data: JSON's value, another body's text, None for none.
    """

    status: int
    data: Any


class EngineHttp:
    """One inference server's control routes.

    Each call opens a connection of its own: a kept one may belong to a process that is gone, and a
    control call must not be sent twice to find out. Redirects are not followed and proxy variables
    are not read: the key goes to ``endpoint`` and nowhere else.

    Args:
        endpoint: Where it listens: ``http://HOST:PORT`` or ``https://HOST:PORT``, with or without
            a path in front of its routes.
        key: Sent as a bearer token; never in a message, a log or a ``repr``.
        key_hint: What to do when the engine refuses the key, in its own words.
        ca_file: Certificates that an https endpoint's is checked against; None: the system's.
        max_answer_bytes: The longest answer that is read.
        headers: Sent with every call; nothing secret, and none of those that are sent anyway.

    Raises:
        InvalidArgument: The endpoint, the key or a header is not one.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        key: str | None = None,
        key_hint: str = "Give the key that the engine was started with",
        ca_file: str | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.endpoint = _checked_endpoint(endpoint)
        if key is not None and (not key.isascii() or not key.isprintable() or not key.strip()):
            raise InvalidArgument(
                "the engine's key is empty, or has characters that no header may have",
                hint="Give it as one line of ASCII, without the line's end",
            )
        self._key = key
        self._key_hint = key_hint
        self._ca_file = ca_file
        self._max_answer_bytes = max_answer_bytes
        self._headers = _checked_headers(headers or {})
        self._client: httpx.Client | None = None

    def __repr__(self) -> str:
        return f"EngineHttp({self.endpoint!r})"

    def close(self) -> None:
        """Close what is open; a later call opens it again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        timer: Timer,
        json: Any = None,
        params: Mapping[str, str | int | float | bool] | None = None,
        ok: Collection[int] = (200,),
    ) -> Any:
        """Call a route and give its answer: JSON's value, another body's text, None for none.

        As :meth:`ask`, for routes whose answer needs no status.

        Raises:
            ThinwireError: As there.
        """
        return self.ask(method, path, timer=timer, json=json, params=params, ok=ok).data

    def ask(
        self,
        method: str,
        path: str,
        *,
        timer: Timer,
        json: Any = None,
        params: Mapping[str, str | int | float | bool] | None = None,
        ok: Collection[int] = (200,),
    ) -> Answer:
        """Call a route and give its status and answer.

        Args:
            method: "GET" or "POST".
            path: The route, beginning with "/".
            timer: How long it may take. The end is looked for between two reads, so that only an
                answer that comes in drops can take longer, and no more than twice.
            json: Sent as the body; None: no body.
            params: Sent as the query.
            ok: The statuses that are an answer.

        Raises:
            EngineUnreachable: No connection, or it broke before the answer was there. The
                context's ``sent`` says whether the engine may have done what it was asked.
            EngineError: Another status, or an answer too long or not JSON as it says. The context
                has ``route``, ``status`` and ``body``, its beginning.
            Deadline: The answer did not come in the timer's time; the engine may still do it.
            InvalidArgument: httpx is not installed, or the CA file cannot be read.
        """
        client = self._opened()
        import httpx

        left_s = timer.left_s()
        headers = {**self._headers, "accept-encoding": "identity", "connection": "close"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        timeout = httpx.Timeout(left_s, connect=min(left_s, _CONNECT_S))
        url, route = self.endpoint + path, f"{method} {path}"
        try:
            with client.stream(
                method, url, json=json, params=params, headers=headers, timeout=timeout
            ) as answer:
                body = self._read(answer, route, timer)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._raise_unreachable(route, error, sent=False)
        except httpx.TimeoutException as error:
            timer.left_s()
            raise Deadline(
                f"{self.endpoint} did not answer {route} in {left_s:.3g} s", route=route
            ) from error
        except httpx.HTTPError as error:
            self._raise_unreachable(route, error, sent=True)
        if answer.status_code not in ok:
            self._raise_refused(route, answer, body)
        return Answer(answer.status_code, self._decoded(route, answer, body))

    def _opened(self) -> httpx.Client:
        if self._client is None:
            try:
                import httpx
            except ModuleNotFoundError as error:
                raise InvalidArgument(
                    "httpx is not installed", hint="pip install 'thinwire[engines]'"
                ) from error

            # Of no use to http, and slow to make. For https, the system's certificates, not the
            # ones that httpx brings along.
            context: ssl.SSLContext | bool = False
            if self.endpoint.startswith("https:"):
                context = self._tls()
            self._client = httpx.Client(
                verify=context,
                trust_env=False,
                follow_redirects=False,
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        return self._client

    def _tls(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"the CA file {self._ca_file} cannot be read: {error}",
                hint="Give a file of PEM certificates",
            ) from error

    def _read(self, answer: httpx.Response, route: str, timer: Timer) -> bytes:
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding != "identity":
            # Decompressed bytes would have to be bounded in the middle of a read.
            raise EngineError(
                f"{self.endpoint} answers {route} compressed ({encoding}), though asked not to",
                hint="Let the engine, or what is in front of it, not compress its answers",
                route=route,
                status=answer.status_code,
            )
        parts: list[bytes] = []
        size = 0
        declared = answer.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > self._max_answer_bytes:
            self._raise_too_long(route, answer.status_code)
        for part in answer.iter_raw():
            size += len(part)
            if size > self._max_answer_bytes:
                self._raise_too_long(route, answer.status_code)
            parts.append(part)
            timer.left_s()
        return b"".join(parts)

    def _decoded(self, route: str, answer: httpx.Response, body: bytes) -> Any:
        if not body:
            return None
        if "json" not in answer.headers.get("content-type", ""):
            return body.decode("utf-8", "replace")
        try:
            return json_module.loads(body)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.endpoint} answers {route} with what is not JSON: {self._shown(body)}",
                hint="Look whether the endpoint is the engine's",
                route=route,
                status=answer.status_code,
                body=self._shown(body),
            ) from error

    def _shown(self, body: bytes) -> str:
        """The beginning of an answer, for a message: one line, without the key."""
        text = body[: 8 * _SHOWN_CHARS].decode("utf-8", "replace")
        if self._key is not None:
            text = text.replace(self._key, "***")
        text = "".join(c if c.isprintable() else " " for c in text)
        return text[:_SHOWN_CHARS]

    def _raise_unreachable(self, route: str, error: Exception, *, sent: bool) -> NoReturn:
        what = "broke off" if sent else "does not take"
        doing = f"the answer to {route}" if sent else f"the connection for {route}"
        hint = (
            "Whether it did it is not known; look into the engine's log"
            if sent
            else "Look whether the engine runs and listens there"
        )
        raise EngineUnreachable(
            f"{self.endpoint} {what} {doing}: {str(error) or type(error).__name__}",
            hint=hint,
            route=route,
            sent=sent,
        ) from error

    def _raise_refused(self, route: str, answer: httpx.Response, body: bytes) -> NoReturn:
        status = answer.status_code
        hint = "Look into the engine's log"
        if status in {401, 403}:
            hint = self._key_hint
        elif status == 404:
            hint = "The engine has no such route: look whether its version is supported"
        elif 300 <= status < 400:
            hint = "Redirects are not followed; give the address that it leads to"
        shown = self._shown(body)
        raise EngineError(
            f"{self.endpoint} answers {route} with {status}: {shown or 'nothing'}",
            hint=hint,
            route=route,
            status=status,
            body=shown,
        )

    def _raise_too_long(self, route: str, status: int) -> NoReturn:
        raise EngineError(
            f"{self.endpoint} answers {route} with more than {self._max_answer_bytes} bytes",
            hint="Look whether the endpoint is the engine's",
            route=route,
            status=status,
        )


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        is_name = _HEADER_NAME.fullmatch(name) is not None and name.lower() not in _OWN_HEADERS
        if not is_name or not value.isascii() or not value.isprintable() or value != value.strip():
            raise InvalidArgument(
                f"the header {name[:80]!r} cannot be sent with every call",
                hint="Give names of letters, digits and dashes, and values of one line of ASCII; "
                "a key goes by itself",
            )
    return dict(headers)


def _checked_endpoint(endpoint: str) -> str:
    """The endpoint, without the slash at its end."""
    problem = url_problem(endpoint)
    if not problem:
        return endpoint.rstrip("/")
    # What may hold a password is not repeated.
    shown = "" if "@" in endpoint else f" {endpoint!r}"
    raise InvalidArgument(
        f"the engine's endpoint{shown} {problem}",
        hint="Give the address that the engine listens on, such as http://127.0.0.1:8000, and a "
        "key by itself",
    )
