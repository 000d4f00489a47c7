"""Deltas that no diff would write: sound containers whose content is made to harm."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from thinwire.checkpoint import apply_checkpoint, apply_in_place
from thinwire.checkpoint.plan import MAX_CARRIED_BYTES
from thinwire.checkpoint.safetensors_file import MAX_HEADER_BYTES
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import Attachment, Pair, write_delta
from thinwire.errors import BaseMismatch, FormatError, LimitExceeded

from .making import names_in, pack, raw_file, read_folder, tensor, write_folder

TENSOR = tensor("U8", [4], 1)
HEADER = pack({"a": TENSOR})[:-4]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    files = {"model.safetensors": pack({"a": TENSOR}), "config.json": "{}"}
    return write_folder(tmp_path / "base", files)


def header(data: bytes = HEADER, name: str = "model.safetensors") -> Attachment:
    return Attachment(name, "header", data, len(data), xxh3_64(data))


def file(name: str, data: bytes | None = b"x", kind: str = "file") -> Attachment:
    content = b"x" if data is None else data
    return Attachment(name, kind, data, len(content), xxh3_64(content))


def make_delta(*attachments: Attachment, **tensors: tuple[str, tuple[int, ...], bytes]) -> bytes:
    base = np.frombuffer(TENSOR[2], np.uint8)
    pairs = [Pair("a", "U8", (4,), base, base)]
    pairs += [
        Pair(name, dtype, tuple(shape), None, np.frombuffer(data, np.uint8))
        for name, (dtype, shape, data) in tensors.items()
    ]
    out = io.BytesIO()
    write_delta(out, pairs, attachments)
    return out.getvalue()


def changed_header(**fields: object) -> Attachment:
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **fields}
    return header(raw_file(json.dumps({"a": entry}).encode()))


HOSTILE = {
    name: make_delta(header(), file(name))
    for name in [
        *["../evil", "/tmp/evil", "a/b", "a\\b", "C:evil", ".thinwire-redo", ".", ".."],
        *["a\0b", "a\nb", "x" * 300, "", "..x", ".model.safetensors.thinwire-redo"],
    ]
} | {
    "header outside": make_delta(header(), header(name="../x.safetensors")),
    "weights as a file": make_delta(header(), file("x.safetensors")),
    "header of a file": make_delta(header(), header(name="x.json")),
    "case": make_delta(header(), file("A.txt"), file("a.txt")),
    "unicode form": make_delta(header(), file("\u00e9"), file("e\u0301")),
    "unknown kind": make_delta(header(), file("x", b"x", "symlink")),
    "remove outside": make_delta(header(), file("../base/config.json", b"", "removed")),
    "remove weights": make_delta(header(), file("other.safetensors", b"", "removed")),
    "no weights": make_delta(file("config.json")),
    "single file and others": make_delta(header(name="."), file("config.json")),
    "tensor in no header": make_delta(header(), more=TENSOR),
    "tensor without bytes": make_delta(header(pack({"a": TENSOR, "b": TENSOR})[:-8])),
    "tensor in two headers": make_delta(header(), header(name="two.safetensors")),
    "another shape": make_delta(changed_header(shape=[2, 2])),
    "another dtype": make_delta(changed_header(dtype="I8")),
    "offsets beyond": make_delta(changed_header(data_offsets=[2**60, 2**60 + 4])),
    "huge": make_delta(changed_header(shape=[2**62], data_offsets=[0, 2**62])),
    "negative": make_delta(changed_header(data_offsets=[-4, 0])),
    "header with data": make_delta(header(HEADER + b"1234")),
    "header cut": make_delta(header(HEADER[:-1])),
    "header of nothing": make_delta(header(b"")),
}


@pytest.mark.parametrize("label", HOSTILE)
def test_refused_and_nothing_written(label: str, base: Path, tmp_path: Path) -> None:
    before, siblings = read_folder(base), names_in(tmp_path)
    with pytest.raises(FormatError):
        apply_checkpoint(base, HOSTILE[label], tmp_path / "out")
    with pytest.raises(FormatError):
        apply_in_place(base, HOSTILE[label])
    assert read_folder(base) == before
    assert names_in(tmp_path) == siblings


def test_small_deltas_that_unpack_to_much(base: Path, tmp_path: Path) -> None:
    half = bytes((MAX_CARRIED_BYTES >> 1) + 1)
    much = make_delta(header(), file("a", half), file("b", half))
    large = make_delta(header(bytes(MAX_HEADER_BYTES + 9)))
    for delta in (much, large):
        assert len(delta) < 100_000
        with pytest.raises(LimitExceeded):
            apply_checkpoint(base, delta, tmp_path / "out")


def test_the_same_without_malice_is_accepted(base: Path, tmp_path: Path) -> None:
    delta = make_delta(header(), file("plain.txt"), file("config.json", b"", "removed"))
    apply_checkpoint(base, delta, tmp_path / "out")
    assert names_in(tmp_path / "out") == ["model.safetensors", "plain.txt"]
    apply_in_place(base, delta)
    assert read_folder(base) == read_folder(tmp_path / "out")


def test_a_file_that_the_base_should_have(base: Path, tmp_path: Path) -> None:
    for delta in (make_delta(header(), file("lost.txt", None)), make_delta(file("x", None))):
        with pytest.raises((BaseMismatch, FormatError)):
            apply_checkpoint(base, delta, tmp_path / "out")
