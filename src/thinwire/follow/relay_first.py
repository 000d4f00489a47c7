"""Each call to a store behind a relay: which of the two is asked, and how far it is believed."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from thinwire.errors import (
    FormatError,
    NotFound,
    StoreError,
    StreamError,
    ThinwireError,
    Unavailable,
)
from thinwire.follow.absence import Absences
from thinwire.follow.gates import NOT_HELD, Gate, ProbedGate, answers
from thinwire.follow.proving import prove
from thinwire.store import Entry, Store
from thinwire.store.clock import Clock
from thinwire.store.wrappers import StoreWrapper
from thinwire.stream import keys
from thinwire.stream.encoding import MAX_MANIFEST_BYTES, MAX_SMALL_BYTES
from thinwire.stream.places import DATA, Place, place_of

T = TypeVar("T")

_LOG = logging.getLogger("thinwire")
# A relay that answers, but has not got data yet, is asked again for so long: what it fetches goes
# on meanwhile, and its followers together are not to be a worse load for the store than it is.
_BUSY_WITHIN_S = 60.0
_LONGEST_BUSY_WAIT_S = 5.0
# One that gives wrong data, or none, is left alone for up to so long.
_LONGEST_DATA_PAUSE_S = 600.0
# The store's small answers come soon, or the relay's are taken.
_SOON_S = 5.0
# A doubt so long is said aloud.
_TOLD_DOUBT_S = 20.0


class _Origin(threading.local):
    """Where a thread's last data came from."""

    is_relay = False


