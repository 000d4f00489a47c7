"""Followers of some tensors: fewer bytes, the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.codec.plan import SMALL_WORDS
from thinwire.errors import ChecksumMismatch, InvalidArgument, TensorMismatch
from thinwire.follow import Follower, open_stream
from thinwire.follow.selection import Selection, is_held
from thinwire.maintain import Maintainer
from thinwire.store import CountingStore
from thinwire.stream.events import Refused
from thinwire.stream.records import Policy

from .making import (
    Arrays,
    DictStore,
    Recorder,
    bits,
    held,
    joined,
    maintained,
    model,
    published,
    publisher,
    stepped,
    write_folder,
)

SMALL = ("norm", "scale", "ids")


def part(arrays: Arrays, *names: str) -> dict[str, str]:
    """What a follower of some tensors holds: these, and the small ones."""
    return bits({name: arrays[name] for name in (*names, *SMALL)})


@pytest.mark.parametrize("shard_raw_bytes", [1 << 40, 1 << 20])
def test_fewer_bytes_and_the_same_bits(shard_raw_bytes: int, tmp_path: Path) -> None:
    """On a model whose anchor and deltas have many blocks, in one shard and in several."""
    store = DictStore()
    versions = [model(seed, large=500_000) for seed in range(3)]
    stream = open_stream(store)
    with publisher(stream, tmp_path / "baseline", shard_raw_bytes=shard_raw_bytes) as trainer:
        made = [trainer.publish(arrays) for arrays in versions]
    shards = len(store.find("000000000001-000000000002/"))
    assert shards == (1 if shard_raw_bytes > 1 << 30 else 2)
    spent = {}
    for tensors in (None, ["layers.0.*"], ["layers.1.weight"], ["norm"]):
        store_seen = CountingStore(store)
        folder = tmp_path / str(tensors)
        with Follower(open_stream(store_seen), folder, tensors=tensors, lease=False) as follower:
            for number, arrays in enumerate(versions, 1):
                version = follower.catch_up(number)
                assert version.weights == made[number - 1].weights
                names = [n for n in arrays if Selection(tensors or ()).wants(n)]
                wanted = bits(arrays) if tensors is None else part(arrays, *names)
                assert held(folder) == wanted
        spent[str(tensors)] = store_seen.counts().downloaded_bytes
    whole = spent["None"]
    assert whole > 4_000_000
    assert spent["['layers.0.*']"] < 0.75 * whole
    assert spent["['layers.1.weight']"] < 0.75 * whole
    assert spent["['norm']"] < 0.35 * whole


def test_over_merged_deltas_and_anchors(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    for number in (1, 5, 9, 10):
        folder = tmp_path / str(number)
        found = joined(whole, folder, number, tensors=["*.1.*"])
        assert found == part(versions[number - 1], "layers.1.weight")


def test_all_patterns_match_everything(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    assert joined(whole, tmp_path / "sink", 9, tensors=["*"]) == bits(versions[8])


def layouts(folder: Path) -> tuple[Path, Path, Path, list[Arrays]]:
    """Three checkpoints: after the first, a file is added; then only words change."""
    arrays = [model(seed=1)]
    arrays.append(stepped(arrays[0], 1) | {"new": np.arange(5, dtype=np.float32)})
    arrays.append(stepped(arrays[1], 2))
    folders = []
    for number, one in enumerate(arrays):
        parts = {"model": {n: a for n, a in one.items() if n != "new"}}
        if "new" in one:
            parts["more"] = {"new": one["new"]}
        folders.append(write_folder(folder / str(number), **parts, config_json=b"%d" % number))
    return folders[0], folders[1], folders[2], arrays


def test_a_new_layout_is_refused_and_then_joined_anew(tmp_path: Path) -> None:
    """What it holds cannot be turned into another layout; an anchor behind it helps."""
    store, recorder = DictStore(), Recorder()
    first, second, third, arrays = layouts(tmp_path)
    stream = open_stream(store)
    with (
        publisher(stream, tmp_path / "baseline") as trainer,
        Follower(
            open_stream(store), tmp_path / "sink", tensors=["layers.0.*"], observer=recorder
        ) as follower,
    ):
        trainer.publish(first)
        follower.catch_up()
        trainer.publish(second)
        with pytest.raises(TensorMismatch):
            follower.catch_up()
        assert held(tmp_path / "sink") == part(arrays[0], "layers.0.weight")
        assert recorder.of(Refused)[0].code == "tensor-mismatch"
        assert follower.catch_up(1).version == 1
        trainer.publish(third)
        anchor_of(store, tmp_path / "work")
        assert follower.catch_up().version == 3
    wanted = part(arrays[2], "layers.0.weight") | bits({"new": arrays[2]["new"]})
    assert held(tmp_path / "sink") == wanted


def anchor_of(store: DictStore, folder: Path) -> None:
    """Have an anchor made of the head."""
    from thinwire.maintain import Maintainer
    from thinwire.maintain.anchoring import make_anchor
    from thinwire.maintain.inventory import Inventory

    stream = open_stream(store)
    head = stream.tip().head
    assert head is not None
    with Maintainer(stream, folder) as maintainer:
        trail = maintainer._trails_of(head).at(0, head)
        anchor = make_anchor(stream, trail, lambda: None)
        assert anchor is not None
        inventory = Inventory.load(stream, head.lineage, head.first)
        inventory.publish(stream)


def test_damage_outside_the_part_does_not_matter_and_inside_it_does(tmp_path: Path) -> None:
    store = DictStore()
    versions = [model(seed, large=500_000) for seed in range(2)]
    published(store, tmp_path / "baseline", versions)
    key = store.find("000000000001-000000000002/")[0]
    data, at = store.objects[key]
    middle = len(data) * 3 // 4
    store.objects[key] = (data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], at)
    joined_part = joined(store, tmp_path / "one", tensors=["layers.0.*"])
    assert joined_part == part(versions[1], "layers.0.weight")
    with (
        Follower(
            open_stream(store), tmp_path / "two", tensors=["layers.1.*"], lease=False
        ) as follower,
        pytest.raises(ChecksumMismatch),
    ):
        follower.catch_up()
    assert held(tmp_path / "two") == part(versions[0], "layers.1.weight")


# Patterns


def test_patterns() -> None:
    selection = Selection(["b.*", "a", "b.*"])
    assert selection.patterns == ["a", "b.*"]
    assert [selection.wants(name) for name in ("a", "A", "b.c", "b", "ab")] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert Selection().is_all
    assert Selection().wants("anything")
    assert is_held("x", "F32", [SMALL_WORDS - 1], selection)
    assert not is_held("x", "F32", [SMALL_WORDS], selection)
    assert is_held("a", "F32", [SMALL_WORDS], selection)


@pytest.mark.parametrize("patterns", ["layers.*", [""], ["x" * 70 + str(n) for n in range(1000)]])
def test_patterns_that_are_none(patterns: list[str]) -> None:
    """Also more than a mark can hold."""
    with pytest.raises(InvalidArgument):
        Selection(patterns)


def test_the_folder_remembers_its_patterns(whole: DictStore, tmp_path: Path) -> None:
    joined(whole, tmp_path / "sink", 1, tensors=["norm", "layers.0.*"])
    joined(whole, tmp_path / "sink", 2, tensors=["layers.0.*", "norm"])
    for tensors in (None, ["norm"], ["layers.1.*"]):
        with pytest.raises(InvalidArgument, match="same patterns"):
            joined(whole, tmp_path / "sink", tensors=tensors)


def test_partial_copies_survive_maintenance(tmp_path: Path) -> None:
    store = DictStore()
    versions = [model()]
    for seed in range(1, 9):
        versions.append(stepped(versions[-1], seed))
    published(store, tmp_path / "baseline", versions[:5], merge_levels=[2, 4])
    with Follower(
        open_stream(store), tmp_path / "sink", tensors=["layers.0.*"], lease=False
    ) as follower:
        follower.catch_up(1)
        maintained(store, tmp_path / "work")
        follower.catch_up()
        assert held(tmp_path / "sink") == part(versions[4], "layers.0.weight")


def test_patterns_that_match_nothing(whole: DictStore, tmp_path: Path) -> None:
    with (
        Follower(open_stream(whole), tmp_path / "f", tensors=["layer.*"], lease=False) as follower,
        pytest.raises(InvalidArgument, match="no tensor is named like"),
    ):
        follower.catch_up()
    assert held(tmp_path / "f") == {}


def test_a_new_layout_never_leads_backwards(tmp_path: Path) -> None:
    """The only anchor, and the merged delta from it, are older than what is held."""
    store = DictStore()
    stream = open_stream(store, policy=Policy(merge_levels=(2,)))
    first, second, _, arrays = layouts(tmp_path)
    middle = stepped(arrays[0], 5)
    with (
        publisher(stream, tmp_path / "baseline") as trainer,
        Follower(open_stream(store), tmp_path / "sink", tensors=["layers.0.*"]) as follower,
    ):
        trainer.publish(first)
        trainer.publish(middle)
        assert follower.catch_up().version == 2
        trainer.publish(second)
        with Maintainer(open_stream(store), tmp_path / "work") as maintainer:
            assert maintainer.run_once().merge_count == 1
        for _ in range(2):
            with pytest.raises(TensorMismatch):
                follower.catch_up()
            held_version = follower.version()
            assert held_version is not None
            assert held_version.version == 2
        assert held(tmp_path / "sink") == part(middle, "layers.0.weight")
