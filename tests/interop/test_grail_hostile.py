"""grail's deltas: what breaks a rule is an error that says which, and takes no base with it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    FormatError,
    LimitExceeded,
    NotFound,
    ThinwireError,
    Truncated,
    Unsupported,
)
from thinwire.interop import grail

from . import sparse_by_hand as by_hand
from .making import Tensor, stepped, tensor

OLD: dict[str, Tensor] = {"a": tensor("BF16", [40, 30], 1), "b": tensor("F32", [70], 2)}
NEW: dict[str, Tensor] = {name: stepped(old, 5) for name, old in OLD.items()}
BASE = {
    name: StoredTensor(dtype, tuple(shape), np.frombuffer(data, np.uint8))
    for name, (dtype, shape, data) in OLD.items()
}
LAYOUTS = ["v2", "v3", "v3.1"]
NUMBERS = {"v2": 2, "v3": 3, "v3.1": 31}


@cache
def sound(layout: str) -> bytes:
    return by_hand.grail_data(OLD, NEW, layout)


def parts(layout: str) -> tuple[list[dict[str, Any]], bytes]:
    file = sound(layout)
    stop = 4 + int.from_bytes(file[:4], "little")
    return json.loads(file[4:stop])["tensors"], file[stop:]


def folder_of(folder: Path, file: bytes, layout: str = "v3.1", **more: Any) -> Path:
    packed = by_hand.zstd.compress(file, 1)
    return by_hand.grail_folder(folder, packed, layout=layout, window=5, before=4, **more)


def apply_all(path: Path) -> None:
    with grail.open_delta(path) as delta:
        for name in delta.tensors:
            delta.new_tensor(name, BASE.get(name))


def entry(**fields: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda entries: entries[0].update(fields)


def without(key: str) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda entries: entries[0].pop(key)


BAD_ENTRIES: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], type[FormatError], str]] = {
    "no name": (without("name"), Corrupt, "no name"),
    "surrogate": (entry(name="\ud800"), Corrupt, "no name"),
    "twice": (lambda entries: entries.append(entries[0]), Corrupt, "comes twice"),
    "no table": (lambda entries: entries.append(7), Corrupt, "no name"),
    "no dtype": (without("value_dtype"), Unsupported, "values of None"),
    "odd dtype": (entry(value_dtype="float8"), Unsupported, "values of float8"),
    "listed dtype": (entry(value_dtype=[]), Unsupported, "values of"),
    "no shape": (without("shape"), Corrupt, "shape is malformed"),
    "negative shape": (entry(shape=[-1, 2]), Corrupt, "shape is malformed"),
    "true shape": (entry(shape=[True]), Corrupt, "shape is malformed"),
    "float shape": (entry(shape=[4.0]), Corrupt, "shape is malformed"),
    "huge shape": (entry(shape=[1 << 40, 1 << 40]), LimitExceeded, "beyond"),
    "many axes": (entry(shape=[1] * 33), LimitExceeded, "33 dimensions"),
    "too many changes": (entry(num_nonzero=1201), Corrupt, "1201 changes in a tensor"),
    "negative changes": (entry(num_nonzero=-1), Corrupt, "num_nonzero is malformed"),
    "fewer changes": (entry(num_nonzero=1), Corrupt, "for 1 changes"),
    "text offset": (entry(indices_offset="0"), Corrupt, "indices_offset is malformed"),
    "hole": (entry(indices_offset=1), Corrupt, "hole"),
    "far": (entry(values_offset=1 << 61), Corrupt, "hole"),
    "overlap": (lambda e: e[1].update(values_offset=0), Corrupt, "overlaps"),
    "beyond 62 bits": (entry(values_offset=1 << 62), Corrupt, "values_offset is malformed"),
    "row type": (entry(row_dtype="int8"), Unsupported, "row_dtype int8"),
    "column type": (entry(col_dtype=["int32"]), Unsupported, "col_dtype"),
    "row sizes": (entry(rows_size=1), Corrupt, "rows_size and cols_size"),
    "values": (entry(values_size=1), Corrupt, "1 bytes of values"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_bad_entries(tmp_path: Path, case: str) -> None:
    edit, error, match = BAD_ENTRIES[case]
    entries, data = parts("v3.1")
    edit(entries)
    delta = folder_of(tmp_path, by_hand.grail_file(31, entries, data))
    with pytest.raises(error, match=match) as caught:
        grail.open_delta(delta)
    assert "delta_sparse.bin.zst" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("version", [1, 4, "31", True, None, 31.5])
def test_other_layouts_are_refused(tmp_path: Path, version: Any) -> None:
    entries, data = parts("v3.1")
    with pytest.raises(Unsupported, match="layout version"):
        grail.open_delta(folder_of(tmp_path, by_hand.grail_file(version, entries, data)))


HEADERS = {
    "not JSON": (b"{", Corrupt),
    "a list": (b"[]", Corrupt),
    "deep": (b"[" * 100_000, Corrupt),
    "a key twice": (b'{"version": 31, "version": 31, "tensors": []}', Corrupt),
    "no tensors": (b'{"version": 31}', Corrupt),
    "a table": (b'{"version": 31, "tensors": {}}', Corrupt),
    "not UTF-8": (b"\xff\xfe", Corrupt),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(tmp_path: Path, case: str) -> None:
    text, error = HEADERS[case]
    with pytest.raises(error):
        grail.open_delta(folder_of(tmp_path, len(text).to_bytes(4, "little") + text))


def test_a_header_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="bytes of header"):
        grail.open_delta(folder_of(tmp_path, b"\xff\xff\xff\xff{}"))
    with pytest.raises(Truncated, match="inside of its header"):
        grail.open_delta(folder_of(tmp_path / "b", b"\xff\0\0\0{}"))
    with pytest.raises(Truncated, match="inside of its header"):
        grail.open_delta(folder_of(tmp_path / "c", b"\xff"))


BAD_POSITIONS = {
    "twice": ([3, 3], "do not rise"),
    "falling": ([3, 2], "do not rise|negative"),
    "negative": ([-1], "negative"),
    "outside": ([1200], "position 1200|outside"),
    "far": ([2**31 - 1], "not one of its|outside"),
}


@pytest.mark.parametrize("case", BAD_POSITIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_positions(tmp_path: Path, case: str, layout: str) -> None:
    positions, match = BAD_POSITIONS[case]
    steps = np.diff(positions, prepend=0).astype("<i4").tobytes()
    row = {
        "name": "a",
        "shape": [40, 30],
        "num_nonzero": len(positions),
        "value_dtype": "bfloat16",
        "indices_offset": 0,
        "indices_size": len(steps),
    }
    if layout != "v2":
        # All in row 0: only the first one may be as large as it likes, and not for long.
        steps = bytes(len(steps)) + steps
        row |= {"rows_size": len(steps) // 2, "cols_size": len(steps) // 2}
        row["indices_size"] = len(steps)
    row |= {"values_offset": len(steps), "values_size": 2 * len(positions)}
    data = steps + bytes(2 * len(positions))
    delta = folder_of(tmp_path, by_hand.grail_file(NUMBERS[layout], [row], data), layout)
    with pytest.raises(Corrupt, match=match) as caught:
        apply_all(delta)
    assert "tensor 'a'" in caught.value.message


def test_sums_that_would_wrap(tmp_path: Path) -> None:
    """Rows that add up beyond all numbers, with columns that would bring them back."""
    count = 1200
    rows = struct.pack(f"<{count}i", *[2**31 - 1] * count)
    columns = struct.pack(f"<{count}i", *[29] * count)
    row = {
        "name": "a",
        "shape": [40, 30],
        "num_nonzero": count,
        "value_dtype": "bfloat16",
        "indices_offset": 0,
        "indices_size": 8 * count,
        "rows_size": 4 * count,
        "cols_size": 4 * count,
        "values_offset": 8 * count,
        "values_size": 2 * count,
    }
    data = rows + columns + bytes(2 * count)
    with pytest.raises(Corrupt, match="not one of its"):
        apply_all(folder_of(tmp_path, by_hand.grail_file(3, [row], data), "v3"))


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    return by_hand.write_grail(tmp_path, OLD, NEW, "v3.1", 5, 4)


def rewrite(path: Path, **fields: Any) -> None:
    metadata = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in metadata.items() if v != "gone"}))


BAD_METADATA: dict[str, tuple[dict[str, Any], type[ThinwireError], str]] = {
    "full": ({"checkpoint_type": "FULL"}, Unsupported, "checkpoint_type"),
    "no type": ({"checkpoint_type": "gone"}, Unsupported, "checkpoint_type"),
    "no window": ({"window": "gone"}, Corrupt, "its window"),
    "odd window": ({"window": -1}, Corrupt, "its window"),
    "true window": ({"window": True}, Corrupt, "its window"),
    "huge window": ({"window": 1 << 60}, Corrupt, "its window"),
    "no base": ({"prev_window": None}, Corrupt, "its prev_window"),
    "no manifest": ({"file_manifest": "gone"}, Corrupt, "no file_manifest"),
    "empty manifest": ({"file_manifest": {}}, Corrupt, "does not name"),
    "no digest": ({"file_manifest": {"delta_sparse.bin.zst": "x"}}, Corrupt, "no SHA-256"),
    "upwards": ({"file_manifest": {"../x": "0" * 64}}, Corrupt, "two dots"),
    "absolute": ({"file_manifest": {"/etc/passwd": "0" * 64}}, Corrupt, "path parts"),
    "folder": ({"file_manifest": {"a/b": "0" * 64}}, Corrupt, "path parts"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata(delta: Path, case: str) -> None:
    fields, error, match = BAD_METADATA[case]
    rewrite(delta / "metadata.json", **fields)
    with pytest.raises(error, match=match):
        grail.open_delta(delta)


def test_more_than_is_there(delta: Path) -> None:
    manifest = json.loads((delta / "metadata.json").read_text())["file_manifest"]
    rewrite(delta / "metadata.json", file_manifest={**manifest, "more.bin": "0" * 64})
    with pytest.raises(NotFound, match=r"more\.bin"):
        grail.open_delta(delta)
    (delta / "more.bin").symlink_to("/etc/hostname")
    with pytest.raises(ThinwireError, match=r"more\.bin"):
        grail.open_delta(delta)


@pytest.mark.parametrize("name", ["delta_sparse.bin.zst", "delta_metadata.json"])
def test_files_are_what_the_manifest_says(delta: Path, name: str) -> None:
    data = bytearray((delta / name).read_bytes())
    data[len(data) // 2] ^= 1
    (delta / name).write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        grail.open_delta(delta)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"window": 1, "window": 2}', "\x00"])
def test_metadata_that_is_none(delta: Path, text: str) -> None:
    (delta / "metadata.json").write_text(text)
    with pytest.raises(Corrupt, match="not JSON"):
        grail.open_delta(delta)
    with pytest.raises(Corrupt):
        grail.list_versions(delta.parents[1])


@pytest.mark.parametrize(
    "said",
    [
        {"format": "sparse_codec_v2"},
        {"format": "sparse_safetensors"},
        {"format": ["x"]},
        {"prev_window": 3},
        {"nonzero_params": 1},
        {"shapes": {"a": [30, 40]}},
    ],
)
def test_the_files_must_agree(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match=r"its (format|prev_window|nonzero_params|shapes)"):
        grail.open_delta(folder_of(tmp_path, sound("v3.1"), said=said))


def test_a_look_never_raises(tmp_path: Path, delta: Path) -> None:
    assert grail.is_delta(delta)
    assert not grail.is_delta(tmp_path / "nothing")
    assert not grail.is_delta(delta / "metadata.json")
    (delta / "metadata.json").unlink()
    assert not grail.is_delta(delta)


@pytest.mark.claim("grail", "refuse", "damaged bytes behind right digests")
@settings(max_examples=80, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_mutations_are_errors_or_other_weights(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, layout: str
) -> None:
    """Behind a manifest that is right: whoever writes the files writes their digests too."""
    raw = bytearray(sound(layout))
    header = int.from_bytes(raw[:4], "little") + 4
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(raw) - 1)))
        raw[at] = data.draw(st.integers(0, 255))
    delta = folder_of(tmp_path_factory.mktemp("mutated"), bytes(raw), layout)
    with suppress(ThinwireError), grail.open_delta(delta) as opened:
        for name in opened.tensors:
            new = opened.new_tensor(name, BASE.get(name))
            assert (new.dtype, new.shape) == BASE[name][:2]