class RelayFirst(StoreWrapper):
    """Each call tries the relay once, where it may, and the store once."""

    def __init__(
        self, relay: Store, upstream: Store, trusted_keys: frozenset[str], clock: Clock
    ) -> None:
        super().__init__(upstream)
        self._relay = relay
        self._trusted_keys = trusted_keys
        self._clock = clock
        self._presence = ProbedGate(lambda: answers(relay), clock)
        self._upstream_gate = ProbedGate(lambda: answers(upstream), clock)
        self._records_honesty = Gate(clock)
        self._data_honesty = Gate(clock, _LONGEST_DATA_PAUSE_S)
        self._is_lease_told = False
        self._origin = _Origin()
        self._absences = Absences(clock.now())
        self._lock = threading.Lock()
        self._stream = ""
        self._newest: dict[str, int] = {}
        self.relayed_bytes = 0

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        place = place_of(key)
        self._origin.is_relay = False

        def directly() -> bytes:
            return self._from_upstream(lambda: self._store.get(key, limit_bytes=limit_bytes))

        def relayed() -> bytes:
            data = self._relay.get(key, limit_bytes=limit_bytes)
            return data if place is None or place.kind in DATA else self._proved(place, data)

        if place is None or place.kind == "lease":
            return directly()
        if place.kind in ("stream", "head"):
            return self._store_first(place, directly, relayed)
        if not self._trusted_keys and place.kind not in DATA:
            return directly()
        data = self._relayed(key, place, relayed, directly)
        if place.kind == "manifest":
            with self._lock:
                newest = self._newest.get(place.lineage, 0)
                self._newest[place.lineage] = max(newest, place.version)
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``; of data only is it a relay's."""
        place = place_of(key)
        self._origin.is_relay = False

        def directly() -> bytes:
            return self._from_upstream(lambda: self._store.get_range(key, start, stop))

        if place is None or place.kind not in DATA:
            return directly()
        return self._relayed(key, place, lambda: self._relay.get_range(key, start, stop), directly)

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``; the relay keeps leases for all its followers together."""
        place = place_of(key)
        is_lease = place is not None and place.kind == "lease"
        if not is_lease or not self._ask_of_lease(lambda: self._relay.put(key, data)):
            self._store.put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``; a lease may lie at either."""
        all_keys = list(keys)
        places = [place_of(key) for key in all_keys]
        if all_keys and all(place is not None and place.kind == "lease" for place in places):
            self._ask_of_lease(lambda: self._relay.delete(all_keys))
        self._store.delete(all_keys)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``."""
        entries = iter(self._store.list(prefix, after=after))
        try:
            first = self._from_upstream(lambda: next(entries, None))
        except Unavailable as away:
            yield from self._instead(away, lambda: list(self._relay.list(prefix, after=after)))
            return
        if first is not None:
            yield first
            # What fails from here on is listed again from there.
            yield from entries

    def stand_in(self) -> str:
        """The relay, while it alone is asked because the store does not answer; else empty."""
        return "" if self._upstream_gate.is_open else self._relay.url

    def judge(self, wrong: str | None) -> bool:
        """Note how this thread's last data was; returns whether the relay gave it.

        Args:
            wrong: What was wrong; None: it was right.
        """
        if not self._origin.is_relay:
            return False
        self._origin.is_relay = False
        if wrong is None:
            self._data_honesty.open()
        else:
            self._blame(self._data_honesty, wrong)
        return True

    def _blame(self, honesty: Gate, what: str) -> None:
        _LOG.warning(
            "%s gave a wrong %s, which is read from %s; it is left alone for %.0f s",
            self._relay.url,
            what,
            self.url,
            honesty.close(),
        )

    def _ask_of_lease(self, ask: Callable[[], None]) -> bool:
        """Ask the relay for a courtesy; nothing that it says ends anything."""
        if not self._presence.may_try():
            return False
        try:
            ask()
        except ThinwireError as error:
            if isinstance(error, StoreError) and "status" not in error.context:
                self._close(error)
            elif not self._is_lease_told:
                self._is_lease_told = True
                _LOG.warning("%s; leases are written to %s itself", error.message, self.url)
            return False
        return True

    def _store_first(
        self, place: Place, directly: Callable[[], bytes], relayed: Callable[[], bytes]
    ) -> bytes:
        """What all else is proved by, or nothing proves: the store's, as long as it answers."""
        if not self._upstream_gate.may_try():
            # Who asks is not to find out for how long it hangs.
            with suppress(ThinwireError):
                return self._instead(Unavailable(f"{self.url} does not answer"), relayed)
        try:
            data = self._soon(directly)
        except Unavailable as away:
            return self._instead(away, relayed)
        if place.kind == "stream":
            self._learn(data)
        return data

    def _soon(self, directly: Callable[[], bytes]) -> bytes:
        """The store's answer, if it comes before the relay's is worth more."""
        if not self._trusted_keys or not self._presence.may_try():
            return directly()
        flight: Future[bytes] = Future()

        def ask() -> None:
            try:
                flight.set_result(directly())
            except BaseException as error:
                flight.set_exception(error)

        try:
            threading.Thread(target=ask, name="thinwire-ask", daemon=True).start()
        except RuntimeError:
            # There can be no more threads just now.
            return directly()
        try:
            return flight.result(_SOON_S)
        except TimeoutError:
            self._upstream_gate.close()
            raise Unavailable(f"{self.url} did not answer within {_SOON_S:.0f} s") from None

    def _instead(self, away: Unavailable, relayed: Callable[[], T]) -> T:
        """What the relay has, while the store is away; if that is nothing, it is the store's."""
        if not self._trusted_keys or not self._presence.may_try():
            raise away
        try:
            return relayed()
        except ThinwireError:
            raise away from None

    def _relayed(
        self, key: str, place: Place, relayed: Callable[[], bytes], directly: Callable[[], bytes]
    ) -> bytes:
        is_data = place.kind in DATA
        honesty = self._data_honesty if is_data else self._records_honesty
        if not self._presence.may_try() or not honesty.may_try():
            return directly()
        try:
            data = self._patiently(relayed) if is_data else relayed()
        except NotFound as error:
            self._presence.open()
            honesty.pass_on()
            return self._absent(key, place, error, directly)
        except (FormatError, StreamError) as error:
            # A relay that works says of an object that it is wrong; one that lies gives a wrong
            # one. Only whoever gave it can be blamed, and not for a stream that took its place.
            if "status" in error.context or self._is_replaced():
                honesty.pass_on()
            else:
                self._blame(honesty, key)
            return directly()
        except StoreError as error:
            honesty.pass_on()
            self._close(error)
            return directly()
        self._presence.open()
        if is_data:
            # Whoever reads it says what it is worth.
            self._origin.is_relay = True
            with self._lock:
                self.relayed_bytes += len(data)
        else:
            honesty.open()
        return data

    def _patiently(self, ask: Callable[[], bytes]) -> bytes:
        """Ask for data, and again where the relay has it not yet but answers.

        Nothing comes from it until it has a whole block, which over a thin link takes its time.
        """
        end_s = self._clock.now() + _BUSY_WITHIN_S
        while True:
            try:
                return ask()
            except Unavailable as error:
                wait_s = error.context.get("retry_after_s")
                if "status" not in error.context and answers(self._relay):
                    wait_s = 1.0
                elif error.context.get("status") != NOT_HELD or wait_s is None:
                    raise
                wait_s = min(max(wait_s, 0.1), _LONGEST_BUSY_WAIT_S) * random.uniform(0.5, 1.5)
                if self._clock.now() + wait_s > end_s:
                    # It answers, but is of no use for data.
                    self._data_honesty.close()
                    raise Unavailable(error.message, hint=error.hint, status=NOT_HELD) from None
                self._clock.sleep_until(self._clock.now() + wait_s)

    def _is_replaced(self) -> bool:
        """Whether there is another stream than there was, as the store says."""
        before = self._stream
        with suppress(ThinwireError):
            data = self._from_upstream(
                lambda: self._store.get(keys.STREAM, limit_bytes=MAX_SMALL_BYTES)
            )
            self._learn(data)
        return bool(before) and self._stream != before

    def _learn(self, data: bytes) -> None:
        """Take what the store says of the stream as what all records must be of."""
        with suppress(FormatError, StreamError):
            # Whoever asked will find out what is wrong with it.
            place = Place("stream", keys.STREAM)
            self._stream = prove(place, data, self._trusted_keys, url=self.url).stream

    def _proved(self, place: Place, data: bytes) -> bytes:
        record = prove(place, data, self._trusted_keys, url=self._relay.url, stream=self._stream)
        if place.kind == "stream":
            self._stream = record.stream
        return data

    def _absent(
        self, key: str, place: Place, error: NotFound, directly: Callable[[], bytes]
    ) -> bytes:
        """What the relay says is missing: nothing, or what the store has."""
        # It says so too while it cannot ask its store, which may answer here.
        is_told_so = error.context.get("age_s") is None
        if is_told_so:
            self._ask_again()
        # Only what may not be there yet is believed to be missing: of all else there is a record
        # that names it, and who cannot find it gives up.
        is_later = place.kind == "manifest" and place.version > self._newest.get(place.lineage, 0)
        if is_later and is_told_so and not self._absences.is_due(self._clock.now()):
            raise error
        if not self._upstream_gate.may_try():
            raise error
        try:
            data = directly()
        except Unavailable as away:
            raise NotFound(
                f"{self._relay.url} has no {key}, and {self.url} does not answer", key=key
            ) from away
        if is_told_so and place.kind not in DATA:
            self._absences.note_denied(key, self._clock.now())
        return data

    def _ask_again(self) -> None:
        """Whether the relay has by now what it denied, or hides it."""
        key = self._absences.take_denied(self._clock.now())
        if not key:
            return
        try:
            self._relay.get(key, limit_bytes=MAX_MANIFEST_BYTES)
        except NotFound as error:
            if error.context.get("age_s") is not None:
                return
        except ThinwireError:
            return
        else:
            self._absences.forgive()
            return
        doubt_s = self._absences.note_hidden(self._clock.now())
        if doubt_s >= _TOLD_DOUBT_S:
            _LOG.warning(
                "%s says again and again that something is missing that %s has, now %s: for %.0f s"
                " all that it says is missing is looked up",
                self._relay.url,
                self.url,
                key,
                doubt_s,
            )

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
        if error.context.get("status") == NOT_HELD:
            self._presence.open()
            return
        was_open = self._presence.is_open
        pause_s = self._presence.close()
        if was_open:
            _LOG.warning(
                "%s (%s); until it is back, %s is asked directly (next try in %.0f s)",
                error.message,
                error.hint,
                self.url,
                pause_s,
            )
