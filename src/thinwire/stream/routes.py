"""From have to target: which anchor, merged deltas and step deltas, for the fewest bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from thinwire.errors import HistoryPruned

# What a request costs beside its bytes: about what a link of 100 Mbit/s moves in 0.3 ms. Enough to
# prefer one object to several of the same size, too little to fetch a tenth more.
OBJECT_BYTES = 4096


class Hop(NamedTuple):
    """One thing to fetch and apply. An anchor needs no base; step deltas come as a run."""

    kind: Literal["anchor", "merge", "steps"]
    base: int
    version: int


class Options(NamedTuple):
    """What there is to go by.

    Attributes:
        anchors: Bytes of each anchor by version.
        merges: Bytes of each merged delta by (base, version).
        steps_from: Step deltas exist for every version after this one.
        step_bytes: About what a step delta has.
        broken: Versions whose own step delta cannot be used.
    """

    anchors: Mapping[int, int]
    merges: Mapping[tuple[int, int], int]
    steps_from: int
    step_bytes: int
    broken: frozenset[int] = frozenset()


def plan_route(have: int | None, target: int, options: Options) -> list[Hop]:
    """The cheapest way from version ``have``, or from nothing, to ``target``.

    The shortest path in a graph whose edges all lead to later versions, found in one pass over its
    nodes. An anchor is an edge from nowhere.

    Raises:
        HistoryPruned: There is no way.
    """
    if have == target:
        return []
    points = {target, *options.anchors}
    points.update(version for merge in options.merges for version in merge)
    if have is not None:
        points.add(have)
    low = min((v for v in (have, *options.anchors) if v is not None), default=target)
    nodes = sorted(v for v in points if low <= v <= target)
    into: dict[int, list[tuple[int, int]]] = {}
    for (base, version), size in options.merges.items():
        into.setdefault(version, []).append((base, size))
    cost: dict[int, int] = {} if have is None else {have: 0}
    came: dict[int, Hop] = {}
    for at, before in zip(nodes, [None, *nodes], strict=False):
        hops: list[tuple[int, Hop]] = []
        if at in options.anchors:
            hops.append((options.anchors[at] + OBJECT_BYTES, Hop("anchor", 0, at)))
        if before is not None and before in cost and _has_steps(before, at, options):
            count = at - before
            size = cost[before] + count * (options.step_bytes + OBJECT_BYTES)
            hops.append((size, Hop("steps", before, at)))
        for base, size in into.get(at, ()):
            if base in cost:
                hops.append((cost[base] + size + OBJECT_BYTES, Hop("merge", base, at)))
        if not hops:
            continue
        best, hop = min(hops)
        if best < cost.get(at, best + 1):
            cost[at], came[at] = best, hop
    if target not in cost:
        raise HistoryPruned(
            f"there is no way to version {target}"
            + ("" if have is None else f" from version {have}"),
            hint="Choose a newer version: older ones are kept as long as the stream's policy says",
            target=target,
            have=have,
        )
    return _walk_back(came, target)


def route_bytes(route: Collection[Hop], options: Options) -> int:
    """About what a route fetches."""
    total = 0
    for hop in route:
        if hop.kind == "anchor":
            total += options.anchors[hop.version]
        elif hop.kind == "merge":
            total += options.merges[hop.base, hop.version]
        else:
            total += (hop.version - hop.base) * options.step_bytes
    return total


def _has_steps(base: int, version: int, options: Options) -> bool:
    """Whether every version after ``base`` up to ``version`` has a usable step delta."""
    is_broken = any(base < broken <= version for broken in options.broken)
    return base >= options.steps_from and not is_broken


def _walk_back(came: Mapping[int, Hop], target: int) -> list[Hop]:
    route: list[Hop] = []
    at = target
    while at in came:
        route.append(came[at])
        if came[at].kind == "anchor":
            break
        at = came[at].base
    return route[::-1]
