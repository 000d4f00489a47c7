"""What a hub says of a stream, its regions and replicas. Decisions only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple, TypeVar

from thinwire.hub.bodies import Readiness
from thinwire.hub.replicas import Seen
from thinwire.hub.versions import UNKNOWN, History
from thinwire.report.messages import Counts, RegionStatus, ReplicaStatus

_N = TypeVar("_N", int, float)
_SERVING = ("ready", "updating")
# A replica may be faster than the hub. What the hub did not find so much later is none of the
# stream's: that was set back, or is another one.
_AHEAD_S = 5.0


class Rule(NamedTuple):
    """When replicas are ready.

    Attributes:
        max_staleness_steps: How far behind one may be; None: any distance.
        share: How many of all, from 0 to 1.
        min_count: How many at least.
        published: The version that the hub must have read by now: what they are behind counts from
            there or later.
        ignores_lost: Whether those that are lost are none of them; else they are not ready.
    """

    max_staleness_steps: int | None = None
    share: float = 1.0
    min_count: int = 1
    published: int = 0
    ignores_lost: bool = False


def is_believed(seen: Seen, looked_s: float | None) -> bool:
    """Whether a replica may still be at a version that the hub has yet to read.

    Args:
        seen: What it said.
        looked_s: When the stream was last read, by the clock of ``seen``; None: never.
    """
    return looked_s is None or looked_s < seen.version_s + _AHEAD_S


def status_of(
    seen: Seen, history: History, now_s: float, now_ms: int, looked_s: float | None = None
) -> ReplicaStatus:
    """A replica as it is now.

    Args:
        seen: What it said.
        history: What there is.
        now_s: The time by the clock of ``seen``.
        now_ms: The time by the publisher's kind of clock.
        looked_s: When the stream was last read, by the clock of ``seen``.
    """
    beat = seen.beat
    state, staleness, doubt = seen.state(now_s), UNKNOWN, ""
    if beat.kind == "replica":
        head = history.head
        if head is None or beat.version <= head.version or is_believed(seen, looked_s):
            doubt = history.doubt(beat.lineage, beat.version, beat.digest)
            staleness = history.staleness(
                beat.lineage, beat.version, beat.step, now_ms, beat.digest
            )
        else:
            doubt = f"the stream has no version {beat.version}: its newest is {head.version}"
    if doubt and state in _SERVING:
        state = "unready"
    return ReplicaStatus(
        beat=beat,
        state=state,
        staleness_steps=staleness.steps,
        staleness_s=staleness.seconds,
        seen_s=max(0.0, now_s - seen.seen_s),
        doubt=doubt,
    )


def counts_of(statuses: Iterable[ReplicaStatus]) -> Counts:
    """How many replicas are in which state."""
    found = Counter(one.state for one in statuses if one.beat.kind == "replica")
    return Counts(**{str(state): count for state, count in found.items()})


def regions_of(statuses: Iterable[ReplicaStatus]) -> list[RegionStatus]:
    """The regions, by name."""
    members: dict[str, list[ReplicaStatus]] = {}
    for one in statuses:
        members.setdefault(one.beat.region, []).append(one)
    return [_region(region, members[region]) for region in sorted(members)]


def _region(region: str, members: Sequence[ReplicaStatus]) -> RegionStatus:
    here = [one for one in members if one.state != "lost"]
    steps = sorted(one.staleness_steps for one in here if one.staleness_steps is not None)
    seconds = sorted(one.staleness_s for one in here if one.staleness_s is not None)
    return RegionStatus(
        region=region,
        counts=counts_of(members),
        relay_count=sum(one.beat.kind == "relay" for one in here),
        staleness_steps_p50=quantile(steps, 0.5),
        staleness_steps_p95=quantile(steps, 0.95),
        staleness_steps_max=quantile(steps, 1),
        staleness_s_max=quantile(seconds, 1),
        # What a relay gave crossed no border: its own bytes are among these.
        fetched_bytes=sum(
            max(0, one.beat.fetched_bytes - one.beat.relayed_bytes) for one in members
        ),
        served_bytes=sum(one.beat.served_bytes for one in members),
    )


def quantile(values: Sequence[_N], share: float) -> _N | None:
    """The smallest of some sorted values that so many of them do not exceed; None: there is none.

    Args:
        values: Sorted.
        share: Above 0, at most 1.
    """
    if not values:
        return None
    return values[_share_of(len(values), share) - 1]


def judge(statuses: Iterable[ReplicaStatus], rule: Rule) -> Readiness:
    """Whether enough replicas keep to a rule. Relays do not count.

    Of those that are lost nobody knows what they serve: they do not keep to it.
    """
    replicas = [one for one in statuses if one.beat.kind == "replica"]
    here = [one for one in replicas if one.state != "lost"]
    lost_count = len(replicas) - len(here)
    count = len(here) if rule.ignores_lost else len(replicas)
    ready_count = sum(_keeps(one, rule) for one in here)
    needed = max(_share_of(count, rule.share), rule.min_count)
    text = f"{ready_count} of {count} replicas are ready" if count else "no replica is known here"
    if rule.max_staleness_steps is not None:
        text += (
            f"{' and' if count else ', let alone'} at most {rule.max_staleness_steps} steps behind"
        )
    text += f"; {needed} must be"
    doubtful = [one for one in here if one.doubt]
    if doubtful:
        first = doubtful[0]
        text += f"; {len(doubtful)} serve what is not the stream's, as {first.beat.replica}: "
        text += first.doubt
    faults = [
        (one.beat.replica, one.beat.fault.code)
        for one in here
        if one.beat.fault is not None and not _keeps(one, rule)
    ]
    if faults:
        text += f"; {len(faults)} have a fault, as {faults[0][0]}: {faults[0][1]}"
    if lost_count:
        text += f"; {lost_count} more are lost" if rule.ignores_lost else f"; {lost_count} are lost"
    return Readiness(ready_count >= needed, text, ready_count, count)


def _share_of(count: int, share: float) -> int:
    """How many make up a share, at least one. 0.55 of 100 are 55, whatever floats say."""
    return max(1, ceil(share * count - 1e-9))


def _keeps(one: ReplicaStatus, rule: Rule) -> bool:
    if one.state not in _SERVING or one.staleness_steps is None:
        # Ready, but with what the stream does not have: any distance is not none that is known.
        return False
    return rule.max_staleness_steps is None or one.staleness_steps <= rule.max_staleness_steps
