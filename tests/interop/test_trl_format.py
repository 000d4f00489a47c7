"""TRL's deltas and anchors: what we write, others read, and the other way round."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import ChecksumMismatch, InvalidArgument, TensorMismatch, Unsupported
from thinwire.interop import trl
from thinwire.interop.change import CheckpointChange, ForeignChange
from thinwire.interop.sparse import NewWords
from thinwire.interop.trl_layout import MAX_POSITION, decode_index, encode_index

from . import sparse_by_hand as by_hand
from .by_hand import read_safetensors, safetensors
from .making import (
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

KINDS = [("v1", "raw"), ("v2", "raw"), ("v2", "gap_delta")]
READ = [
    pytest.param(
        *kind,
        marks=pytest.mark.claim(
            f"trl-{kind[0]}", "read", "a writer without thinwire, golden files"
        ),
    )
    for kind in KINDS
]
WRITTEN = [
    pytest.param(
        *kind, marks=pytest.mark.claim(f"trl-{kind[0]}", "write", "a reader without thinwire")
    )
    for kind in KINDS
]
VECTORS = Path(__file__).parent / "vectors" / "trl"

BASE: dict[str, Tensor] = {
    "model.w": tensor("BF16", [40, 30], 1),
    "model.w.val": tensor("BF16", [50], 2),
    "model.w.idx": tensor("BF16", [51], 3),
    "a.indices.values": tensor("BF16", [3, 4, 5], 4),
    "one": tensor("BF16", [], 5),
    "empty": tensor("BF16", [0, 7], 6),
    "still": tensor("BF16", [9], 7),
    "scale": tensor("F32", [4], 8),
}
NEW: dict[str, Tensor] = {
    name: old if old[0] != "BF16" or name == "still" else stepped(old, seed)
    for seed, (name, old) in enumerate(BASE.items())
} | {"one": ("BF16", [], b"\0\x80")}


@pytest.mark.parametrize(("layout", "encoding"), WRITTEN)
@pytest.mark.parametrize("shards", [1, 3])
def test_written_is_read_by_others(tmp_path: Path, layout: str, encoding: str, shards: int) -> None:
    change = change_between(tmp_path, BASE, NEW, shards=shards)
    (tmp_path / "out").mkdir()
    files = trl.write_delta(
        change, tmp_path / "out", version=7, base_version=6, layout=layout, encoding=encoding
    )
    assert [file.key for file in files] == ["deltas/step_000007.safetensors"]
    read = by_hand.read_trl(files[0].path, BASE)
    assert bits_of(read) == bits_of(NEW)
    assert trl.is_delta(files[0].path)
    with trl.open_delta(files[0].path) as delta:
        assert (delta.facts.version, delta.facts.base_version) == (7, 6)
        assert (delta.facts.encoding, delta.facts.metadata["layout"]) == (encoding, layout)
        assert delta.tensors.keys() == {name for name in BASE if BASE[name] != NEW[name]}
        assert applied(change.base, delta) == bits_of(NEW)


@pytest.mark.parametrize(("layout", "encoding"), READ)
def test_what_others_write_is_read(tmp_path: Path, layout: str, encoding: str) -> None:
    base = write_checkpoint(tmp_path / "base", BASE)
    path = by_hand.write_trl(tmp_path, BASE, NEW, 12, layout, encoding)
    assert trl.is_delta(path)
    with trl.open_delta(path) as delta:
        assert delta.facts.version == 12
        assert applied(base, delta) == bits_of(NEW)
        row = delta.tensors["model.w"]
        changed = len(by_hand.changes(BASE["model.w"], NEW["model.w"]))
        assert (row.dtype, row.shape, row.changed_count) == ("BF16", None, changed)


@pytest.mark.parametrize(("layout", "encoding"), KINDS)
def test_the_library_reads_it(tmp_path: Path, layout: str, encoding: str) -> None:
    """Mapped readers need each element at a multiple of its size."""
    torch = pytest.importorskip("torch")
    safe_open = pytest.importorskip("safetensors").safe_open
    # An odd number of 2-byte elements before 4-byte ones would leave those in between.
    base = {"a": tensor("BF16", [200_000], 1), "b": tensor("BF16", [7], 2), "c": BASE["model.w"]}
    far = bytearray(base["a"][2])
    far[0] ^= 1
    far[-1] ^= 1
    new = {"a": ("BF16", [200_000], bytes(far)), "b": stepped(base["b"]), "c": stepped(base["c"])}
    change = change_between(tmp_path, base, new)
    (tmp_path / "out").mkdir()
    [file] = trl.write_delta(
        change, tmp_path / "out", version=1, base_version=0, layout=layout, encoding=encoding
    )
    raw, _ = read_safetensors(file.path)
    widths = {"I32": 4, "U32": 4, "U16": 2, "BF16": 2}
    with safe_open(file.path, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - it is no dict
            loaded = opened.get_tensor(key)
            assert loaded.untyped_storage().data_ptr() % widths[raw[key][0]] == 0
            assert loaded.contiguous().view(torch.uint8).numpy().tobytes() == raw[key][2]


def test_real_receiver_steps(tmp_path: Path) -> None:
    """The functions that TRL's receiver applies, on what we write: cumsum(gap + 1) - 1."""
    change = change_between(tmp_path, BASE, NEW)
    (tmp_path / "out").mkdir()
    [file] = trl.write_delta(change, tmp_path / "out", version=1, base_version=0)
    tensors, metadata = read_safetensors(file.path)
    assert list(metadata) == [
        "format",
        "version",
        "sparse",
        "model_version",
        "num_changed_params",
        "total_changed_elements",
        "total_elements",
        "sparsity",
        "encoding",
    ]
    elements = sum(int(np.prod(shape)) for _, shape, _ in BASE.values())
    assert metadata["total_elements"] == str(elements)
    gaps = np.frombuffer(tensors["model.w.idx"][2], "<u2").astype(np.int64)
    words = np.frombuffer(BASE["model.w"][2], "<u2").copy()
    words[np.cumsum(gaps + 1) - 1] = np.frombuffer(tensors["model.w.val"][2], "<u2")
    assert words.tobytes() == NEW["model.w"][2]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=tensor_pairs(["BF16"]), kind=st.sampled_from(KINDS))
