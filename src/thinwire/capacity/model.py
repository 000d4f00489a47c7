"""The whole model: a scenario in, what it takes out. Nothing is read, asked or timed."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.capacity import tables
from thinwire.capacity.demand import (
    DAY_S,
    Cost,
    Disk,
    Join,
    Memory,
    Requests,
    Traffic,
    arc3_ratio,
    cost_of,
    disk_of,
    join_of,
    maintainer_requests,
    memory_of,
    publisher_requests,
    relay_requests,
    replica_requests,
    traffic_of,
)
from thinwire.capacity.history import History, grown
from thinwire.capacity.limits import Limit, limits_of
from thinwire.capacity.payload import Payload, payload_of
from thinwire.capacity.scenario import Scenario
from thinwire.capacity.timing import Timing, timing_of

# Longer runs hold no more: what is kept is bounded by the policy.
MAX_HISTORY = 4_096


@dataclass(frozen=True)
class Plan:
    """What a scenario takes.

    Attributes:
        scenario: What was asked.
        payload: The objects of a version.
        traffic: Bytes of a version.
        timing: From the step's end to the last replica.
        requests: At the bucket, for a version, by who makes them.
        memory: Of each kind of process.
        disk: Of each kind of host.
        join: A replica that begins with nothing.
        cost: Dollars of a version.
        full_cost: Dollars of a version as a full checkpoint, by the same links and relays.
        arc3_cost: Dollars of a version in Fireworks' arc_v3, likewise.
        arc3_ratio: Our bytes over arc_v3's.
        limits: Every limit that was looked at.
        notes: What the model does not know.
    """

    scenario: Scenario
    payload: Payload
    traffic: Traffic
    timing: Timing
    requests: dict[str, Requests]
    memory: Memory
    disk: Disk
    join: Join
    cost: Cost
    full_cost: Cost
    arc3_cost: Cost
    arc3_ratio: float
    limits: list[Limit]
    notes: list[str]

    @property
    def day_cost(self) -> Cost:
        """Dollars of a day."""
        return self.cost.times(DAY_S / self.scenario.step_s)

    @property
    def all_requests(self) -> Requests:
        """At the bucket, for a version."""
        return sum(self.requests.values(), Requests())

    @property
    def hit(self) -> list[Limit]:
        """The limits that are exceeded."""
        return [limit for limit in self.limits if limit.status == "exceeded"]


def plan_of(scenario: Scenario) -> Plan:
    """What a scenario takes."""
    payload = payload_of(scenario)
    history = grown(history_of(scenario, payload), min(scenario.versions, MAX_HISTORY))
    traffic = traffic_of(scenario, payload)
    timing = timing_of(scenario, payload.delta)
    memory = memory_of(scenario, payload)
    requests = {"publisher": publisher_requests(payload)}
    if scenario.has_relay:
        requests["relays"] = relay_requests(scenario, payload)
    requests["replicas"] = replica_requests(scenario, payload)
    requests["maintainer"] = maintainer_requests(scenario, payload, history)
    everything = sum(requests.values(), Requests())
    join = join_of(history)
    joins = scenario.joins_per_day * scenario.step_s / DAY_S
    if scenario.has_relay:
        # A relay that holds the anchor passes it on: at most one for each relay crosses.
        joins = min(joins, float(scenario.relay_count))
    crossing = traffic.cross + joins * join.total_bytes
    copies = scenario.relay_count if scenario.has_relay else scenario.replicas
    ratio = arc3_ratio(scenario)
    disk = disk_of(scenario, payload, history)
    raw = scenario.raw_bytes
    # Kept as long as the versions here are.
    kept = history.head - history.steps_from + 1
    return Plan(
        scenario,
        payload,
        traffic,
        timing,
        requests,
        memory,
        disk,
        join,
        cost_of(scenario, everything, crossing, disk.bucket),
        cost_of(scenario, everything, raw * copies, raw * kept),
        cost_of(scenario, everything, crossing / ratio, disk.bucket / ratio),
        ratio,
        limits_of(scenario, payload, timing, traffic, memory),
        _notes(scenario),
    )


def history_of(scenario: Scenario, payload: Payload) -> History:
    """The stream's first version."""
    return History(scenario.policy, payload.delta.total_bytes, scenario.raw_bytes, scenario.step_s)


def _notes(scenario: Scenario) -> list[str]:
    notes = []
    if not scenario.bits_per_change:
        if scenario.dtype != "BF16":
            notes.append(
                f"bits a change were measured on BF16 only; {scenario.dtype} is taken to be the "
                "same (--bits-per-change)"
            )
        if not tables.is_covered(tables.BITS_PER_CHANGE, scenario.changed):
            notes.append("the changed share lies beyond what was measured")
    if not tables.is_covered(tables.OF_ARC3, scenario.changed):
        notes.append("our bytes over arc_v3's were measured at 0.07 to 1.2 % changed")
    if scenario.ranks > 1:
        notes.append("what ranks send each other to encode chunks that they share is not in it")
    if scenario.has_relay or scenario.has_hub:
        notes.append("hub and relay are taken by their bars, not by a run of this size")
    return notes
