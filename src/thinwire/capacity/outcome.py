"""What a simulation is asked besides the scenario, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))


class Cut(NamedTuple):
    """A region that reaches neither bucket nor hub for a while."""

    region: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class RegionRun:
    """What became of a region.

    Attributes:
        region: Its number.
        replica_count: Its replicas.
        bytes: What came in from the bucket.
        behind: Versions behind the head, by time and replica: "p50", "p95", "max".
        late_s: From a version's commit until it was served, of those that were; empty: none was.
    """

    region: int
    replica_count: int
    bytes: int
    behind: dict[str, int]
    late_s: dict[str, float]


@dataclass(frozen=True)
class Run:
    """What a simulation found.

    Attributes:
        step_count: Versions after the first.
        seconds: Simulated time.
        regions: What became of each.
        all_served_s: From a version's commit until the last replica that was there served it or a
            later one, of versions for which that was so: "p50", "p95", "max".
        updates: Updates that ended.
        joins: Of these, those that began with nothing.
        crashes: Replicas that crashed.
        hops: Of all updates, by kind: "steps" (each step), "merge", "anchor".
    """

    step_count: int
    seconds: float
    regions: list[RegionRun]
    all_served_s: dict[str, float]
    updates: int
    joins: int
    crashes: int
    hops: dict[str, int]


def quantiles(rising: Sequence[float]) -> dict[str, float]:
    """Of numbers that rise; none of nothing."""
    if not rising:
        return {}
    last = len(rising) - 1
    return {name: rising[min(last, int(q * len(rising)))] for name, q in _QUANTILES}


def weighted(seconds: dict[int, float]) -> dict[str, int]:
    """Of numbers by how long they held."""
    total = sum(seconds.values())
    found = {}
    for name, quantile in _QUANTILES:
        left = quantile * total
        found[name] = max(seconds, default=0)
        for behind in sorted(seconds):
            left -= seconds[behind]
            if left <= 1e-9 * total:
                found[name] = behind
                break
    return found
