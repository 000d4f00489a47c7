"""The model against real publishers, stores and followers: benchmarks/capacity_check.py, small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.capacity.check import MadeModel, Row, Trial, move_for, run_trial, to_bf16
from thinwire.capacity.payload import gets_of
from thinwire.capacity.scenario import Scenario
from thinwire.follow.fetch import Fetcher, Wanted
from thinwire.store import CountingStore, open_store
from thinwire.stream.blocks import record_of

EXACT = {
    "shards of a version",
    "writes of a version",
    "reads of a version, bits told",
    "reads of a join at version 1",
}


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(params=1 << 21, tensors=8, changed=0.02),
        Scenario(params=1 << 22, tensors=16, changed=0.05, shard_raw_bytes=2 << 20),
    ],
    ids=["one shard", "four shards"],
)
def test_bytes_and_requests(scenario: Scenario, tmp_path: Path) -> None:
    rows = by_name(run_trial(Trial(scenario), tmp_path))
    for name in EXACT:
        assert rows[name].predicted == rows[name].measured, rows[name]
    # Sizes of shards differ a little, and with them digits and blocks.
    assert rows["bytes of the manifest, bits told"].ratio == pytest.approx(1, abs=0.01)
    assert rows["changed weights"].ratio == pytest.approx(1, abs=0.05)
    # The table holds those runs that took most; made weights know no gradients.
    assert 0.75 < rows["bits a change, whole file"].ratio < 1.15
    assert 0.75 < rows["bytes up, with manifest and hint"].ratio < 1.15
    assert 0.75 < rows["bytes down, with the manifest"].ratio < 1.15


@pytest.mark.parametrize("memory_bytes", [16 << 20, 64 << 20, 256 << 20])
@pytest.mark.parametrize("size", [1, 5 << 20, (8 << 20) + 1, 70_000_000])
def test_requests_of_an_object(size: int, memory_bytes: int, tmp_path: Path) -> None:
    """As many ranges as the real fetcher asks for."""
    data = np.random.default_rng(size).bytes(size)
    store = CountingStore(open_store(str(tmp_path / "bucket"), retry_s=0))
    store.put("a", data)
    fetcher = Fetcher(store, memory_limit_bytes=memory_bytes)
    wanted = Wanted("a", record_of(data), "a")
    if fetcher.is_small(wanted.record):
        fetcher.bytes_of(wanted)
    else:
        fetcher.into_file(wanted, tmp_path / "fetched")
    requests = store.counts().requests
    assert requests.get("get", 0) + requests.get("get_range", 0) == gets_of(size, memory_bytes)


def test_made_weights() -> None:
    scenario = Scenario(params=1 << 20, tensors=2, changed=0.1)
    model = MadeModel(scenario, 0)
    before = [to_bf16(master).copy() for master in model._masters.values()]
    model.step()
    after = [to_bf16(master) for master in model._masters.values()]
    share = np.mean([(a != b).mean() for a, b in zip(before, after, strict=True)])
    assert share == pytest.approx(0.1, abs=0.01)
    masters = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
    assert move_for(masters, 0.001) < move_for(masters, 0.01)
