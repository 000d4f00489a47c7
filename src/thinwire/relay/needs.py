"""Which versions a relay's followers still need, told to the stream as one lease."""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from thinwire.errors import AccessDenied, Unavailable
from thinwire.follow.leases import LeaseKeeper
from thinwire.store import Store
from thinwire.store.clock import Clock, SystemClock
from thinwire.stream.records import LEASE_TTL_S

_LOG = logging.getLogger("thinwire")
MAX_HOLDERS = 20_000
# Whoever may not write is asked again then: its rights may have been mended.
_REFUSED_S = 300.0


class Need(NamedTuple):
    """What a follower said that it needs, and when."""

    lineage: str
    version: int
    said_s: float


class Needs:
    """The leases of a relay's followers, by holder.

    Args:
        clock: Tells the time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._needs: dict[str, Need] = {}

    def __len__(self) -> int:
        return len(self._needs)

    def put(self, holder: str, lineage: str, version: int) -> None:
        """A follower needs a version.

        Raises:
            Unavailable: There are too many followers.
        """
        with self._lock:
            if holder not in self._needs and len(self._needs) >= MAX_HOLDERS:
                self._expire()
                if len(self._needs) >= MAX_HOLDERS:
                    raise Unavailable(f"{MAX_HOLDERS} followers hold leases here already")
            self._needs[holder] = Need(lineage, version, self._clock.now())

    def drop(self, holder: str, version: int) -> None:
        """A follower does not need a version any more, unless it said another one since."""
        with self._lock:
            need = self._needs.get(holder)
            if need is not None and need.version == version:
                del self._needs[holder]

    def oldest(self) -> Need | None:
        """The one of the smallest version; None: nobody needs any."""
        with self._lock:
            self._expire()
            return min(self._needs.values(), key=lambda need: need.version, default=None)

    def _expire(self) -> None:
        end_s = self._clock.now() - LEASE_TTL_S
        for holder in [h for h, need in self._needs.items() if need.said_s < end_s]:
            del self._needs[holder]


class UpstreamLease:
    """The one lease that a relay keeps at the store for all.

    Args:
        store: The store, without retries.
        needs: What the followers need.
        clock: Tells the time.
    """

    def __init__(self, store: Store, needs: Needs, clock: Clock | None = None) -> None:
        self._store = store
        self._needs = needs
        self._clock = clock or SystemClock()
        self._keeper = LeaseKeeper(store)
        self._lock = threading.Lock()
        self._version: int | None = None
        self._refused_s: float | None = None
        self._is_told = False
        self._is_tried = False

    @property
    def is_due(self) -> bool:
        """Whether an older version is needed than the store was told of."""
        oldest = self._needs.oldest()
        return oldest is not None and (self._version is None or oldest.version < self._version)

    @property
    def is_tried(self) -> bool:
        """Whether the store has taken or refused one."""
        return self._is_tried

    @property
    def _is_refused(self) -> bool:
        return self._refused_s is not None and self._clock.now() - self._refused_s < _REFUSED_S

    def check_may_write(self) -> None:
        """Let a follower that could write its own lease know that nobody writes one for it.

        Raises:
            AccessDenied: The store took none.
        """
        if self._is_refused:
            raise AccessDenied(
                "this relay may not write leases",
                hint="Let it write leases/, or let its followers write their own",
            )

    def renew(self) -> None:
        """Write it, where it is time to."""
        with self._lock:
            oldest = self._needs.oldest()
            if oldest is None:
                self._end()
                return
            if self._is_refused:
                return
            before = None
            if self._version is not None and oldest.version < self._version:
                # A keeper writes rarely, and this is needed now.
                before, self._keeper = self._keeper, LeaseKeeper(self._store)
            error = self._keeper.renew(oldest.lineage, oldest.version)
            if error is None:
                self._written(before, oldest.version)
                return
            if before is not None:
                self._keeper = before
            elif not error.retryable:
                # That one writes no more.
                self._keeper, self._version = LeaseKeeper(self._store), None
            if isinstance(error, AccessDenied):
                self._refused_s, self._is_tried = self._clock.now(), True
            if not self._is_told:
                self._is_told = True
                _LOG.warning(
                    "%s: what the followers of this relay need is told nowhere, so maintainers"
                    " keep only what the policy says",
                    error.message,
                )

    def end_unneeded(self) -> None:
        """Remove it, unless somebody needs it: it ends by itself."""
        with self._lock:
            if self._needs.oldest() is None:
                self._end()

    def _written(self, before: LeaseKeeper | None, version: int) -> None:
        if before is not None:
            before.end()
        self._version, self._refused_s, self._is_tried = version, None, True
        if self._is_told:
            self._is_told = False
            _LOG.warning("what the followers of this relay need is told again")

    def _end(self) -> None:
        self._keeper.end()
        self._keeper, self._version = LeaseKeeper(self._store), None
