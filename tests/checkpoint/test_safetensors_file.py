from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from thinwire.checkpoint.safetensors_file import (
    MAX_HEADER_BYTES,
    SafetensorsFile,
    build_header,
    parse_header,
)
from thinwire.codec.dtypes import DTYPES
from thinwire.errors import (
    Corrupt,
    FormatError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    Truncated,
    Unsupported,
)

from .making import pack, raw_file, tensor

MIXED = {
    "w": tensor("BF16", [3, 5], 1),
    "scale": tensor("F32", [], 2),
    "empty": tensor("F16", [0, 7], 3),
    "q": tensor("F8_E4M3", [9], 4),
    "packed": tensor("F4", [6], 5),
    "ids": tensor("I64", [2], 6),
}


def entry(
    dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(pack(MIXED, {"format": "pt"}))
    file = SafetensorsFile.open(path)
    assert file.metadata == {"format": "pt"}
    assert list(file.tensors) == list(MIXED)
    for name, (dtype, shape, data) in MIXED.items():
        read = file.tensors[name]
        assert (read.dtype, read.shape, read.data.tobytes()) == (dtype, tuple(shape), data)
        assert not read.data.flags.writeable
    assert path.read_bytes().startswith(file.header_bytes)
    assert len(file.header_bytes) + sum(len(data) for _, _, data in MIXED.values()) == (
        path.stat().st_size
    )


def test_agrees_with_the_library_on_its_own_files(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.array(3, np.int8),
        "c": np.zeros((0,), np.float64),
        "ü/名": np.array([True, False]),
    }
    save_file(arrays, path, metadata={"k": "v"})
    file = SafetensorsFile.open(path)
    assert file.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert file.tensors[name].shape == array.shape
        assert file.tensors[name].data.tobytes() == array.tobytes()


def test_knows_every_dtype_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for row in DTYPES.values():
        path.write_bytes(pack({}, {}))
        size_bytes = row.bits  # of 8 elements
        header = {"t": entry(row.name, [8], [0, size_bytes])}
        data = raw_file(json.dumps(header).encode(), bytes(size_bytes))
        path.write_bytes(data)
        assert SafetensorsFile.open(path).tensors["t"].dtype == row.name
        assert dict(safetensors.deserialize(data))["t"]["dtype"] == row.name


def test_every_strict_prefix_is_truncated(tmp_path: Path) -> None:
    whole = pack(MIXED, {"format": "pt"})
    path = tmp_path / "m.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(Truncated) as caught:
            SafetensorsFile.open(path)
        assert str(path) in str(caught.value)


BAD = {
    "no header": (raw_file(b""), Corrupt),
    "not a table": (raw_file(b"[]"), Corrupt),
    "leading space": (raw_file(b" {}"), Corrupt),
    "not JSON": (raw_file(b"{"), Corrupt),
    "UTF-16": (raw_file("{}".encode("utf-16-le")), Corrupt),
    "not UTF-8": (raw_file(b'{"\xff":1}'), Corrupt),
    "trailing byte": (raw_file(b"{}\0"), Corrupt),
    "deep": (raw_file(b'{"a":' * 100_000), Corrupt),
    "huge number": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), Corrupt),
    "header size": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), LimitExceeded),
    "header size max": (b"\xff" * 64, LimitExceeded),
    "key twice": (
        raw_file(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), b"1"),
        Corrupt,
    ),
    "field twice": (
        raw_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"),
        Corrupt,
    ),
    "lone surrogate": (raw_file(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), b"1"), Corrupt),
    "metadata of numbers": (raw_file(b'{"__metadata__":{"a":1}}'), Corrupt),
    "metadata list": (raw_file(b'{"__metadata__":[]}'), Corrupt),
}
for label, bad_entry, size_bytes, error in [
    ("entry is a list", [], 0, Corrupt),
    ("no shape", {"dtype": "U8", "data_offsets": [0, 1]}, 1, Corrupt),
    ("unknown dtype", entry("F7"), 1, Unsupported),
    ("dtype is a number", entry(8), 1, Corrupt),
    ("negative extent", entry(shape=[-1]), 1, Corrupt),
    ("fractional extent", entry(shape=[1.0]), 1, Corrupt),
    ("true extent", entry(shape=[True]), 1, Corrupt),
    ("extent of 2**63", entry(shape=[0, 2**63], offsets=[0, 0]), 0, Corrupt),
    ("huge shape", entry(shape=[2**40, 2**40]), 1, LimitExceeded),
    ("many dimensions", entry(shape=[1] * 1000), 1, LimitExceeded),
    ("half a byte", entry("F4", [3], [0, 1]), 1, FormatError),
    ("one offset", entry(offsets=[0]), 1, Corrupt),
    ("offsets turned", entry(shape=[0], offsets=[1, 0]), 1, Corrupt),
    ("too few bytes", entry(shape=[2]), 1, Corrupt),
    ("too many bytes", entry(offsets=[0, 2]), 2, Corrupt),
    ("hole at the start", entry(offsets=[1, 2]), 2, Corrupt),
    ("bytes after the end", entry(), 2, Corrupt),
    ("beyond the end", entry(offsets=[2**62, 2**62 + 1]), 1, Corrupt),
]:
    text = json.dumps({"a": bad_entry}).encode()
    BAD[label] = (raw_file(text, bytes(size_bytes)), error)


