"""How ``thinwire plan`` shows what it found."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from thinwire.capacity.timing import RUN_VERSIONS
from thinwire.cli.output import NONE, print_table
from thinwire.cli.output import duration as long_duration

if TYPE_CHECKING:
    from thinwire.capacity.demand import Cost
    from thinwire.capacity.model import Plan
    from thinwire.capacity.outcome import Run

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def size(count: float) -> str:
    """Bytes for people."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def time(seconds: float) -> str:
    """A time for people."""
    if seconds >= 120:
        return long_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def number(value: float, unit: str) -> str:
    """A limit's value for people."""
    if unit == "bytes":
        return size(value)
    if unit == "s":
        return time(value)
    return f"{value:,.0f} {unit}".strip()


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything, for machines."""
    content = asdict(plan)
    content["scenario"]["policy"] = msgspec.structs.asdict(plan.scenario.policy)
    content["timing"]["total_s"] = plan.timing.total_s
    content["timing"]["bottleneck"] = plan.timing.bottleneck.name
    content["day_cost"] = asdict(plan.day_cost)
    for limit, found in zip(content["limits"], plan.limits, strict=True):
        limit["status"] = found.status
    return content


def print_plan(plan: Plan) -> None:
    """Tables for people."""
    _print_bytes(plan)
    _print_time(plan)
    _print_hosts(plan)
    _print_requests(plan)
    _print_cost(plan)
    _print_limits(plan)
    for note in plan.notes:
        print(f"note: {note}")


def print_run(run: Run) -> None:
    """What a simulation found."""
    print()
    rows = [
        [f"region {region.region}", str(region.replica_count), size(region.bytes)]
        + [str(region.behind[q]) for q in ("p50", "p95", "max")]
        + [time(region.late_s[q]) if region.late_s else NONE for q in ("p50", "p95", "max")]
        for region in run.regions
    ]
    print_table(
        [
            f"simulated, {run.step_count} versions",
            "replicas",
            "bytes",
            "behind p50",
            "p95",
            "max",
            "served after p50",
            "p95",
            "max",
        ],
        rows,
    )
    print(
        f"{run.updates:,} updates, {run.joins:,} joins, {run.crashes:,} crashes; "
        f"routes: {', '.join(f'{count:,} by {kind}' for kind, count in run.hops.items())}"
    )


def _print_bytes(plan: Plan) -> None:
    payload, traffic, scenario = plan.payload, plan.traffic, plan.scenario
    rows = [
        ["weights", f"{scenario.params:,} in {scenario.tensors:,}", size(scenario.raw_bytes)],
        [
            "a version",
            f"{payload.delta.count:,} x {size(payload.delta.size)}",
            size(payload.delta.total_bytes),
        ],
        [
            "",
            f"{payload.bits_per_change:.2f} bits a change",
            f"{100 * traffic.of_full:.3f} % of full",
        ],
        ["its manifest", "", size(payload.delta_manifest_bytes)],
        [
            "an anchor",
            f"{payload.anchor.count:,} x {size(payload.anchor.size)}",
            size(payload.anchor.total_bytes),
        ],
        ["into the fullest region, a version", "", size(traffic.region)],
        ["into all regions, a version", "", size(traffic.cross)],
        ["from each relay, a version", "", size(traffic.relay) if traffic.relay else NONE],
        ["to each replica, a version", "", size(traffic.replica)],
        ["a join", f"{plan.join.object_count} anchors and deltas", size(plan.join.total_bytes)],
    ]
    print_table(["bytes", "how", "size"], rows, left=2)
    print()


def _print_time(plan: Plan) -> None:
    timing = plan.timing
    rows = [[p.name, p.bound_by, time(p.seconds)] for p in timing.phases]
    print_table(
        ["time to all replicas", "bound by", "takes"],
        rows,
        total=["all", f"longest: {timing.bottleneck.name}", time(timing.total_s)],
        left=2,
    )
    every = plan.scenario.step_s
    if timing.catch_up_versions == 0:
        behind = f"replicas never keep up with a version every {time(every)}"
    elif timing.behind_versions < 0:
        behind = f"the trainer's side does not keep up with a version every {time(every)}"
    else:
        count = timing.catch_up_versions
        at_once = "each version" if count == 1 else f"merged deltas of {count} versions"
        if count == RUN_VERSIONS:
            at_once = "versions in runs, fetching one while they take another,"
        behind = f"replicas take {at_once} and are at most {timing.behind_versions} behind"
    print(f"{behind}; training waits {time(timing.stall_s)}, engines {time(timing.pause_s)}")
    print()


def _print_hosts(plan: Plan) -> None:
    memory, disk = plan.memory, plan.disk
    rows = [
        ["trainer rank", size(memory.trainer_rank), size(disk.publisher)],
        ["first rank, while ranks meet", size(memory.first_rank), NONE],
        ["follower", size(memory.follower), size(disk.follower)],
        ["maintainer", size(memory.maintainer), size(disk.maintainer)],
        ["relay", size(memory.relay), size(disk.relay)],
        ["hub", size(memory.hub), NONE],
        ["bucket", NONE, size(disk.bucket)],
    ]
    print_table(["host", "memory", "disk"], rows)
    print()


def _print_requests(plan: Plan) -> None:
    everything = plan.all_requests
    rows = [
        [who, f"{r.put:,.1f}", f"{r.get:,.0f}", f"{r.list:,.0f}"]
        for who, r in plan.requests.items()
    ]
    total = ["all", f"{everything.put:,.1f}", f"{everything.get:,.0f}", f"{everything.list:,.0f}"]
    print_table(["requests at the bucket, a version", "put", "get", "list"], rows, total=total)
    print()


def _print_cost(plan: Plan) -> None:
    def row(name: str, cost: Cost) -> list[str]:
        parts = (cost.egress, cost.requests, cost.storage, cost.total)
        return [name, *(f"{part:,.4f}" if part < 10 else f"{part:,.0f}" for part in parts)]

    rows = [
        row("a version", plan.cost),
        row("a day", plan.day_cost),
        row("a version as a full checkpoint", plan.full_cost),
        row("a version as arc_v3", plan.arc3_cost),
    ]
    print_table(["$", "egress", "requests", "storage", "all"], rows)
    print()


def _print_limits(plan: Plan) -> None:
    rows = [
        [
            limit.status,
            limit.name,
            number(limit.value, limit.unit),
            number(limit.limit, limit.unit),
            f"{limit.share:.3g}",
        ]
        for limit in sorted(plan.limits, key=lambda limit: -limit.share)
    ]
    print_table(["", "limit", "here", "there may be", "share"], rows, left=2)
    for limit in plan.hit:
        print(f"EXCEEDED: {limit.name} ({limit.where}). {limit.advice}")
