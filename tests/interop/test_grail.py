"""grail's deltas and full versions: what we write, others read, and the other way round."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.errors import ChecksumMismatch, InvalidArgument, TensorMismatch, Unsupported
from thinwire.interop import grail
from thinwire.interop.change import CheckpointChange
from thinwire.interop.grail_layout import join_positions, split_positions

from . import sparse_by_hand as by_hand
from .making import (
    MIXED,
    Tensor,
    Tensors,
    applied,
    bits_of,
    brought,
    change_between,
    checkpoint_bits,
    stepped,
    tensor,
    tensor_pairs,
    write_checkpoint,
)

LAYOUTS = ["v2", "v3", "v3.1"]
VECTORS = Path(__file__).parent / "vectors" / "grail"

BASE: dict[str, Tensor] = {
    "model.w": tensor("BF16", [40, 30], 1),
    "model.tall": tensor("BF16", [900, 3], 2),
    "model.cube": tensor("F16", [5, 4, 3], 3),
    "model.norm": tensor("BF16", [50], 4),
    "a": tensor("F32", [7, 9], 5),
    "empty": tensor("BF16", [0, 7], 6),
    "still": tensor("BF16", [9], 7),
    "ids": tensor("I64", [12], 8),
    "one": tensor("BF16", [], 9),
}
STILL = {"empty", "still", "ids", "one"}
NEW: dict[str, Tensor] = {
    name: old if name in STILL else stepped(old, seed)
    for seed, (name, old) in enumerate(BASE.items())
}


@pytest.mark.claim("grail", "write", "a reader without thinwire")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_written_is_read_by_others(tmp_path: Path, layout: str, shards: int) -> None:
    change = change_between(tmp_path, BASE, NEW, shards=shards)
    (tmp_path / "out").mkdir()
    files = grail.write_delta(
        change, tmp_path / "out", version=30, base_version=20, layout=layout, anchor_version=10
    )
    assert [file.key for file in files] == [
        "checkpoint-30/DELTA/delta_sparse.bin.zst",
        "checkpoint-30/DELTA/delta_metadata.json",
        "checkpoint-30/DELTA/DELTA",
        "checkpoint-30/DELTA/metadata.json",
        "checkpoint-30/READY-30",
    ]
    window = brought(files, tmp_path / "chain")
    assert bits_of(by_hand.read_grail(window / "DELTA", BASE)) == bits_of(NEW)
    metadata = json.loads((window / "DELTA" / "metadata.json").read_text())
    assert (metadata["prev_window"], metadata["anchor_window"]) == (20, 10)
    for path in (window, window / "DELTA"):
        assert grail.is_delta(path)
        with grail.open_delta(path) as delta:
            assert (delta.facts.version, delta.facts.base_version) == (30, 20)
            assert delta.facts.encoding == layout
            assert applied(change.base, delta) == bits_of(NEW)
            assert delta.check_weights(change.base)


@pytest.mark.claim("grail", "read", "a writer without thinwire, golden files")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_others_write_is_read(tmp_path: Path, layout: str) -> None:
    base = write_checkpoint(tmp_path / "base", BASE)
    folder = by_hand.write_grail(tmp_path, BASE, NEW, layout, 12, 11)
    assert grail.is_delta(folder)
    with grail.open_delta(folder) as delta:
        delta.check_base(base)
        assert applied(base, delta) == bits_of(NEW)
        row = delta.tensors["model.tall"]
        changed = len(by_hand.changes(BASE["model.tall"], NEW["model.tall"]))
        assert (row.dtype, row.shape, row.changed_count) == ("BF16", (900, 3), changed)
        assert delta.check_weights(base)
        assert delta.facts.metadata["weights_hash"] == by_hand.weights_hash(NEW)


def test_steps_that_need_more_bits(tmp_path: Path) -> None:
    """Each combination of widths in v3.1, and rows of 16 bits, which grail itself also writes."""
    old = {
        "rows": ("BF16", [70_000, 2], bytes(280_000)),
        "columns": ("BF16", [2, 70_000], bytes(280_000)),
        "medium": ("BF16", [900, 2], bytes(3600)),
    }

    def with_ones(name: str, positions: list[int]) -> Tensor:
        dtype, shape, data = old[name]
        words = np.frombuffer(data, "<u2").copy()
        words[positions] = 1
        return dtype, shape, words.tobytes()

    new = {
        "rows": with_ones("rows", [1, 139_999]),
        "columns": with_ones("columns", [0, 69_999, 70_000, 139_999]),
        "medium": with_ones("medium", [0, 1799]),
    }
    change = change_between(tmp_path, old, new)
    (tmp_path / "out").mkdir()
    files = grail.write_delta(change, tmp_path / "out", version=2, base_version=1)
    window = brought(files, tmp_path / "chain")
    assert bits_of(by_hand.read_grail(window / "DELTA", old)) == bits_of(new)
    with grail.open_delta(window) as delta:
        assert applied(change.base, delta) == bits_of(new)
    file = by_hand.zstd.decompress((window / "DELTA" / "delta_sparse.bin.zst").read_bytes())
    stop = 4 + int.from_bytes(file[:4], "little")
    header = json.loads(file[4:stop])
    [medium] = [row for row in header["tensors"] if row["name"] == "medium"]
    assert (medium["row_dtype"], medium["col_dtype"]) == ("uint16", "uint16")
    # As grail's text has it: such rows take 32 bits.
    start = medium["indices_offset"]
    rows = np.frombuffer(file[stop + start :][: medium["rows_size"]], "<u2").astype("<i4")
    middle = stop + start + medium["rows_size"]
    data = rows.tobytes() + file[middle:][: medium["cols_size"] + medium["values_size"]]
    medium |= {"indices_offset": 0, "indices_size": 12, "rows_size": 8, "row_dtype": "int32"}
    medium |= {"values_offset": 12}
    packed = by_hand.zstd.compress(by_hand.grail_file(31, [medium], data), 1)
    folder = by_hand.grail_folder(tmp_path, packed, layout="v3.1", window=5, before=1)
    with grail.open_delta(folder) as delta:
        made = delta.new_tensor("medium", change.base.tensors["medium"])
        assert made.data.tobytes() == new["medium"][2]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=tensor_pairs(["BF16", "F16", "F32"]), layout=st.sampled_from(LAYOUTS))
def test_any_bits_survive(
    tmp_path_factory: pytest.TempPathFactory, pairs: tuple[Tensors, Tensors], layout: str
) -> None:
    old, new = pairs
    new = {name: old[name] if not old[name][1] else new[name] for name in old}
    folder = tmp_path_factory.mktemp("any")
    change = change_between(folder, old, new)
    windows = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        files = grail.write_delta(change, folder / name, version=3, base_version=2, layout=layout)
        windows.append(brought(files, folder / f"chain-{name}"))
    for path in (windows[0] / "DELTA").iterdir():
        assert path.read_bytes() == (windows[1] / "DELTA" / path.name).read_bytes()
    assert bits_of(by_hand.read_grail(windows[0] / "DELTA", old)) == bits_of(new)
    with grail.open_delta(windows[0]) as delta:
        assert applied(change.base, delta) == bits_of(new)
        assert delta.check_weights(change.base)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    layout=st.sampled_from(LAYOUTS),
    run=st.sampled_from([1, 3, 1 << 20]),
)
def test_positions_round_trip(
    shape: list[int], seed: int, share: float, layout: str, run: int
) -> None:
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(int(np.prod(shape))) < share)
    index, columns = split_positions(positions, shape, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.interop.grail_layout.RUN", run)
        joined = list(join_positions(index, columns, shape, layout))
    assert [position for piece in joined for position in piece] == positions.tolist()


def test_nothing_changed(tmp_path: Path) -> None:
    change = change_between(tmp_path, BASE, BASE)
    for layout in LAYOUTS:
        (tmp_path / layout).mkdir()
        files = grail.write_delta(
            change, tmp_path / layout, version=2, base_version=1, layout=layout
        )
        window = brought(files, tmp_path / f"chain-{layout}")
        assert bits_of(by_hand.read_grail(window / "DELTA", BASE)) == bits_of(BASE)
        with grail.open_delta(window) as delta:
            assert not delta.tensors
            assert delta.check_weights(change.base)


def test_a_wrong_base_shows_in_the_hash_of_all_weights(tmp_path: Path) -> None:
    folder = by_hand.write_grail(tmp_path, BASE, NEW, "v3.1", 12, 11)
    other = write_checkpoint(tmp_path / "b", {**BASE, "still": tensor("BF16", [9], 99)})
    with grail.open_delta(folder) as delta, pytest.raises(ChecksumMismatch, match="window 11"):
        delta.check_weights(other)


def test_hashes_of_other_kinds_prove_nothing(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", BASE)
    packed = by_hand.zstd.compress(by_hand.grail_data(BASE, NEW, "v3.1"), 1)
    for window, said in enumerate([None, "0" * 32, "", 5, "0" * 63], 20):
        folder = by_hand.grail_folder(
            tmp_path,
            packed,
            layout="v3.1",
            window=window,
            before=11,
            more={"weights_hash": said},
        )
        with grail.open_delta(folder) as delta:
            assert not delta.check_weights(base)


def test_the_base_must_fit(tmp_path: Path) -> None:
    folder = by_hand.write_grail(tmp_path, BASE, NEW, "v3.1", 12, 11)
    for seed, other in enumerate(
        [
            {**BASE, "model.w": tensor("BF16", [30, 40])},
            {**BASE, "model.w": tensor("F16", [40, 30])},
            {name: t for name, t in BASE.items() if name != "model.w"},
        ]
    ):
        base = write_checkpoint(tmp_path / str(seed), other)
        with grail.open_delta(folder) as delta:
            with pytest.raises(TensorMismatch, match=r"model\.w"):
                delta.check_base(base)
            with pytest.raises(TensorMismatch, match=r"model\.w"):
                delta.new_tensor("model.w", base.tensors.get("model.w"))


def test_a_full_version_is_a_checkpoint(tmp_path: Path) -> None:
    files = {"config.json": "{}", "metadata.json": "somebody else's", "tokenizer.json": "[]"}
    checkpoint = write_checkpoint(tmp_path / "base", MIXED, shards=2, files=files)
    (tmp_path / "out").mkdir()
    written = grail.write_full(checkpoint, tmp_path / "out", version=10)
    assert [file.key.rpartition("/")[2] for file in written[-3:]] == [
        "FULL",
        "metadata.json",
        "READY-10",
    ]
    weights = [file for file in written if file.key.endswith(".safetensors")]
    assert [file.path.parent for file in weights] == [checkpoint.path] * 2
    window = brought(written, tmp_path / "chain")
    metadata = json.loads((window / "FULL" / "metadata.json").read_text())
    assert metadata["checkpoint_type"] == "FULL"
    assert metadata["file_manifest"].keys() == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        *(file.path.name for file in weights),
    }
    for name, digest in metadata["file_manifest"].items():
        assert hashlib.sha256((window / "FULL" / name).read_bytes()).hexdigest() == digest
    [row] = grail.list_versions(tmp_path / "chain")
    assert (row.version, row.is_full) == (10, True)
    again = Checkpoint.open(row.path, ignore_subfolders=True)
    assert checkpoint_bits(again) == bits_of(MIXED)
    assert not grail.is_delta(row.path)


def test_a_chain(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    states: list[Tensors] = [BASE]
    for seed in range(3):
        last = states[-1]
        states.append(
            {name: t if name in STILL else stepped(t, seed + 50) for name, t in last.items()}
        )
    opened = [
        write_checkpoint(tmp_path / f"s{number}", state) for number, state in enumerate(states)
    ]
    windows = [100, 200, 300, 400]
    for number, window in enumerate(windows):
        if number:
            (tmp_path / f"d{number}").mkdir()
            change = CheckpointChange(opened[number - 1], opened[number])
            files = grail.write_delta(
                change,
                tmp_path / f"d{number}",
                version=window,
                base_version=windows[number - 1],
            )
            brought(files, chain)
        if window in (100, 300):
            (tmp_path / f"f{number}").mkdir()
            brought(
                grail.write_full(opened[number], tmp_path / f"f{number}", version=window), chain
            )
    rows = grail.list_versions(chain)
    assert [(row.version, row.base_version) for row in rows] == [
        (100, None),
        (200, 100),
        (300, 200),
        (400, 300),
    ]
    state = Checkpoint.open(rows[0].path, ignore_subfolders=True)
    for number, row in enumerate(rows[1:], 1):
        with grail.open_delta(row.path) as delta:
            assert applied(state, delta) == bits_of(states[number])
            assert delta.check_weights(state)
        state = opened[number]
    # A window that is not ready does not count; the anchor takes the place of the lost delta.
    (chain / "checkpoint-200" / "READY-200").unlink()
    assert [(row.version, row.base_version) for row in grail.list_versions(chain)] == [
        (100, None),
        (300, None),
        (400, 300),
    ]
    # An anchor that is not all there does not count either.
    (chain / "checkpoint-300" / "FULL" / "model.safetensors").unlink()
    assert [(row.version, row.base_version) for row in grail.list_versions(chain)] == [
        (100, None),
        (300, 200),
        (400, 300),
    ]
    shutil.rmtree(chain / "checkpoint-100")
    (chain / "checkpoint-x").mkdir()
    assert [row.version for row in grail.list_versions(chain)] == [300, 400]
    assert grail.list_versions(tmp_path / "nothing") == []


def test_what_cannot_be_carried(tmp_path: Path) -> None:
    def write(old: Tensors, new: Tensors, **options: object) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        change = change_between(folder, old, new)
        (folder / "out").mkdir()
        given = {"version": 2, "base_version": 1} | options
        grail.write_delta(change, folder / "out", **given)  # type: ignore[arg-type]

    for dtype in ("F8_E4M3", "I64", "BOOL"):
        with pytest.raises(Unsupported, match=f"'t' changed and is {dtype}"):
            write({"t": tensor(dtype, [9], 1)}, {"t": tensor(dtype, [9], 2)})
    with pytest.raises(Unsupported, match="has no axes"):
        write(BASE, {**BASE, "one": ("BF16", [], b"\0\0")})
    with pytest.raises(TensorMismatch, match="came or went"):
        write(BASE, {**BASE, "more": tensor("BF16", [2])})
    with pytest.raises(TensorMismatch, match="dtype or shape"):
        write(BASE, {**BASE, "still": tensor("BF16", [3, 3])})
    with pytest.raises(InvalidArgument, match="layout 'v4'"):
        write(BASE, NEW, layout="v4")
    with pytest.raises(InvalidArgument, match="window 1"):
        write(BASE, NEW, version=1)
    for layout, shape in (("v2", [3]), ("v3", [3]), ("v3.1", [2, 2**32])):
        with pytest.raises(Unsupported, match="beyond 2147483647"):
            split_positions(np.array([2**31], np.int64), shape, layout)


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """Reading and writing a model of many tensors takes no more than one of them needs."""
    rng = np.random.default_rng(1)
    old: dict[str, Tensor] = {}
    new: dict[str, Tensor] = {}
    for number in range(24):
        words = rng.integers(0, 1 << 16, 1 << 19, np.uint16)
        old[f"t{number}"] = ("BF16", [512, 1024], words.tobytes())
        words[rng.random(words.size) < 0.02] ^= 1
        new[f"t{number}"] = ("BF16", [512, 1024], words.tobytes())
    change = change_between(tmp_path, old, new)
    (tmp_path / "out").mkdir()
    del old, new
    tracemalloc.start()
    try:
        files = grail.write_delta(change, tmp_path / "out", version=2, base_version=1)
        window = brought(files, tmp_path / "chain")
        with grail.open_delta(window) as delta:
            for name in delta.tensors:
                delta.new_tensor(name, change.base.tensors[name])
            assert delta.check_weights(change.base)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One tensor is 1 MiB; all of them are 24, twice that with the base.
    assert peak < 12 << 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_files(layout: str) -> None:
    """Written once, by :mod:`.sparse_by_hand`, and never again."""
    base = Checkpoint.open(VECTORS / "full_0")
    new = Checkpoint.open(VECTORS / "full_1")
    with grail.open_delta(VECTORS / layout / "checkpoint-1") as delta:
        assert delta.facts.encoding == layout
        assert applied(base, delta) == checkpoint_bits(new)
        assert delta.check_weights(base)
