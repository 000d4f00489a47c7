"""The rows of other systems have these systems' bytes: the readers of interop take their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.bench import Checkpoint, Tensor, as_tensor, make_peer
from thinwire.bench.framing import pack, unpack
from thinwire.bench.peers.zstd_one import load_zstd
from thinwire.checkpoint import Checkpoint as OpenedCheckpoint
from thinwire.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from thinwire.interop import grail, slime, trl
from thinwire.interop.change import CheckpointChange
from thinwire.interop.grail_layout import LENGTH_BYTES, array_at, join_positions, parse_header
from thinwire.interop.sparse import NewWords, words_of

Pair = tuple[Checkpoint, Checkpoint]


@pytest.fixture(params=range(3))
def bf16_pair(request: pytest.FixtureRequest) -> Pair:
    rng = np.random.default_rng(request.param)
    shapes = {"m": (300, 70), "v": (999,), "t": (3, 5, 7), "far": (200_000,), "still": (4,)}
    base: dict[str, Tensor] = {}
    new: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        words = rng.integers(0, 1 << 16, int(np.prod(shape)), np.uint16)
        changed = words.copy()
        share = [0.00005, 0.01, 1.0][request.param]
        if name != "still":
            changed[rng.random(words.size) < share] ^= 1
        base[name] = as_tensor("BF16", shape, words)
        new[name] = as_tensor("BF16", shape, changed)
    return base, new


def stored(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tensor.dtype, tensor.shape, tensor.words.view(np.uint8))


def change_between(folder: Path, pair: Pair) -> CheckpointChange:
    opened = []
    for name, tensors in zip(("old", "new"), pair, strict=True):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(pack(tensors, {}))
        opened.append(OpenedCheckpoint.open(folder / name))
    return CheckpointChange(*opened)


@pytest.mark.parametrize(("row", "encoding"), [("trl_raw", "raw"), ("trl_gap_delta", "gap_delta")])
def test_trl_rows_are_deltas_of_trl(
    tmp_path: Path, bf16_pair: Pair, row: str, encoding: str
) -> None:
    base, new = bf16_pair
    peer = make_peer(row)
    payload = peer.encode(base, new)
    path = tmp_path / "delta.safetensors"
    path.write_bytes(payload)
    with trl.open_delta(path) as delta:
        for name, tensor in new.items():
            made = stored(base[name])
            if name in delta.tensors:
                made = delta.new_tensor(name, made)
            assert words_of(made).tobytes() == tensor.words.tobytes()
    (tmp_path / "out").mkdir()
    [file] = trl.write_delta(
        change_between(tmp_path, bf16_pair),
        tmp_path / "out",
        version=1,
        base_version=0,
        encoding=encoding,
    )
    written = file.path.read_bytes()
    assert len(written) - peer.framing_bytes(written) == len(payload) - peer.framing_bytes(payload)


def test_the_xor_row_is_slimes_payload(tmp_path: Path, bf16_pair: Pair) -> None:
    base, new = bf16_pair
    row = make_peer("xor_zstd1")
    (tmp_path / "out").mkdir()
    change = change_between(tmp_path, bf16_pair)
    files = slime.write_delta(change, tmp_path / "out", version=1, base_version=0)
    written = SafetensorsFile.open(files[0].path)
    payloads, _ = unpack(row.encode(base, new))
    assert {name: one.words.tobytes() for name, one in payloads.items()} == {
        name: one.data.tobytes() for name, one in written.tensors.items()
    }


def test_the_pulse_row_is_a_delta_of_grail(tmp_path: Path, bf16_pair: Pair) -> None:
    base, new = bf16_pair
    payload = make_peer("pulse").encode(base, new)
    file = load_zstd().decompress(payload)
    data_start = LENGTH_BYTES + int.from_bytes(file[:LENGTH_BYTES], "little")
    header = parse_header(file[LENGTH_BYTES:data_start], "the row")
    assert header.layout == "v3.1"
    data = np.frombuffer(file, np.uint8)[data_start:]
    assert data.size == header.data_bytes
    assert header.entries.keys() == {
        name for name in new if (new[name].words != base[name].words).any()
    }
    for name, entry in header.entries.items():
        made = NewWords("grail", "the row", name, stored(base[name]))
        index = array_at(data, entry.indices, entry.index_type)
        columns = array_at(data, entry.columns, entry.column_type)
        values = array_at(data, entry.values, "<u2")
        start = 0
        for positions in join_positions(index, columns, entry.shape, header.layout):
            made.put(positions, values[start : start + positions.size])
            start += positions.size
        assert words_of(made.finish()).tobytes() == new[name].words.tobytes()
    (tmp_path / "out").mkdir()
    files = grail.write_delta(
        change_between(tmp_path, bf16_pair), tmp_path / "out", version=1, base_version=0
    )
    assert load_zstd().decompress(files[0].path.read_bytes()) == file