def test_any_bits_survive(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: tuple[Tensors, Tensors],
    kind: tuple[str, str],
) -> None:
    old, new = pairs
    folder = tmp_path_factory.mktemp("any")
    change = change_between(folder, old, new)
    outs = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        [file] = trl.write_delta(
            change, folder / name, version=3, base_version=2, layout=kind[0], encoding=kind[1]
        )
        outs.append(file.path)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert bits_of(by_hand.read_trl(outs[0], old)) == bits_of(new)
    with trl.open_delta(outs[0]) as delta:
        assert applied(change.base, delta) == bits_of(new)


@settings(deadline=None)
@given(
    positions=st.lists(st.integers(0, MAX_POSITION), max_size=50, unique=True),
    encoding=st.sampled_from(["raw", "gap_delta"]),
)
def test_positions_round_trip(positions: list[int], encoding: str) -> None:
    rising = np.array(sorted(positions), np.int64)
    dtype, index = encode_index(rising, encoding)
    by_hand_dtype, _, by_hand_bytes = by_hand.trl_index(rising.tolist(), encoding)
    assert (dtype, index.tobytes()) == (by_hand_dtype, by_hand_bytes)
    decoded = [position for run in decode_index(index, encoding) for position in run]
    assert decoded == rising.tolist()


def test_runs_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.interop.sparse.RUN", 3)
    rising = np.array([0, 1, 5, 6, 90, 91, 92, 70_000], np.int64)
    _, index = encode_index(rising, "gap_delta")
    assert np.concatenate(list(decode_index(index, "gap_delta"))).tolist() == rising.tolist()


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
def test_a_position_beyond_32_bits_is_refused(encoding: str) -> None:
    with pytest.raises(Unsupported, match="beyond 2147483647"):
        encode_index(np.array([MAX_POSITION + 1], np.int64), encoding)


def test_nothing_changed(tmp_path: Path) -> None:
    change = change_between(tmp_path, BASE, BASE)
    for layout in ("v1", "v2"):
        (tmp_path / layout).mkdir()
        [file] = trl.write_delta(
            change, tmp_path / layout, version=2, base_version=1, layout=layout
        )
        with trl.open_delta(file.path) as delta:
            assert not delta.tensors
            assert applied(change.base, delta) == bits_of(BASE)
    tensors, _ = read_safetensors(tmp_path / "v1" / "step_000002.safetensors")
    assert tensors == {"__empty_delta__": ("I32", [1], b"\0\0\0\0")}