@pytest.mark.parametrize("label", BAD)
def test_refuses(label: str, tmp_path: Path) -> None:
    data, error = BAD[label]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        SafetensorsFile.open(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_overlap_and_hole_name_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    for second, word in (((1, 3), "overlaps"), ((3, 5), "hole")):
        header = {"a": entry(shape=[2], offsets=[0, 2]), "b": entry(shape=[2], offsets=second)}
        path.write_bytes(raw_file(json.dumps(header).encode(), bytes(5)))
        with pytest.raises(Corrupt, match=word) as caught:
            SafetensorsFile.open(path)
        assert caught.value.context["tensor"] == "b"


def test_a_header_of_another_length_than_it_says() -> None:
    for data in (b"", raw_file(b"{}") + b"}", raw_file(b"{} ")[:-1]):
        with pytest.raises(FormatError):
            parse_header(data, "x")


def test_only_regular_files(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        SafetensorsFile.open(tmp_path / "none")
    with pytest.raises(InvalidArgument):
        SafetensorsFile.open(tmp_path)


def test_new_headers_are_read_back() -> None:
    rows = [(name, dtype, tuple(shape)) for name, (dtype, shape, _) in MIXED.items()]
    for metadata in ({}, {"format": "pt", "sch\u00f6n": "\u2603"}):
        parsed = parse_header(build_header(rows, metadata), "x")
        assert [(name, *span[:2]) for name, span in parsed.spans.items()] == rows
        assert parsed.metadata == metadata
        assert len(parsed.bytes) % 8 == 0


def test_headers_that_no_reader_takes_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in ([("w", "U8", [1])] * 2, [("__metadata__", "U8", [1])], [("\ud800", "U8", [1])]):
        with pytest.raises(InvalidArgument, match=r"file\.safetensors: "):
            build_header(rows, {"format": "pt"}, "file.safetensors")
    monkeypatch.setattr("thinwire.checkpoint.safetensors_file.MAX_HEADER_BYTES", 100)
    with pytest.raises(LimitExceeded, match="more files"):
        build_header([("w" * 100, "U8", [1])], {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F4", "F32", "X"]) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(0, 16), st.integers(0, 16)) | JSON,
    }
)


@given(st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=3), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_accepts_nothing_that_the_library_refuses(header: dict[str, object], size: int) -> None:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    data = raw_file(text, bytes(size))
    try:
        parsed = parse_header(raw_file(text), "x")
    except FormatError:
        return
    if parsed.file_bytes == len(data):
        assert {name for name, _ in safetensors.deserialize(data)} == set(parsed.spans)


@given(st.binary(max_size=64))
def test_random_bytes_are_refused_cleanly(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_header(data, "x")
