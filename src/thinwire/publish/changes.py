"""What all ranks found in the units that this one encodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.publish.baseline import Baseline, Changes, as_words
from thinwire.publish.messages import SentChanges, SentRun, exchanged
from thinwire.publish.ranks import Ranks
from thinwire.publish.staging import Found, Staging
from thinwire.publish.units import Unit

# Captured changes that all ranks together send in a round, at least one unit each: at worst, one of
# them gets them all.
_ROUND_BYTES = 512 << 20
_MOST_ROUND_BYTES = 8 << 20


class GatheredChanges:
    """Changes that this rank and others captured, at the rank that encodes their unit.

    Args:
        ranks: The line to the other ranks.
        baseline: The last committed version; only read.
        staging: What this rank captured.
    """

    def __init__(self, ranks: Ranks, baseline: Baseline, staging: Staging) -> None:
        self._ranks = ranks
        self._baseline = baseline
        self._staging = staging
        self._received: dict[int, Staging] = {}  # by source

    def exchange(self, topic: str) -> None:
        """Send what was found in units that others encode, some of it at a time.

        Args:
            topic: Of what is told about this attempt.

        Raises:
            PeerFailed: Another rank failed.
        """
        batches = self._batches()
        counts = list(exchanged(self._ranks, {0: [len(batches)]}, list[int]))
        if self._ranks.rank == 0:
            self._ranks.tell(f"{topic}/rounds", str(max(counts)).encode())
        for number in range(int(self._ranks.hear(f"{topic}/rounds"))):
            outgoing = self._outgoing(batches[number] if number < len(batches) else [])
            for changes in exchanged(self._ranks, outgoing, list[SentChanges]):
                if changes.source not in self._received:
                    self._received[changes.source] = self._staging.another()
                for run in changes.runs:
                    self._received[changes.source].add(changes.place, run.found())

    def new_of(self, place: int) -> tuple[np.ndarray, Changes | None]:
        """A unit's new bytes, and what changed; the base's own bytes where nothing did."""
        base = self._baseline.whole(place)
        found = self._found_in(place)
        if not found:
            return base, None
        changes = self._baseline.merged(place, found)
        spread = self._baseline.plan.spreads[self._baseline.units[place].tensor]
        new = base.copy()
        words = as_words(changes.words, spread.word_bytes)
        as_words(new, spread.word_bytes)[changes.positions] = words
        return new, changes

    def _found_in(self, place: int) -> dict[int, list[Found]]:
        """What all sources found in a unit that this rank encodes."""
        found: dict[int, list[Found]] = {}
        for source, staging in self._received.items():
            if runs := list(staging.of(place)):
                found[source] = runs
        if own := list(self._staging.of(place)):
            found[self._own_source(self._baseline.units[place])] = own
        return found

    def _own_source(self, unit: Unit) -> int:
        return [source.rank for source in unit.sources].index(self._ranks.rank)

    def _batches(self) -> list[list[int]]:
        """The units that others encode, cut by what was found in them.

        Not by their number: a rank of a thousand sends a little of each tensor.
        """
        limit_bytes = min(_MOST_ROUND_BYTES, _ROUND_BYTES // self._ranks.size)
        batches: list[list[int]] = []
        left_bytes = 0
        for place in self._staging.units():
            if self._baseline.units[place].owner == self._ranks.rank:
                continue
            size = self._staging.bytes_of(place)
            if not batches or size > left_bytes:
                batches.append([])
                left_bytes = limit_bytes
            batches[-1].append(place)
            left_bytes -= size
        return batches

    def _outgoing(self, places: Sequence[int]) -> dict[int, list[SentChanges]]:
        outgoing: dict[int, list[SentChanges]] = {}
        for place in places:
            unit = self._baseline.units[place]
            runs = [SentRun.of(found) for found in self._staging.of(place)]
            changes = SentChanges(place, self._own_source(unit), runs)
            outgoing.setdefault(unit.owner, []).append(changes)
        return outgoing
