"""The store that a relay stands before, and whether it answers."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeVar

from thinwire.errors import ThinwireError, Unavailable
from thinwire.follow.presence import KnownStore
from thinwire.relay.workers import Room, Workers
from thinwire.store import CountingStore, Store
from thinwire.store.clock import Clock, SystemClock
from thinwire.stream import keys
from thinwire.stream.encoding import MAX_SMALL_BYTES

T = TypeVar("T")

_LOG = logging.getLogger("thinwire")
# Of data. Records have threads of their own, as all followers wait for them, and so have listings
# and the lease, as nobody does.
PARALLEL = 16
_RECORD_THREADS = 4
_ASIDE_THREADS = 3
# What may be on its way from the store; one request, however large, always is.
FETCHING_BYTES = 96 << 20
# A passing failure is tried again so soon; then it is asked whether the store answers at all.
_WAITS_S = (0.1, 0.4)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 2.0
# A small request that takes longer shows that the store is away, though nothing failed yet.
_STALLED_S = 5.0
# Probes may hang as well; a new one finds out first that the store is back.
_MOST_PROBES = 40

_Kind = Literal["data", "small", "probe"]


class _Call(NamedTuple):
    began_s: float
    kind: _Kind


class Upstream:
    """Calls to a store, which fail at once while it is away, but for one now and then.

    It is away once a probe, a small request of its own, failed or hung: a call that fails shows
    only that what it asked for is not to be had, or that the store is busy.

    Args:
        store: The store, without retries: whoever waits for it must not wait for long.
        clock: Tells the time.

    Attributes:
        workers: Threads to fetch data from.
        record_workers: Threads to read records from.
        asides: Threads for listings and leases.
        on_stall: Called when calls hang: nobody is to wait for them any more.
        on_back: Called when it came back.
    """

    def __init__(self, store: Store, clock: Clock | None = None) -> None:
        self._known = KnownStore(store)
        self._store = CountingStore(self._known)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, _Call] = {}
        self._away_since_s: float | None = None
        self._pause_s = 0.0
        self._next_try_s = 0.0
        self._last_end_s = self._clock.now()
        self._probe_count = 0
        self._room = Room(FETCHING_BYTES)
        self.workers = Workers("thinwire-upstream", PARALLEL)
        self.record_workers = Workers("thinwire-records", _RECORD_THREADS)
        self.asides = Workers("thinwire-aside", _ASIDE_THREADS)
        self.on_stall: Callable[[Unavailable], None] = lambda error: None
        self.on_back: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        """Where it is; holds no credential."""
        return self._store.url

    @property
    def fetched_bytes(self) -> int:
        """What crossed the network."""
        return self._store.counts().downloaded_bytes

    @property
    def request_count(self) -> int:
        """Requests so far."""
        return sum(self._store.counts().requests.values())

    @property
    def away_s(self) -> float | None:
        """For how long it has not answered; None: it does."""
        since_s = self._away_since_s
        return None if since_s is None else self._clock.now() - since_s

    def expect_stream(self) -> None:
        """Say that there was a stream: where there is none, the store is away."""
        self._known.expect()

    def call(self, act: Callable[[Store], T], *, is_small: bool = False) -> T:
        """What ``act`` gives.

        Args:
            act: What to ask the store.
            is_small: Whether the answer is small, so that it comes soon or not at all.

        Raises:
            Unavailable: It does not answer. At once where it did not lately.
            ThinwireError: What it answered.
        """
        if self._away_since_s is not None:
            raise self.away()
        try:
            return self._call(act, "small" if is_small else "data")
        except Unavailable as error:
            if self._away_since_s is not None:
                raise self.away() from error
            self._probe_soon(0.0)
            raise

    def _call(self, act: Callable[[Store], T], kind: _Kind) -> T:
        number = next(self._numbers)
        self._running[number] = _Call(self._clock.now(), kind)
        try:
            for wait_s in (*_WAITS_S, None):
                try:
                    found = act(self._store)
                    break
                except Unavailable:
                    if wait_s is None or self._away_since_s is not None:
                        raise
                    self._clock.sleep_until(self._clock.now() + wait_s)
        except Unavailable:
            raise
        except ThinwireError:
            # That one thing is not there says nothing of a store that may have lost them all.
            self._answered(is_proof=kind == "probe")
            raise
        finally:
            self._running.pop(number, None)
        self._answered(is_proof=True)
        return found

    @contextmanager
    def taking(self, size_bytes: int) -> Iterator[None]:
        """Wait until so much more may be on its way, and count it meanwhile."""
        room = self._room
        while not room.take(size_bytes):
            room = self._room
        try:
            yield
        finally:
            room.give(size_bytes)

    def close(self) -> None:
        """End the threads once what was submitted is done; nothing waits for it."""
        for workers in (self.workers, self.record_workers, self.asides):
            workers.close()

    def tick(self) -> None:
        """See whether it has stopped to answer, or answers again. To be called now and then."""
        now_s = self._clock.now()
        late = {
            number: call
            for number, call in list(self._running.items())
            if now_s - call.began_s > _STALLED_S
        }
        if self._away_since_s is not None:
            self._give_up([number for number, call in late.items() if call.kind != "probe"])
            self._probe_soon(0.0)
        elif any(call.kind != "data" for call in late.values()):
            self._failed(Unavailable(f"{self.url} did not answer within {_STALLED_S:.0f} s"))
            self._give_up([*late])
        elif late and now_s - self._last_end_s > _STALLED_S:
            # Much may be under way over a thin link, or nothing moves any more.
            self._probe_soon(_STALLED_S)

    def _give_up(self, numbers: list[int]) -> None:
        """Go on without calls that hang."""
        if not numbers:
            return
        for number in numbers:
            self._running.pop(number, None)
        self._renew()
        self.on_stall(self.away())

    def _renew(self) -> None:
        before, self._room = self._room, Room(FETCHING_BYTES)
        for workers in (self.workers, self.record_workers, self.asides):
            workers.renew()
        before.retire()

    def _probe_soon(self, pause_s: float) -> None:
        """Ask on another thread whether it answers, unless that was done just now."""
        with self._lock:
            now_s = self._clock.now()
            if now_s < self._next_try_s or self._probe_count >= _MOST_PROBES:
                return
            threading.Thread(target=self._probe, name="thinwire-probe", daemon=True).start()
            self._probe_count += 1
            self._next_try_s = now_s + max(self._pause_s, _FIRST_PAUSE_S, pause_s)

    def hurry(self) -> None:
        """There is a sign that it may be back: see at once."""
        with self._lock:
            self._next_try_s = 0.0
        if self._away_since_s is not None:
            self.tick()

    def _probe(self) -> None:
        """A small request beside those that may hang."""
        try:
            self._call(lambda store: store.get(keys.STREAM, limit_bytes=MAX_SMALL_BYTES), "probe")
        except Unavailable as error:
            self._failed(error)
        except ThinwireError:
            pass
        finally:
            with self._lock:
                self._probe_count -= 1

    def away(self) -> Unavailable:
        """The error for what is not held here while the store is away."""
        away_s = self.away_s
        since = "" if away_s is None else f" since {away_s:.0f} s"
        return Unavailable(
            f"{self.url} does not answer{since}, and this is not held here",
            hint="What is held is served meanwhile; the rest when the store is back",
            url=self.url,
            is_away=True,
        )

    def _failed(self, error: Unavailable) -> None:
        with self._lock:
            now_s = self._clock.now()
            is_new = self._away_since_s is None
            if is_new:
                self._away_since_s, self._pause_s = now_s, _FIRST_PAUSE_S
            else:
                self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
            self._next_try_s = now_s + self._pause_s
        if is_new:
            _LOG.warning("%s is away: %s; what is held is served", self.url, error.message)

    def _answered(self, *, is_proof: bool) -> None:
        with self._lock:
            if self._away_since_s is not None and not is_proof:
                return
            since_s, self._away_since_s = self._away_since_s, None
            self._pause_s = 0.0
            self._last_end_s = self._clock.now()
        if since_s is not None:
            _LOG.warning("%s is back after %.0f s", self.url, self._clock.now() - since_s)
            # Whatever hung while it was away may do so for long.
            self._renew()
            self.on_back()
