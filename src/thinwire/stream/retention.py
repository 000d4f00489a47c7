"""What may go. A version that was promised stays reachable, by whoever holds a kept version too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from thinwire.errors import HistoryPruned
from thinwire.stream.records import Policy
from thinwire.stream.routes import Options, plan_route, route_bytes

# Deltas that a joiner has to fetch beside the anchor, at most.
MAX_JOIN_OBJECTS = 16
_MAX_ANCHOR_LAG = 64


class Kept(NamedTuple):
    """What stays of a lineage.

    Attributes:
        oldest: The oldest version that stays reachable.
        anchors: The anchors that stay.
        merges: The merged deltas that stay.
        steps_from: Step deltas of later versions stay.
        passed: The versions at which the way to the oldest one changes from one object to the next.
    """

    oldest: int
    anchors: frozenset[int]
    merges: frozenset[tuple[int, int]]
    steps_from: int
    passed: frozenset[int] = frozenset()

    def keeps_merge(self, base: int, version: int) -> bool:
        """Whether a merged delta is worth having: nobody is promised what lies before."""
        return base >= self.oldest or (version > self.oldest and base in self.passed)


def oldest_kept(
    policy: Policy, ages_s: Mapping[int, float], leased: Collection[int], head: int
) -> int:
    """The oldest version to keep: among the newest, young enough, or leased.

    Args:
        policy: The stream's policy.
        ages_s: The age of each version that has a manifest.
        leased: The versions that live leases name.
        head: The newest version.
    """
    oldest = max(1, head - max(1, policy.keep_versions) + 1)
    young = [version for version, age_s in ages_s.items() if age_s < policy.keep_age_s]
    return min([oldest, *young, *leased])


def decide_kept(oldest: int, first: int, options: Options) -> Kept:
    """What to keep so that every version from ``oldest`` on stays reachable.

    Everything after ``oldest`` stays, and the cheapest way from an anchor to it. Manifests are
    never removed: a place once taken stays taken, which is what fences publishers.
    """
    oldest = max(oldest, first)
    way = plan_route(None, oldest, options)
    anchors = {version for version in options.anchors if version >= oldest}
    merges = set()
    steps_from = oldest
    passed = {oldest}
    for hop in way:
        passed.add(hop.version)
        if hop.kind == "anchor":
            anchors.add(hop.version)
        elif hop.kind == "merge":
            merges.add((hop.base, hop.version))
        else:
            steps_from = min(steps_from, hop.base)
    kept = Kept(oldest, frozenset(anchors), frozenset(merges), steps_from, frozenset(passed))
    # A follower that still is at a version on the way finds wider merges useful too.
    merges |= {merge for merge in options.merges if kept.keeps_merge(*merge)}
    return kept._replace(merges=frozenset(merges))


def is_anchor_due(
    policy: Policy, newest_anchor: int, head: int, options: Options, anchor_bytes: int
) -> bool:
    """Whether the way from the newest anchor to the head costs more than an anchor would.

    Or whether it takes more objects than a joiner should have to fetch. With
    ``policy.anchor_every`` the number of versions decides.
    """
    if policy.anchor_every:
        return head - newest_anchor >= policy.anchor_every
    try:
        way = plan_route(newest_anchor, head, options)
    except HistoryPruned:
        return True
    if any(hop.kind == "anchor" for hop in way):
        return False
    objects = sum(1 if hop.kind == "merge" else hop.version - hop.base for hop in way)
    return objects > MAX_JOIN_OBJECTS or route_bytes(way, options) > anchor_bytes


def anchor_place(first: int, newest_anchor: int, head: int, levels: Collection[int]) -> int:
    """Which version gets the next anchor: one where merged deltas begin, so that they can be used.

    Not far behind the head; the head itself where there is none.
    """
    for level in sorted(levels, reverse=True):
        version = head - (head - first) % level
        if level <= _MAX_ANCHOR_LAG and version > newest_anchor:
            return version
    return head
