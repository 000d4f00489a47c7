"""No rank of a sharded job ever holds the whole model, whatever the publisher does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: memory was not tested")

from .harness import Job
from .measuring import HIDDEN, LAYERS, WIDTH

RANKS = 4
MODEL_BYTES = 2 * (LAYERS * WIDTH * HIDDEN + WIDTH)
TENSOR_BYTES = 2 * WIDTH * HIDDEN
CHUNK_BYTES = 2 << 20
EXTRA_BYTES = 256 << 20


def test_a_rank_takes_its_share_and_no_more(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("measure", RANKS, url=str(tmp_path / "stream"))
    job.wait()
    for rank in range(RANKS):
        (opened,) = job.entries(rank, "open")
        baseline = opened["baseline_bytes"]
        # Its share, and of each tensor at most a chunk that it encodes for its neighbour.
        assert 0 <= baseline - MODEL_BYTES // RANKS <= LAYERS * CHUNK_BYTES
        published = job.entries(rank, "published")
        assert [entry["step"] for entry in published] == [1, 2, 3]
        for entry in published:
            assert all(count > 0 for count in entry["op_counts"]), "an unwatched thread"
            # Nothing of the size of a whole tensor, not even in sixteen bits.
            assert entry["largest_bytes"] < TENSOR_BYTES
            assert entry["extra_bytes"] <= baseline + EXTRA_BYTES
            # Not even the changes of the other ranks: all of them would be the model.
            if entry["step"] > 1:
                assert 0 < entry["changed_count"] < MODEL_BYTES // 2 // RANKS
