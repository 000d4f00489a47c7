"""Calls to a hosted hot-load API: a key that goes only where it may, retries, bounded polling.

What :mod:`thinwire.interop.fireworks.hot_load` and :mod:`thinwire.interop.coreweave` share.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from thinwire.engines.engine import Timer
from thinwire.engines.http import Answer, EngineHttp
from thinwire.errors import Deadline, EngineError, EngineUnreachable, InvalidArgument

MAX_ANSWER_BYTES = 8 << 20
"""The longest answer that is read."""

MAX_REPLICAS = 1 << 14
"""Replicas of one deployment that are taken from an answer."""

ACCEPTED = (200, 201, 202)
"""The statuses that say that a POST was taken."""

_TRIES = 4
_FIRST_PAUSE_S = 0.5
_SHOWN_CHARS = 200
_SHOWN_REPLICAS = 8
# Refused before anything was done.
_BUSY = 429
_TRANSIENT = {408, _BUSY, 500, 502, 503, 504}

_T = TypeVar("_T")


class Clock(NamedTuple):
    """What waiting is measured with; a test gives one of its own."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Progress(NamedTuple):
    """How far a wait has come.

    Attributes:
        is_done: Whether it is over.
        shown: Who is behind, and where, for a message.
        context: The same for programs.
    """

    is_done: bool
    shown: str
    context: Mapping[str, Any]


class HotLoadCalls:
    """One service's routes, called with its key and headers.

    Args:
        endpoint: Where it listens. With a key: https, or this host.
        key: Sent as a bearer token.
        service: Its name, for messages.
        headers: Sent with every call.
        hints: What to do about a status, in the service's own words.
        call_timeout_s: How long one call may take.
        clock: What pauses are measured with.

    Raises:
        InvalidArgument: The endpoint, the key or a header is not one, or the key would go over the
            network in the clear.
    """

    def __init__(
        self,
        endpoint: str,
        key: str,
        *,
        service: str,
        headers: Mapping[str, str],
        hints: Mapping[int, str],
        call_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._http = EngineHttp(
            endpoint,
            key=key,
            key_hint=f"Give a key of {service} that may hot-load this deployment",
            max_answer_bytes=MAX_ANSWER_BYTES,
            headers=headers,
        )
        if endpoint.startswith("http:") and not _is_this_host(endpoint):
            raise InvalidArgument(
                f"the key of {service} would go to {self._http.endpoint} unencrypted",
                hint="Give an https endpoint",
            )
        if not call_timeout_s > 0:
            raise InvalidArgument(
                f"call_timeout_s is {call_timeout_s}", hint="Give a number above 0"
            )
        self.endpoint = self._http.endpoint
        self.service = service
        self.clock = clock
        self._hints = hints
        self._call_timeout_s = call_timeout_s

    def close(self) -> None:
        """Close what is open towards the service."""
        self._http.close()

    def once(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str | int] | None = None,
        ok: Collection[int] = (200,),
    ) -> Answer:
        """Call a route once.

        Raises:
            ThinwireError: As :meth:`thinwire.engines.http.EngineHttp.ask` says.
        """
        timer = Timer(self._call_timeout_s, f"{method} {path} of {self.service}")
        try:
            return self._http.ask(method, path, timer=timer, json=json, params=params, ok=ok)
        except EngineUnreachable:
            raise
        except EngineError as error:
            hint = self._hints.get(error.context.get("status", 0))
            if hint is None:
                raise
            raise EngineError(error.message, hint=hint, **error.context) from error

    def get(self, path: str, params: Mapping[str, str | int] | None = None) -> Any:
        """What a GET answers; tried again where the failure may pass.

        Raises:
            ThinwireError: The last try's.
        """
        return self._tried(lambda: self.once("GET", path, params=params), is_transient).data

    def post_once(self, path: str, json: Any, *, ok: Collection[int] = ACCEPTED) -> Answer:
        """A POST's answer; tried again only where the last try surely did nothing.

        Raises:
            ThinwireError: The last try's; :func:`is_unknown` says whether it may have been done.
        """
        return self._tried(
            lambda: self.once("POST", path, json=json, ok=ok),
            lambda error: is_transient(error) and not is_unknown(error),
        )

    def post_again(self, path: str, json: Any, *, ok: Collection[int] = ACCEPTED) -> Answer:
        """A POST's answer; tried again as a GET: for what does no harm twice.

        Raises:
            ThinwireError: The last try's.
        """
        return self._tried(lambda: self.once("POST", path, json=json, ok=ok), is_transient)

    def wait(
        self, look: Callable[[], Progress], *, doing: str, timeout_s: float, every_s: float
    ) -> None:
        """Look until it is done. Failures that may pass are waited out.

        Args:
            look: Asks the service once.
            doing: For messages.
            timeout_s: How long; it is looked at least once.
            every_s: The pause between two looks.

        Raises:
            Deadline: It was not done in time; the message says who is behind, and where.
            ThinwireError: What ``look`` raises, unless it may pass.
        """
        end_s = self.clock.now_s() + timeout_s
        progress = Progress(False, "the service never answered", {})
        cause: Exception | None = None
        while True:
            try:
                progress, cause = look(), None
            except (EngineError, Deadline) as error:
                if not is_transient(error):
                    raise
                cause = error
            if progress.is_done:
                return
            left_s = end_s - self.clock.now_s()
            if left_s <= 0:
                break
            self.clock.sleep(min(every_s, left_s))
        last = "" if cause is None else f"; the last question failed: {cause}"
        raise Deadline(
            f"{doing} took longer than {timeout_s:g} s: {progress.shown}{last}",
            hint="Wait on, or send a full snapshot under a new identity",
            **progress.context,
        ) from cause

    def parsed(self, data: Any, kind: type[_T], route: str) -> _T:
        """An answer as a record of fields; unknown fields are left out.

        Raises:
            EngineError: It does not have the documented shape.
        """
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            raise EngineError(
                f"{self.endpoint} answers {route} otherwise than {self.service} documents: "
                f"{shown(str(error))}",
                hint=f"Look whether the endpoint is {self.service}'s, and its API's version",
                route=route,
            ) from error

    def _tried(self, call: Callable[[], Answer], may_repeat: Callable[[Exception], bool]) -> Answer:
        for number in range(_TRIES - 1):
            try:
                return call()
            except (EngineError, Deadline) as error:
                if not may_repeat(error):
                    raise
            self.clock.sleep(_FIRST_PAUSE_S * 2**number)
        return call()


