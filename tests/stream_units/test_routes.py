"""The plan is the shortest path, and short enough."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import HistoryPruned
from thinwire.maintain.merging import due_merges
from thinwire.stream.records import Policy
from thinwire.stream.retention import anchor_place, is_anchor_due
from thinwire.stream.routes import OBJECT_BYTES, Hop, Options, plan_route, route_bytes

LEVELS = Policy().merge_levels
SIZES = st.integers(0, 100_000)


@st.composite
def options(draw: st.DrawFn, newest: int = 14) -> Options:
    versions = st.integers(1, newest)
    pairs = st.tuples(versions, versions).filter(lambda pair: pair[0] < pair[1])
    return Options(
        anchors=draw(st.dictionaries(versions, SIZES, max_size=3)),
        merges=draw(st.dictionaries(pairs, SIZES, max_size=10)),
        steps_from=draw(st.integers(1, newest)),
        step_bytes=draw(SIZES),
        broken=draw(st.frozensets(versions, max_size=2)),
    )


def cheapest(have: int | None, target: int, o: Options) -> int | None:
    """The cost of the best way, found edge by edge and version by version."""
    cost = {} if have is None else {have: 0}
    for at in range(1, target + 1):
        ways = [cost[at]] if at in cost else []
        if at in o.anchors:
            ways.append(o.anchors[at] + OBJECT_BYTES)
        if at - 1 in cost and at - 1 >= o.steps_from and at not in o.broken:
            ways.append(cost[at - 1] + o.step_bytes + OBJECT_BYTES)
        ways += [
            cost[base] + size + OBJECT_BYTES
            for (base, version), size in o.merges.items()
            if version == at and base in cost
        ]
        if ways:
            cost[at] = min(ways)
    return cost.get(target)


def object_count(route: list[Hop]) -> int:
    """Shards and anchors to fetch."""
    return sum(hop.version - hop.base if hop.kind == "steps" else 1 for hop in route)


def check_route(route: list[Hop], have: int | None, target: int, o: Options) -> None:
    """Every hop is there, and each starts where the one before ends."""
    at = have
    for index, hop in enumerate(route):
        if hop.kind == "anchor":
            assert index == 0
            assert hop.version in o.anchors
        else:
            assert hop.base == at
            if hop.kind == "merge":
                assert (hop.base, hop.version) in o.merges
            else:
                assert hop.base >= o.steps_from
                assert not o.broken & set(range(hop.base + 1, hop.version + 1))
        at = hop.version
    assert at == target


@settings(max_examples=150, deadline=None)
@given(options(), st.none() | st.integers(1, 14), st.integers(1, 14))
def test_plan_is_the_shortest_path(o: Options, have: int | None, target: int) -> None:
    best = cheapest(have, target, o)
    if have == target:
        best = 0
    if best is None:
        with pytest.raises(HistoryPruned):
            plan_route(have, target, o)
        return
    route = plan_route(have, target, o)
    check_route(route, have, target, o)
    assert route_bytes(route, o) + OBJECT_BYTES * object_count(route) == best


def test_nothing_to_do() -> None:
    assert plan_route(5, 5, Options({}, {}, 9, 1)) == []


def test_step_by_step_from_what_is_held() -> None:
    o = Options({1: 1000}, {}, 1, 10)
    assert plan_route(3, 7, o) == [Hop("steps", 3, 7)]
    assert plan_route(None, 3, o) == [Hop("anchor", 0, 1), Hop("steps", 1, 3)]


def test_an_anchor_that_is_cheaper_than_what_lies_between() -> None:
    o = Options({1: 10**6, 8: 10**6}, {}, 1, 10**6)
    assert plan_route(2, 9, o) == [Hop("anchor", 0, 8), Hop("steps", 8, 9)]


def test_one_object_is_preferred_to_two_of_the_same_bytes() -> None:
    o = Options({}, {(1, 3): 2000}, 1, 1000)
    assert plan_route(1, 3, o) == [Hop("merge", 1, 3)]


def test_pruned_steps_and_a_broken_version_are_avoided() -> None:
    o = Options({1: 9}, {(1, 5): 500_000}, 5, 1)
    assert plan_route(None, 6, o) == [Hop("anchor", 0, 1), Hop("merge", 1, 5), Hop("steps", 5, 6)]
    with pytest.raises(HistoryPruned):
        plan_route(None, 4, o)
    with pytest.raises(HistoryPruned) as caught:
        plan_route(None, 6, o._replace(broken=frozenset({6})))
    assert caught.value.context == {"target": 6, "have": None}


def test_going_back_needs_an_anchor() -> None:
    with pytest.raises(HistoryPruned):
        plan_route(9, 3, Options({}, {}, 1, 1))
    o = Options({2: 100}, {}, 1, 1)
    assert plan_route(9, 3, o) == [Hop("anchor", 0, 2), Hop("steps", 2, 3)]


def merged_bytes(step_bytes: int, anchor_bytes: int) -> dict[tuple[int, int], int]:
    """Default merges up to version 4200: the wider, the fewer bytes per version."""
    pairs = due_merges(1, 4200, 1, LEVELS, ())
    return {(b, v): int(min(0.6 * anchor_bytes, step_bytes * (v - b) ** 0.9)) for b, v in pairs}


@pytest.mark.parametrize("share", [0.0003, 0.003])
def test_any_target_from_the_first_anchor(share: float) -> None:
    """With nothing but the first anchor, the objects grow with the logarithm of the target."""
    anchor_bytes = 10**9
    step_bytes = int(share * anchor_bytes)
    merges = merged_bytes(step_bytes, anchor_bytes)
    o = Options({1: anchor_bytes}, merges, 1, step_bytes)
    for target in [*range(1, 4200, 41), 1000, 1024, 2048, 4096, 4200]:
        route = plan_route(None, target, o)
        assert route[0] == Hop("anchor", 0, 1)
        limit = 15 if target <= 1024 else 16 if target <= 2048 else 18
        assert object_count(route) - 1 <= limit, target
        check_route(route, None, target, o)
        # The fewest bytes alone, whatever the number of objects.
        digits = target - 1
        fewest = 0
        for level in reversed([1, *LEVELS]):
            count, digits = divmod(digits, level)
            fewest += count * (step_bytes if level == 1 else merges[1, 1 + level])
        assert route_bytes(route, o) <= 1.25 * (anchor_bytes + fewest)


@pytest.mark.parametrize("share", [0.0007, 0.002, 0.005, 0.02])
def test_joiner_with_default_policy(share: float) -> None:
    """The bar: a joiner at up to version 1000 takes one anchor and at most 16 deltas."""
    anchor_bytes = 10**9
    step_bytes = int(share * anchor_bytes)
    merges = merged_bytes(step_bytes, anchor_bytes)
    merges = {pair: size for pair, size in merges.items() if pair[1] <= 1000}
    anchors = {1: anchor_bytes}
    for head in range(1, 1001):
        o = Options(anchors, merges, 1, step_bytes)
        if is_anchor_due(Policy(), max(anchors), head, o, anchor_bytes):
            place = anchor_place(1, max(anchors), head, LEVELS)
            assert max(anchors) < place <= head
            anchors[place] = anchor_bytes
        route = plan_route(None, head, o)
        assert object_count(route) - 1 <= 16
        if head % 9:
            continue
        best = min(plan_bytes(anchor, head, o) for anchor in anchors if anchor <= head)
        assert route_bytes(route, o) <= 1.25 * best


def plan_bytes(anchor: int, head: int, o: Options) -> int:
    """The bytes of the best way from one anchor."""
    return o.anchors[anchor] + route_bytes(plan_route(anchor, head, o._replace(anchors={})), o)


@pytest.mark.parametrize("newest", [1, 5, 64, 65, 66])
def test_anchors_come_where_merged_deltas_begin(newest: int) -> None:
    for head in range(newest + 1, newest + 200):
        place = anchor_place(1, newest, head, LEVELS)
        assert newest < place <= head
        assert head - place < 64
        levels = [n for n in (64, 16, 4) if head - (head - 1) % n > newest]
        assert place == head or (place - 1) % levels[0] == 0
