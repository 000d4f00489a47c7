"""How a first version's words are sent round by round."""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

from thinwire.publish import first
from thinwire.publish.first import FirstVersion, weights_files
from thinwire.publish.held import Held
from thinwire.publish.spreading import Holding
from thinwire.publish.units import Plan

from .making import spreads_of


class OnlySize:
    """What rounds are cut by: how many ranks there are."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0


def rows_on(ranks: int, shapes: list[tuple[int, int]]) -> list[list[Holding]]:
    job: list[list[Holding]] = [[] for _ in range(ranks)]
    for number, (rows, columns) in enumerate(shapes):
        step = -(-rows // ranks)
        for rank in range(ranks):
            own = (min(rows, rank * step), min(rows, (rank + 1) * step))
            held = Held((rows, columns), ((own,), ((0, columns),)))
            job[rank].append(Holding(f"t{number}", "F32", held.shape, held.dims))
    return job


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_rounds_hold_every_unit_once_and_little_for_each_rank(ranks: int, tmp_path: Path) -> None:
    shapes = [(3000, 2000), (5000, 1024), (7, 9), (2048, 4096), (64, 100)] * 6
    plan = Plan(spreads_of(rows_on(ranks, shapes)), ranks)
    line: Any = OnlySize(ranks)
    no_baseline: Any = None
    version = FirstVersion(plan, line, no_baseline, tmp_path, weights_files(plan), {})
    rounds = version._rounds()
    places = Counter(plan.place_of(unit) for units in rounds for unit in units)
    assert places == Counter(range(plan.total_units))
    for units in rounds:
        load: Counter[int] = Counter()
        moved = [version._moved_bytes(unit, 4) for unit in units]
        for one in moved:
            load.update(one)
        # What one rank sends of a chunk to two others may be more than a round alone.
        largest = max(max(one.values()) for one in moved)
        assert max(load.values()) <= max(first._ROUND_BYTES, largest)
    # What each rank sends and receives in all, in rounds that are at least a third full.
    total: Counter[int] = Counter()
    for units in rounds:
        for unit in units:
            total.update(version._moved_bytes(unit, 4))
    assert len(rounds) <= 3 * -(-max(total.values()) // first._ROUND_BYTES) + first._OPEN_ROUNDS
