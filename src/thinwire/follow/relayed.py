"""A stream's store behind a relay: reads go through the relay, and straight to the store else.

A relay is only ever believed as far as its bytes prove themselves. It may delay: by giving nothing
or rubbish it costs a second request, by hiding what is new it costs ``ABSENT_CHECK_S``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar
from urllib.parse import urlsplit

from thinwire.errors import (
    FormatError,
    InvalidArgument,
    NotFound,
    StoreError,
    StreamError,
    ThinwireError,
    Unavailable,
)
from thinwire.follow.proving import prove
from thinwire.store import Entry, Store
from thinwire.store.clock import Clock, SystemClock
from thinwire.store.http_client import Timeouts
from thinwire.store.http_store import open_http
from thinwire.store.wrappers import RetryingStore, StoreWrapper
from thinwire.stream.places import DATA, Place, place_of

T = TypeVar("T")

_LOG = logging.getLogger("thinwire")
# That a record is not there is looked up in the store itself this often.
ABSENT_CHECK_S = 60.0
# Having been found out, a relay that hides things has all that it says is missing looked up.
_DOUBT_S = 5.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# A relay is near: where it does not take a connection soon, it is away.
_TIMEOUTS = Timeouts(connect_s=3.0, read_s=60.0)
# An answer of a relay that works but has not got what was asked for.
_NOT_HELD = 503


def open_relay(url: str) -> Store:
    """The read side of the relay at a URL; it retries nothing.

    Raises:
        InvalidArgument: It is no ``http://`` or ``https://`` URL, or holds a secret.
    """
    try:
        parts = urlsplit(url)
        is_plain = parts.username is None and parts.password is None and not parts.query
    except ValueError:
        is_plain = False
    if not is_plain or parts.scheme.lower() not in ("http", "https") or parts.fragment:
        raise InvalidArgument(
            "the relay's URL is no plain http:// or https:// URL",
            hint="Write http://HOST:PORT/NAME; tokens come from THINWIRE_HTTP_TOKEN_FILE",
        )
    return open_http(parts, os.environ, _TIMEOUTS)


class RelayedStore(StoreWrapper):
    """Reads go through a relay, and to the store itself where that has no answer or a wrong one.

    Signed records are proved before they are given out. Without pinned keys nothing would prove
    them, so they are read from the store itself; what they name is proved by them, and comes
    through the relay. Listings, which nothing proves, come from the store while it answers.

    Args:
        relay: The relay's read side, without retries.
        upstream: The store, without retries.
        trusted_keys: The pinned public keys.
        retry_s: How long to go on when neither has an answer.
        clock: Tells the time.

    Attributes:
        upstream: The store itself, for what a relay gave wrongly.
    """

    def __init__(
        self,
        relay: Store,
        upstream: Store,
        *,
        trusted_keys: Collection[str] = (),
        retry_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._relay_first = _RelayFirst(relay, upstream, frozenset(trusted_keys), clock)
        super().__init__(RetryingStore(self._relay_first, retry_s, clock=clock))
        self.upstream: Store = RetryingStore(upstream, retry_s, clock=clock)

    def distrust(self, what: str) -> None:
        """The relay gave wrong bytes: leave it alone for a while, longer each time."""
        self._relay_first.distrust(what)

    def believe(self) -> None:
        """What the relay gave was right."""
        self._relay_first.honesty.open()


class Gate:
    """Whether something may be tried: after each failure not for a while, and then by one alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._closed_until_s = 0.0
        self._is_tried = False

    @property
    def is_open(self) -> bool:
        """Whether nothing failed lately."""
        return self._pause_s == 0.0

    def may_try(self) -> bool:
        """Whether the caller may try now."""
        with self._lock:
            now_s = self._clock.now()
            if self._pause_s == 0.0:
                return True
            if now_s < self._closed_until_s:
                return False
            # Until this one has come back the others stay out.
            self._closed_until_s = now_s + self._pause_s
            self._is_tried = True
            return True

    def open(self) -> None:
        """It works."""
        with self._lock:
            self._pause_s, self._is_tried = 0.0, False

    def close(self) -> float:
        """It failed; returns for how long it is left alone.

        Many that fail at once count once.
        """
        with self._lock:
            if self._pause_s == 0.0 or self._is_tried:
                self._pause_s = min(max(_FIRST_PAUSE_S, self._pause_s * 2), _LONGEST_PAUSE_S)
                self._closed_until_s = self._clock.now() + self._pause_s
                self._is_tried = False
            return self._pause_s


