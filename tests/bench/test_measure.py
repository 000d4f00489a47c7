"""Measuring: what is counted, and that no wrong row ever gets a number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from thinwire.bench import (
    Checkpoint,
    InPlaceFile,
    RoundTripError,
    WholeFile,
    as_tensor,
    class_bound,
    make_peer,
    measure_sequence,
    read_checkpoint,
)
from thinwire.bench.framing import pack, unpack
from thinwire.bench.tensors import changed_count, raw_bytes

Pair = tuple[Checkpoint, Checkpoint]


def encode_raw(_base: Checkpoint, new: Checkpoint) -> bytes:
    return pack(new, {})


def decode_raw(_base: Checkpoint, payload: bytes) -> Checkpoint:
    return unpack(payload)[0]


def decode_raw_into(base: Checkpoint, payload: bytes) -> None:
    for name, tensor in unpack(payload)[0].items():
        np.copyto(base[name].words, tensor.words)


def decode_flipped(base: Checkpoint, payload: bytes) -> Checkpoint:
    new = dict(decode_raw(base, payload))
    words = new["v"].words.copy()
    words[5] ^= 1
    return {**new, "v": new["v"]._replace(words=words)}


def decode_without(base: Checkpoint, payload: bytes) -> Checkpoint:
    return {name: t for name, t in decode_raw(base, payload).items() if name != "t"}


def decode_reshaped(base: Checkpoint, payload: bytes) -> Checkpoint:
    new = decode_raw(base, payload)
    return {**new, "t": new["t"]._replace(shape=(105,))}


@pytest.fixture
def paths(tmp_path: Path, sparse_pair: Pair) -> list[Path]:
    """Three consecutive checkpoints: a file, and folders as the corpus has them."""
    first, second = sparse_pair
    third = {name: first[name] if name == "far" else tensor for name, tensor in second.items()}
    paths = [tmp_path / "0.safetensors", tmp_path / "1", tmp_path / "2"]
    paths[0].write_bytes(pack(first, {}))
    for folder, checkpoint in zip(paths[1:], (second, third), strict=True):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(pack(checkpoint, {}))
    return paths


def test_report_counts_what_it_says(paths: list[Path]) -> None:
    first, second, third = (read_checkpoint(path) for path in paths)
    whole = WholeFile("whole", encode_raw, decode_raw)
    seen: list[tuple[int, str]] = []
    report = measure_sequence(
        paths,
        [whole, make_peer("trl_raw")],
        load=read_checkpoint,
        repetition_count=2,
        on_progress=lambda step, name: seen.append((step, name)),
        skipped={"arc_v3": "not here"},
    )
    assert [row.name for row in report.rows] == [
        "class-conditional bound",
        "whole",
        "trl_raw",
        "memcpy",
    ]
    assert seen == [(0, "whole"), (0, "trl_raw"), (1, "whole"), (1, "trl_raw")]
    raw = raw_bytes(first)
    counts = [changed_count(first, second), changed_count(second, third)]
    assert report.raw_bytes == raw
    assert report.changed_percent == pytest.approx(100 * sum(counts) / 2 / (raw / 2))
    trl = report.row("trl_raw")
    assert trl.step_payload_bytes == (6 * counts[0], 6 * counts[1])
    assert trl.bits_per_change == pytest.approx(48)
    assert trl.payload_percent == pytest.approx(100 * 6 * sum(counts) / 2 / raw)
    assert trl.file_percent is not None
    assert trl.file_percent > 100 * 6 * sum(counts) / 2 / raw
    whole_row = report.row("whole")
    assert whole_row.payload_percent == whole_row.file_percent
    assert whole_row.bits_per_change is not None
    assert whole_row.bits_per_change > 48
    bound = class_bound(first, second), class_bound(second, third)
    assert report.rows[0].step_payload_bytes == tuple(part.payload_bytes for part in bound)
    assert trl.times_reference is None
    for row in report.rows[1:]:
        assert row.encode is not None
        assert row.encode.cpu_mb_s > 0 < row.encode.wall_mb_s
        assert row.decode is not None
        assert row.decode_into is None
    assert json.loads(report.to_json())["skipped"] == {"arc_v3": "not here"}
    with pytest.raises(KeyError):
        report.row("arc_v3")


def test_sizes_relative_to_arc_v3(paths: list[Path]) -> None:
    stand_in = WholeFile("arc_v3", encode_raw, decode_raw)
    report = measure_sequence(
        paths[:2], [stand_in, make_peer("trl_raw")], load=read_checkpoint, repetition_count=1
    )
    whole, trl = report.row("arc_v3"), report.row("trl_raw")
    assert whole.times_reference == 1
    assert whole.payload_percent
    assert trl.payload_percent
    assert trl.times_reference == pytest.approx(trl.payload_percent / whole.payload_percent)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_flipped, "row bad: tensor 'v' came back with 1 wrong elements of 999"),
        (decode_without, "row bad: tensor 't' is on one side only"),
        (decode_reshaped, "row bad: tensor 't' came back as BF16 (105,)"),
    ],
)
def test_a_failing_round_trip_raises(paths: list[Path], decode: object, message: str) -> None:
    bad = WholeFile("bad", encode_raw, decode)  # type: ignore[arg-type]
    with pytest.raises(RoundTripError) as caught:
        measure_sequence(paths, [bad], load=read_checkpoint, repetition_count=1)
    assert message in str(caught.value)


def test_in_place_is_measured_and_checked(paths: list[Path]) -> None:
    good = InPlaceFile("good", encode_raw, decode_raw, decode_raw_into)
    report = measure_sequence(paths, [good], load=read_checkpoint, repetition_count=2)
    assert report.row("good").decode_into is not None
    lazy = InPlaceFile("lazy", encode_raw, decode_raw, lambda _base, _payload: None)
    with pytest.raises(RoundTripError, match="row lazy in place"):
        measure_sequence(paths, [lazy], load=read_checkpoint, repetition_count=1)


def test_bad_input(paths: list[Path], tmp_path: Path) -> None:
    whole = WholeFile("whole", encode_raw, decode_raw)
    with pytest.raises(ValueError, match="two checkpoints, got 1"):
        measure_sequence(paths[:1], [whole], load=read_checkpoint)
    with pytest.raises(ValueError, match="same name"):
        measure_sequence(paths, [whole, whole], load=read_checkpoint)
    with pytest.raises(ValueError, match="repetition_count"):
        measure_sequence(paths, [whole], load=read_checkpoint, repetition_count=0)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="nothing"):
        measure_sequence([paths[0], tmp_path / "nothing"], [whole], load=read_checkpoint)
    other = tmp_path / "other.safetensors"
    other.write_bytes(pack({"m": as_tensor("BF16", (2,), np.ones(2, np.uint16))}, {}))
    with pytest.raises(ValueError, match="on one side only"):
        measure_sequence([paths[0], other], [whole], load=read_checkpoint)
    other.write_bytes(pack({}, {}))
    with pytest.raises(ValueError, match="no weights"):
        measure_sequence([other, other], [whole], load=read_checkpoint)
    other.write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match=r"other\.safetensors is not a safetensors file"):
        measure_sequence([other, other], [whole], load=read_checkpoint)