def test_unchanged_tensors_may_be_listed(tmp_path: Path) -> None:
    """TRL names every tensor that its optimizer has, also with no changes."""
    base = write_checkpoint(tmp_path / "base", BASE)
    tensors = by_hand.trl_tensors(BASE, NEW, "v2", "gap_delta")
    tensors |= {"still.idx": ("U16", (0,), b""), "still.val": ("BF16", (0,), b"")}
    metadata = by_hand.trl_metadata(tensors, "v2", "gap_delta", 4)
    path = tmp_path / "step_000004.safetensors"
    path.write_bytes(safetensors(tensors, metadata))
    with trl.open_delta(path) as delta:
        assert delta.tensors["still"].changed_count == 0
        assert applied(base, delta) == bits_of(NEW)


def test_first_drafts_name_their_base_and_hash_all_weights(tmp_path: Path) -> None:
    old = {name: t for name, t in BASE.items() if t[0] == "BF16"}
    new = {name: NEW[name] for name in old}
    tensors = by_hand.trl_tensors(old, new, "v1", "raw")
    metadata = by_hand.trl_metadata(tensors, "v1", "raw", 9)
    del metadata["sparse"]
    metadata |= {"format": "sparse_weight_patch", "version": "1", "prev_model_version": "5"}
    metadata |= {"num_changed_params": str(len(tensors) // 2)}
    said = hashlib.sha256(b"".join(data for _, (_, _, data) in sorted(new.items()))).hexdigest()
    metadata["checksum_sha256"] = said
    path = tmp_path / "step_000009.safetensors"
    path.write_bytes(safetensors(tensors, metadata))
    base = write_checkpoint(tmp_path / "base", old)
    wrong = write_checkpoint(tmp_path / "wrong", old | {"still": tensor("BF16", [9], 99)})
    with trl.open_delta(path) as delta:
        assert (delta.facts.version, delta.facts.base_version) == (9, 5)
        assert "changed_params" not in delta.facts.metadata
        assert delta.check_weights(base)
        with pytest.raises(ChecksumMismatch, match="checksum_sha256"):
            delta.check_weights(wrong)
        assert not delta.check_weights(write_checkpoint(tmp_path / "mixed", BASE))
    with trl.open_delta(by_hand.write_trl(tmp_path, old, new, 9, "v1", "raw")) as delta:
        assert not delta.check_weights(base)


def test_a_chain(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    states: list[Tensors] = [BASE]
    for seed in range(4):
        last = states[-1]
        states.append(
            {name: stepped(t, seed + 50) if t[0] == "BF16" else t for name, t in last.items()}
        )
    opened = [
        write_checkpoint(tmp_path / f"s{number}", state) for number, state in enumerate(states)
    ]

    def out(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    brought(trl.write_full(opened[0], out("f0"), version=0), chain)
    for step in (1, 2):
        change = CheckpointChange(opened[step - 1], opened[step])
        files = trl.write_delta(change, out(f"d{step}"), version=step, base_version=step - 1)
        brought(files, chain)
    # Steps may be left out; a step may have both.
    brought(
        trl.write_delta(
            CheckpointChange(opened[2], opened[3]), out("d5"), version=5, base_version=2
        ),
        chain,
    )
    brought(trl.write_full(opened[3], out("f5"), version=5), chain)
    brought(
        trl.write_delta(
            CheckpointChange(opened[3], opened[4]), out("d9"), version=9, base_version=8
        ),
        chain,
    )
    brought(trl.write_full(opened[4], out("f9"), version=9), chain)
    (chain / "deltas" / "notes.txt").write_text("x")
    rows = trl.list_versions(chain)
    assert [(row.version, row.base_version) for row in rows] == [
        (0, None),
        (1, 0),
        (2, 1),
        (5, 2),
        (9, None),
    ]
    state = Checkpoint.open(rows[0].path, ignore_subfolders=True)
    for number, row in enumerate(rows[1:4], 1):
        with trl.open_delta(row.path) as delta:
            assert applied(state, delta) == bits_of(states[number])
        state = opened[number]
    assert trl.list_versions(tmp_path / "nothing") == []
    assert trl.list_versions(tmp_path) == []


def test_what_cannot_be_carried(tmp_path: Path) -> None:
    def write(old: Tensors, new: Tensors, **options: object) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        change = change_between(folder, old, new)
        (folder / "out").mkdir()
        given = {"version": 2, "base_version": 1} | options
        trl.write_delta(change, folder / "out", **given)  # type: ignore[arg-type]

    for dtype in ("F32", "F16", "F8_E4M3", "I64"):
        with pytest.raises(Unsupported, match=f"'t'.*{dtype}"):
            write({"t": tensor(dtype, [9], 1)}, {"t": tensor(dtype, [9], 2)})
    with pytest.raises(TensorMismatch, match="came or went"):
        write(BASE, {**BASE, "more": tensor("BF16", [2])})
    with pytest.raises(TensorMismatch, match="came or went"):
        write(BASE, {name: t for name, t in BASE.items() if name != "still"})
    with pytest.raises(TensorMismatch, match="dtype or shape"):
        write(BASE, {**BASE, "still": tensor("BF16", [3, 3])})
    with pytest.raises(InvalidArgument, match="layout 'v3'"):
        write(BASE, NEW, layout="v3")
    with pytest.raises(InvalidArgument, match="gap_delta"):
        write(BASE, NEW, layout="v1", encoding="gap_delta")
    with pytest.raises(InvalidArgument, match="nvcomp_cascaded"):
        write(BASE, NEW, encoding="nvcomp_cascaded")
    with pytest.raises(InvalidArgument, match="step 1"):
        write(BASE, NEW, version=1)


def test_other_files_are_not_carried(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "a", BASE, files={"config.json": "{}"})
    new = write_checkpoint(tmp_path / "b", NEW, files={"config.json": "[]"})
    (tmp_path / "out").mkdir()
    with pytest.raises(Unsupported, match=r"config\.json"):
        trl.write_delta(CheckpointChange(base, new), tmp_path / "out", version=2, base_version=1)


def test_the_base_must_be_bf16(tmp_path: Path) -> None:
    path = by_hand.write_trl(tmp_path, BASE, NEW, 2, "v2", "raw")
    other = write_checkpoint(tmp_path / "f16", {**BASE, "model.w": tensor("F16", [40, 30])})
    with trl.open_delta(path) as delta:
        with pytest.raises(TensorMismatch, match="F16"):
            delta.new_tensor("model.w", other.tensors["model.w"])
        with pytest.raises(TensorMismatch, match="the base has no tensor"):
            delta.new_tensor("model.w", None)
        with pytest.raises(TensorMismatch, match="has no tensor"):
            ForeignChange(write_checkpoint(tmp_path / "x", {"x": BASE["still"]}), delta)


def test_the_base_is_only_read(tmp_path: Path) -> None:
    words = np.frombuffer(BASE["model.w"][2], np.uint8)
    base = StoredTensor("BF16", (40, 30), words)
    with trl.open_delta(by_hand.write_trl(tmp_path, BASE, NEW, 2, "v2", "raw")) as delta:
        new = delta.new_tensor("model.w", base)
    assert words.tobytes() == BASE["model.w"][2]
    assert new.data.tobytes() == NEW["model.w"][2]
    assert not new.data.flags.writeable
    assert NewWords("x", "y", "z", base).finish().data.tobytes() == words.tobytes()


@pytest.mark.parametrize("kind", ["v1-raw", "v2-raw", "v2-gap_delta"])
def test_golden_files(kind: str, tmp_path: Path) -> None:
    """Written once, by :mod:`.sparse_by_hand`, and never again."""
    golden = VECTORS / kind / "deltas" / "step_000001.safetensors"
    base = Checkpoint.open(VECTORS / "anchors" / "step_000000.safetensors")
    new = Checkpoint.open(VECTORS / "anchors" / "step_000001.safetensors")
    with trl.open_delta(golden) as delta:
        assert applied(base, delta) == checkpoint_bits(new)
    layout, encoding = kind.split("-")
    (tmp_path / "out").mkdir()
    [file] = trl.write_delta(
        CheckpointChange(base, new),
        tmp_path / "out",
        version=1,
        base_version=0,
        layout=layout,
        encoding=encoding,
    )
    assert read_safetensors(file.path)[0] == read_safetensors(golden)[0]
