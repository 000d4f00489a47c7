"""What a stream holds after some versions, by the very rules that look after it."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.capacity.tables import merged_bytes
from thinwire.maintain.merging import due_merges
from thinwire.stream.records import Policy
from thinwire.stream.retention import anchor_place, decide_kept, is_anchor_due, oldest_kept
from thinwire.stream.routes import Options

FIRST = 1


@dataclass
class History:
    """A lineage from version 1 on, with a maintainer that is always done at once.

    Attributes:
        policy: The stream's.
        step_bytes: Of a step delta.
        raw_bytes: Of an anchor.
        step_s: From one version to the next: decides how old versions are.
    """

    policy: Policy
    step_bytes: int
    raw_bytes: int
    step_s: float

    def __post_init__(self) -> None:
        """Begin with version 1, an anchor."""
        self.head = FIRST
        self.steps_from = FIRST
        self.merges: dict[tuple[int, int], int] = {}
        self.anchors = {FIRST: self.raw_bytes}
        # Of step deltas, what was ever uploaded by the maintainer.
        self.made_bytes = 0

    @property
    def options(self) -> Options:
        """What a way may go by."""
        return Options(self.anchors, self.merges, self.steps_from, self.step_bytes)

    @property
    def stored_bytes(self) -> int:
        """What lies in the bucket."""
        steps = self.head - self.steps_from
        return sum(self.anchors.values()) + sum(self.merges.values()) + steps * self.step_bytes

    def go_on(self, leased: tuple[int, ...] = ()) -> None:
        """One version more: merged, anchored and pruned as the policy says."""
        self.head += 1
        oldest = self._oldest(leased)
        levels = [n for n in self.policy.merge_levels if (self.head - FIRST) % n == 0]
        due = due_merges(FIRST, self.head, self.steps_from, levels, self.merges)
        due = [pair for pair in due if pair[1] == self.head]
        if due:
            kept = decide_kept(oldest, FIRST, self.options)
            for base, version in due:
                if kept.keeps_merge(base, version):
                    size = merged_bytes(self.step_bytes, version - base, self.raw_bytes)
                    self.merges[base, version] = size
                    self.made_bytes += size
        newest = max(self.anchors)
        if is_anchor_due(self.policy, newest, self.head, self.options, self.raw_bytes):
            place = self.head
            if not self.policy.anchor_every:
                place = anchor_place(FIRST, newest, self.head, self.policy.merge_levels)
            self.anchors[place] = self.raw_bytes
            self.made_bytes += self.raw_bytes
        kept = decide_kept(oldest, FIRST, self.options)
        self.merges = {pair: self.merges[pair] for pair in kept.merges}
        self.anchors = {version: self.anchors[version] for version in kept.anchors}
        self.steps_from = max(self.steps_from, kept.steps_from)

    def _oldest(self, leased: tuple[int, ...]) -> int:
        young = max(FIRST, self.head - int(self.policy.keep_age_s / self.step_s))
        # The oldest of the young ones is all that the rule looks at.
        return oldest_kept(self.policy, {young: 0.0}, leased, self.head)


def grown(history: History, versions: int) -> History:
    """The same history once it has so many versions."""
    while history.head < versions:
        history.go_on()
    return history
