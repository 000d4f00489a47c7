"""The store that a relay stands before, and whether it answers."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from thinwire.errors import ThinwireError, Unavailable
from thinwire.relay.workers import Workers
from thinwire.store import CountingStore, Store
from thinwire.store.clock import Clock, SystemClock
from thinwire.stream import keys
from thinwire.stream.encoding import MAX_SMALL_BYTES

T = TypeVar("T")

_LOG = logging.getLogger("thinwire")
PARALLEL = 16
# A passing failure is tried again so soon; then the store counts as away.
_WAITS_S = (0.1, 0.4)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 2.0
# A small request that takes longer shows that the store is away, though nothing failed yet.
_STALLED_S = 5.0
# Probes may hang as well; a new one finds out first that the store is back.
_MOST_PROBES = 40


class _Call(NamedTuple):
    began_s: float
    is_small: bool


class Upstream:
    """Calls to a store, which fail at once while it is away, but for one now and then.

    Args:
        store: The store, without retries: whoever waits for it must not wait for long.
        clock: Tells the time.

    Attributes:
        workers: Threads to call from.
        on_away: Called when it went away.
        on_back: Called when it came back.
    """

    def __init__(self, store: Store, clock: Clock | None = None) -> None:
        self._store = CountingStore(store)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, _Call] = {}
        self._away_since_s: float | None = None
        self._pause_s = 0.0
        self._next_try_s = 0.0
        self._probe_count = 0
        self.workers = Workers("thinwire-upstream", PARALLEL)
        self.on_away: Callable[[Unavailable], None] = lambda error: None
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
        return self._call(act, is_small)

    def _call(self, act: Callable[[Store], T], is_small: bool) -> T:
        number = next(self._numbers)
        self._running[number] = _Call(self._clock.now(), is_small)
        try:
            for wait_s in (*_WAITS_S, None):
                try:
                    found = act(self._store)
                    break
                except Unavailable as error:
                    if wait_s is None or self._away_since_s is not None:
                        self._failed(error)
                        raise
                    self._clock.sleep_until(self._clock.now() + wait_s)
        except Unavailable:
            raise
        except ThinwireError:
            self._answered()
            raise
        finally:
            self._running.pop(number, None)
        self._answered()
        return found

    def tick(self) -> None:
        """See whether it has stopped to answer, or answers again. To be called now and then."""
        now_s = self._clock.now()
        calls = list(self._running.values())
        if self._away_since_s is None:
            late_s = max((now_s - call.began_s for call in calls if call.is_small), default=0.0)
            if late_s > _STALLED_S:
                self._failed(Unavailable(f"{self.url} did not answer within {_STALLED_S:.0f} s"))
                # Whoever called hangs, and others are waiting.
                self.workers.renew()
                return
            if not any(now_s - call.began_s > _STALLED_S for call in calls):
                return
        with self._lock:
            if now_s < self._next_try_s or self._probe_count >= _MOST_PROBES:
                return
            self._probe_count += 1
            self._next_try_s = now_s + max(self._pause_s, _FIRST_PAUSE_S)
        threading.Thread(target=self._probe, name="thinwire-probe", daemon=True).start()

    def hurry(self) -> None:
        """There is a sign that it may be back: see at once."""
        with self._lock:
            self._next_try_s = 0.0
        if self._away_since_s is not None:
            self.tick()

    def _probe(self) -> None:
        """A small request beside those that may hang."""
        try:
            self._call(lambda store: store.get(keys.STREAM, limit_bytes=MAX_SMALL_BYTES), True)
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
            self.on_away(self.away())

    def _answered(self) -> None:
        with self._lock:
            since_s, self._away_since_s = self._away_since_s, None
            self._pause_s = 0.0
        if since_s is not None:
            _LOG.warning("%s is back after %.0f s", self.url, self._clock.now() - since_s)
            # Whatever hung while it was away may do so for long.
            self.workers.renew()
            self.on_back()