class _RelayFirst(StoreWrapper):
    """Each call tries the relay once, where it may, and the store once."""

    def __init__(
        self, relay: Store, upstream: Store, trusted_keys: frozenset[str], clock: Clock
    ) -> None:
        super().__init__(upstream)
        self._relay = relay
        self._trusted_keys = trusted_keys
        self._clock = clock
        self._presence = Gate(clock)
        self.honesty = Gate(clock)
        self._upstream_gate = Gate(clock)
        self._absent_check_s = clock.now()
        self._doubted_until_s = 0.0
        self._stream = ""

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        place = place_of(key)

        def directly() -> bytes:
            return self._from_upstream(lambda: self._store.get(key, limit_bytes=limit_bytes))

        def relayed() -> bytes:
            data = self._relay.get(key, limit_bytes=limit_bytes)
            return data if place is None or place.kind in DATA else self._proved(place, data)

        if place is None or place.kind == "lease":
            return directly()
        if place.kind == "stream":
            return self._identity(place, directly, relayed)
        if not self._trusted_keys and place.kind in ("manifest", "merge", "anchor"):
            return directly()
        return self._relayed(key, place, relayed, directly)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``; of data only is it a relay's."""
        place = place_of(key)

        def directly() -> bytes:
            return self._from_upstream(lambda: self._store.get_range(key, start, stop))

        if place is None or place.kind not in DATA:
            return directly()
        return self._relayed(key, place, lambda: self._relay.get_range(key, start, stop), directly)

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``; the relay keeps leases for all its followers together."""
        place = place_of(key)
        if place is None or place.kind != "lease" or not self._may_ask():
            self._store.put(key, data)
            return
        try:
            self._relay.put(key, data)
        except StoreError as error:
            self._close(error)
            self._store.put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``; a lease may lie at either."""
        all_keys = list(keys)
        places = [place_of(key) for key in all_keys]
        is_leases = all(place is not None and place.kind == "lease" for place in places)
        if all_keys and is_leases and self._may_ask():
            try:
                self._relay.delete(all_keys)
            except StoreError as error:
                self._close(error)
        self._store.delete(all_keys)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``."""
        entries: Iterator[Entry] | None = None
        try:
            entries = iter(self._from_upstream(lambda: list(self._store.list(prefix, after=after))))
        except Unavailable:
            if not self._may_ask():
                raise
        yield from entries or self._relay.list(prefix, after=after)

    def distrust(self, what: str) -> None:
        """See ``RelayedStore.distrust``."""
        pause_s = self.honesty.close()
        _LOG.warning(
            "%s gave a wrong %s, which is read from %s; it is left alone for %.0f s",
            self._relay.url,
            what,
            self.url,
            pause_s,
        )

    def _identity(
        self, place: Place, directly: Callable[[], bytes], relayed: Callable[[], bytes]
    ) -> bytes:
        """``stream.json``, by which all else is proved: the store's, as long as it answers."""
        try:
            data = directly()
            self._proved(place, data)
        except Unavailable:
            if not self._trusted_keys or not self._may_ask():
                raise
            return relayed()
        except (FormatError, StreamError):
            # Whoever asked will find out what is wrong with it.
            pass
        return data

    def _relayed(
        self, key: str, place: Place, relayed: Callable[[], bytes], directly: Callable[[], bytes]
    ) -> bytes:
        if not self._may_ask():
            return directly()
        try:
            data = relayed()
        except NotFound:
            self._presence.open()
            if place.kind in DATA or self._is_absence_due():
                return self._contradicted(key, directly)
            raise
        except (FormatError, StreamError) as error:
            # A relay that works says of an object that it is wrong; one that lies gives a wrong
            # one. Only whoever gave it can be blamed.
            if "status" not in error.context:
                self.distrust(key)
            return directly()
        except StoreError as error:
            self._close(error)
            return directly()
        self._presence.open()
        if place.kind not in DATA:
            # It proved itself; of data whoever reads it says so.
            self.honesty.open()
        return data

    def _proved(self, place: Place, data: bytes) -> bytes:
        record = prove(place, data, self._trusted_keys, url=self._relay.url, stream=self._stream)
        if place.kind == "stream":
            self._stream = record.stream
        return data

    def _may_ask(self) -> bool:
        return self.honesty.may_try() and self._presence.may_try()

    def _is_absence_due(self) -> bool:
        """Whether to look whether a record is missing in the store too."""
        now_s = self._clock.now()
        if now_s < self._absent_check_s and now_s >= self._doubted_until_s:
            return False
        if not self._upstream_gate.may_try():
            return False
        self._absent_check_s = now_s + ABSENT_CHECK_S
        return True

    def _contradicted(self, key: str, directly: Callable[[], bytes]) -> bytes:
        """What the relay says is missing, if the store has it."""
        try:
            data = directly()
        except Unavailable as error:
            raise NotFound(
                f"{self._relay.url} has no {key}, and {self.url} does not answer", key=key
            ) from error
        # It may have been written just now; if not, the relay hides things.
        self._doubted_until_s = self._clock.now() + _DOUBT_S
        return data

    def _from_upstream(self, call: Callable[[], T]) -> T:
        try:
            found = call()
        except Unavailable:
            self._upstream_gate.close()
            raise
        except ThinwireError:
            self._upstream_gate.open()
            raise
        self._upstream_gate.open()
        return found

    def _close(self, error: StoreError) -> None:
        """The relay failed; not so if it only has not got this."""
        if error.context.get("status") == _NOT_HELD:
            self._presence.open()
            return
        was_open = self._presence.is_open
        pause_s = self._presence.close()
        if was_open:
            _LOG.warning(
                "%s; until it is back, %s is asked directly (next try in %.0f s)",
                error.message,
                self.url,
                pause_s,
            )
