"""The replicas of a stream: what each said last, and what that means by now. Decisions only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from thinwire.report.messages import MAX_UPDATES, Heartbeat, UpdateNote

State = Literal["ready", "updating", "joining", "unready", "lost"]

# A few hundred a second are a small share of one processor.
MAX_BEATS_PER_S = 200
# After three heartbeats that did not come, and some time for the last of them.
_MISSED_BEATS = 3
_GRACE_S = 5.0


class FleetLimits(NamedTuple):
    """What is kept of one stream's replicas.

    Attributes:
        replicas: How many, those that are lost for less than ``forget_s`` among them.
        regions: How many regions they may be in.
        updates: How many updates the timeline holds.
        forget_s: How long one that is lost stays known, while others of its region are not.
        forget_region_s: How long the last ones of a region do: it may be cut off, and be missed.
        settle_s: How long after its start a hub waits before it says that a fleet is ready: by then
            those have said so that an earlier hub knew.
        interval_s: How long a replica waits between two heartbeats, at least.
    """

    replicas: int = 10_000
    regions: int = 256
    updates: int = 2_000
    forget_s: float = 3_600.0
    forget_region_s: float = 86_400.0
    settle_s: float = 20.0
    interval_s: float = 2.0


class FleetFull(Exception):
    """A limit of the fleet is reached; the message says which."""


@dataclass(slots=True)
class Seen:
    """One replica.

    Attributes:
        beat: What it said last, without its updates.
        seen_s: When.
        version_s: Since when it is at that version.
        lost_after_s: How long after it was last heard of it counts as lost.
        is_lost: Whether it was when somebody last looked.
        told: Which of its updates are in the timeline.
    """

    beat: Heartbeat
    seen_s: float
    version_s: float
    lost_after_s: float
    is_lost: bool = False
    told: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=2 * MAX_UPDATES))

    def state(self, now_s: float) -> State:
        """What it is now."""
        beat = self.beat
        if now_s - self.seen_s > self.lost_after_s:
            return "lost"
        if not beat.is_ready:
            return "joining" if beat.fault is None else "unready"
        if beat.phase != "idle" and beat.target not in (0, beat.version):
            return "updating"
        return "ready"


class Fleet:
    """All replicas of a stream, by name.

    Times are of a clock that only goes forward.

    Args:
        limits: What is kept.
    """

    def __init__(self, limits: FleetLimits | None = None) -> None:
        self._limits = limits or FleetLimits()
        self._seen: dict[str, Seen] = {}
        self._region_sizes: dict[str, int] = {}
        self._sorted: list[str] | None = None
        self.updates: deque[UpdateNote] = deque(maxlen=self._limits.updates)

    def __len__(self) -> int:
        return len(self._seen)

    def find(self, replica: str) -> Seen | None:
        """A replica."""
        return self._seen.get(replica)

    def sorted(self, after: str = "") -> Iterator[Seen]:
        """Those whose names come after one, in the order of names."""
        if self._sorted is None:
            self._sorted = sorted(self._seen)
        for name in self._sorted:
            if name > after:
                yield self._seen[name]

    def interval_s(self) -> float:
        """How long each should wait between two heartbeats: all together, so many a second."""
        return max(self._limits.interval_s, len(self._seen) / MAX_BEATS_PER_S)

    def beat(self, beat: Heartbeat, now_s: float) -> bool:
        """Take in what a replica says; whether anybody would see a change.

        Raises:
            FleetFull: It is new, or its region is, and there are too many.
        """
        seen = self._seen.get(beat.replica)
        is_new_region = beat.region not in self._region_sizes
        if is_new_region and len(self._region_sizes) >= self._limits.regions:
            raise FleetFull(f"{self._limits.regions} regions are known, and {beat.region} is not")
        if seen is None and len(self._seen) >= self._limits.replicas:
            self._make_room(now_s)
        kept = msgspec.structs.replace(beat, updates=[])
        lost_after_s = _MISSED_BEATS * self.interval_s() + _GRACE_S
        if seen is None:
            seen = self._seen[beat.replica] = Seen(kept, now_s, now_s, lost_after_s)
            self._sorted = None
            self._count_region(beat.region, 1)
            is_changed = True
        else:
            is_changed = seen.is_lost or _visible(kept) != _visible(seen.beat)
            if seen.beat.region != beat.region:
                self._count_region(seen.beat.region, -1)
                self._count_region(beat.region, 1)
            if _served(seen.beat) != _served(beat):
                seen.version_s = now_s
            seen.beat, seen.seen_s, seen.lost_after_s = kept, now_s, lost_after_s
            seen.is_lost = False
        for update in beat.updates:
            key = (update.version, update.ended_ms)
            # Those of a heartbeat whose answer was lost come again.
            if key not in seen.told:
                seen.told.append(key)
                self.updates.append(
                    msgspec.structs.replace(update, replica=beat.replica, region=beat.region)
                )
                is_changed = True
        return is_changed

    def leave(self, replica: str) -> bool:
        """Forget a replica that left; whether it was known."""
        seen = self._seen.pop(replica, None)
        if seen is None:
            return False
        self._sorted = None
        self._count_region(seen.beat.region, -1)
        return True

    def sweep(self, now_s: float) -> int:
        """Forget those that are lost for long; how many are lost, or gone, since the last sweep."""
        changed_count = 0
        limits = self._limits
        living = {
            one.beat.region
            for one in self._seen.values()
            if now_s - one.seen_s <= one.lost_after_s and one.beat.kind == "replica"
        }
        for name, seen in list(self._seen.items()):
            silent_s = now_s - seen.seen_s
            is_alone = seen.beat.kind == "replica" and seen.beat.region not in living
            forget_s = max(limits.forget_s, limits.forget_region_s if is_alone else 0.0)
            if silent_s > seen.lost_after_s + forget_s:
                self.leave(name)
                changed_count += 1
            elif silent_s > seen.lost_after_s and not seen.is_lost:
                seen.is_lost = True
                changed_count += 1
        return changed_count

    def _make_room(self, now_s: float) -> None:
        """Forget whoever is lost for longest."""
        oldest = min(self._seen.values(), key=lambda seen: seen.seen_s, default=None)
        if oldest is None or oldest.state(now_s) != "lost":
            raise FleetFull(f"{self._limits.replicas} replicas are known, and no more are taken")
        self.leave(oldest.beat.replica)

    def _count_region(self, region: str, change: int) -> None:
        size = self._region_sizes.get(region, 0) + change
        if size > 0:
            self._region_sizes[region] = size
        else:
            self._region_sizes.pop(region, None)


def _served(beat: Heartbeat) -> tuple[str, int, str]:
    return beat.lineage, beat.version, beat.digest


def _visible(beat: Heartbeat) -> Heartbeat:
    """Without what changes while nothing happens."""
    return msgspec.structs.replace(beat, phase_s=0.0)