def is_transient(error: Exception) -> bool:
    """Whether the same question may be answered later."""
    if isinstance(error, EngineUnreachable | Deadline):
        return True
    return isinstance(error, EngineError) and error.context.get("status") in _TRANSIENT


def is_unknown(error: Exception) -> bool:
    """Whether a POST that failed so may have been carried out all the same."""
    if isinstance(error, EngineUnreachable):
        return bool(error.context.get("sent", True))
    if isinstance(error, Deadline):
        return True
    status = error.context.get("status", 0) if isinstance(error, EngineError) else 0
    # 2xx: it was done, and only the answer could not be read.
    return status in _TRANSIENT - {_BUSY} or 200 <= status < 300


def shown(text: object) -> str:
    """A service's text for a message: one line, not long."""
    line = "".join(c if c.isprintable() else " " for c in str(text)[: 2 * _SHOWN_CHARS])
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."


def listed(lines: list[str]) -> str:
    """The first lines of a list, and how many more there are."""
    more = len(lines) - _SHOWN_REPLICAS
    return "; ".join(lines[:_SHOWN_REPLICAS]) + (f"; and {more} more" if more > 0 else "")


def check_replica_count(count: int | None) -> None:
    """Refuse a number of replicas that cannot be waited for.

    Raises:
        InvalidArgument: It is below 1.
    """
    if count is not None and count < 1:
        raise InvalidArgument(f"replica_count is {count}", hint="Give at least 1, or None for all")


def _is_this_host(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
