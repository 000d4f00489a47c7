"""Whatever was promised stays reachable, from nothing and from everything that is kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import HistoryPruned
from thinwire.maintain.merging import due_merges
from thinwire.stream.records import Policy
from thinwire.stream.retention import decide_kept, is_anchor_due, oldest_kept
from thinwire.stream.routes import Options, plan_route

from .test_routes import options


@settings(max_examples=120, deadline=None)
@given(options(), st.integers(1, 14), st.integers(1, 4))
def test_every_kept_version_stays_reachable(o: Options, oldest: int, first: int) -> None:
    # Anchors of the lineage, and step deltas from the oldest that can be kept on.
    o = o._replace(
        anchors={v: size for v, size in o.anchors.items() if v >= first},
        broken=frozenset(),
        steps_from=min(o.steps_from, max(oldest, first)),
    )
    try:
        plan_route(None, max(oldest, first), o)
    except HistoryPruned:
        with pytest.raises(HistoryPruned):
            decide_kept(oldest, first, o)
        return
    kept = decide_kept(oldest, first, o)
    assert kept.oldest == max(oldest, first)
    assert kept.anchors <= set(o.anchors)
    assert kept.merges <= set(o.merges)
    assert kept.steps_from >= o.steps_from or kept.steps_from <= kept.oldest
    left = Options(
        {v: o.anchors[v] for v in kept.anchors},
        {pair: o.merges[pair] for pair in kept.merges},
        kept.steps_from,
        o.step_bytes,
    )
    for target in range(kept.oldest, 15):
        for have in [None, *range(kept.oldest, target)]:
            plan_route(have, target, left)


def test_what_nobody_needs_goes() -> None:
    o = Options({1: 9, 5: 9, 9: 9}, {(1, 3): 1, (3, 5): 1, (5, 7): 1, (7, 9): 1}, 1, 10**6)
    kept = decide_kept(9, 1, o)
    assert kept.anchors == {9}
    assert kept.merges == set()
    assert kept.steps_from == 9


def test_the_way_to_the_oldest_stays() -> None:
    o = Options({1: 9}, {(1, 5): 1, (5, 9): 1, (1, 3): 1}, 1, 10**6)
    kept = decide_kept(9, 1, o)
    assert kept.anchors == {1}
    assert kept.merges == {(1, 5), (5, 9)}
    assert kept.steps_from == 9


def test_step_deltas_on_the_way_stay() -> None:
    kept = decide_kept(4, 1, Options({1: 9}, {}, 1, 10))
    assert kept.steps_from == 1


@given(
    st.dictionaries(st.integers(1, 50), st.floats(0, 1e6), min_size=1),
    st.lists(st.integers(1, 50)),
    st.integers(0, 60),
    st.integers(0, 10**6),
)
def test_oldest_kept(
    ages: dict[int, float], leased: list[int], keep_versions: int, keep_age_s: int
) -> None:
    head = max(ages)
    policy = Policy(keep_versions=keep_versions, keep_age_s=keep_age_s)
    oldest = oldest_kept(policy, ages, leased, head)
    for version in range(1, head + 1):
        is_promised = (
            version > head - max(1, keep_versions)
            or ages.get(version, keep_age_s) < keep_age_s
            or version in leased
        )
        if is_promised:
            assert oldest <= version
    assert oldest >= 1
    assert oldest <= head


def test_anchor_every() -> None:
    policy = Policy(anchor_every=3)
    o = Options({1: 10**9}, {}, 1, 0)
    assert not is_anchor_due(policy, 1, 3, o, 10**9)
    assert is_anchor_due(policy, 1, 4, o, 10**9)


def test_anchors_by_the_adaptive_rule() -> None:
    o = Options({1: 1000}, {}, 1, 100)
    assert not is_anchor_due(Policy(), 1, 11, o, 1000)
    assert is_anchor_due(Policy(), 1, 12, o, 1000)
    # A merged delta makes the way cheap again.
    assert not is_anchor_due(Policy(), 1, 12, o._replace(merges={(1, 11): 200}), 1000)
    # Where the newest anchor is the head, none is due.
    assert not is_anchor_due(Policy(), 12, 12, o, 1000)


@given(
    st.integers(1, 40),
    st.integers(0, 60),
    st.integers(0, 60),
    st.sampled_from([[2], [2, 4], [3, 9], [4, 16], []]),
)
def test_due_merges(first: int, count: int, pruned: int, levels: list[int]) -> None:
    head, steps_from = first + count, first + pruned
    due = due_merges(first, head, steps_from, levels, ())
    wanted = {
        (base, base + level)
        for level in levels
        for base in range(first, head + 1)
        if (base - first) % level == 0 and base >= steps_from and base + level <= head
    }
    assert len(due) == len(set(due))
    assert set(due) == wanted
    assert [version for _, version in due] == sorted(version for _, version in due)
    assert due_merges(first, head, steps_from, levels, wanted) == []
