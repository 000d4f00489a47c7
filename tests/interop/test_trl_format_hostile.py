"""TRL's deltas: what breaks a rule is an error that says which, and takes no base with it."""

from __future__ import annotations

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
    Corrupt,
    FormatError,
    InvalidArgument,
    LimitExceeded,
    ThinwireError,
    Truncated,
    Unsupported,
)
from thinwire.interop import trl

from . import sparse_by_hand as by_hand
from .by_hand import safetensors
from .making import Tensor, stepped, tensor

OLD: dict[str, Tensor] = {"w": tensor("BF16", [40, 30], 1), "v": tensor("BF16", [70_000], 2)}
NEW: dict[str, Tensor] = {name: stepped(old, 5) for name, old in OLD.items()}
BASE = {
    name: StoredTensor(dtype, tuple(shape), np.frombuffer(data, np.uint8))
    for name, (dtype, shape, data) in OLD.items()
}

Edit = Callable[[dict[str, Any], dict[str, str]], Any]


@cache
def sound_parts(layout: str, encoding: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = by_hand.trl_tensors(OLD, NEW, layout, encoding)
    return tensors, by_hand.trl_metadata(tensors, layout, encoding, 3)


def sound(layout: str, encoding: str) -> bytes:
    return safetensors(*sound_parts(layout, encoding))


def made(folder: Path, layout: str, encoding: str, edit: Edit, name: str = "delta") -> Path:
    tensors, metadata = map(dict, sound_parts(layout, encoding))
    edit(tensors, metadata)
    path = folder / f"{name}.safetensors"
    path.write_bytes(safetensors(tensors, metadata))
    return path


def apply_all(path: Path) -> None:
    with trl.open_delta(path) as delta:
        for name in delta.tensors:
            delta.new_tensor(name, BASE.get(name))


def index(values: list[int], kind: str = "I32") -> Tensor:
    code = {"I32": "i", "U16": "H", "U32": "I", "I64": "q", "U8": "B"}[kind]
    return kind, (len(values),), struct.pack(f"<{len(values)}{code}", *values)


def values(count: int, dtype: str = "BF16") -> Tensor:
    return dtype, (count,), bytes(2 * count)


def pair(positions: Tensor, new: Tensor) -> Edit:
    """Only one tensor, with these."""

    def edit(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        suffixes = (".idx", ".val") if "encoding" in metadata else (".indices", ".values")
        tensors.clear()
        tensors |= {"w" + suffixes[0]: positions, "w" + suffixes[1]: new}
        for key in ("num_changed_params", "total_changed_elements"):
            metadata.pop(key, None)
        if "changed_params" in metadata:
            metadata["changed_params"] = '["w"]'

    return edit


BAD_PAIRS = {
    "twice": ("raw", pair(index([3, 3]), values(2)), Corrupt, "do not rise"),
    "falling": ("raw", pair(index([3, 2]), values(2)), Corrupt, "do not rise"),
    "negative": ("raw", pair(index([-1]), values(1)), Corrupt, "position -1"),
    "outside": ("raw", pair(index([1200]), values(1)), Corrupt, "position 1200"),
    "gap outside": ("gap_delta", pair(index([5, 1194], "U16"), values(2)), Corrupt, "1200"),
    "wide gap": (
        "gap_delta",
        pair(index([0xFFFFFFFF, 0xFFFFFFFF], "U32"), values(2)),
        Corrupt,
        "not one of its 1200",
    ),
    "fewer values": ("raw", pair(index([1, 2]), values(1)), Corrupt, r"\[2\] positions"),
    "two axes": (
        "raw",
        pair(("I32", (1, 1), bytes(4)), ("BF16", (1, 1), bytes(2))),
        Corrupt,
        "positions for",
    ),
    "gaps where raw": ("raw", pair(index([1], "U16"), values(1)), Corrupt, "not I32"),
    "raw where gaps": ("gap_delta", pair(index([1]), values(1)), Corrupt, "not U16 or U32"),
    "bytes": ("gap_delta", pair(index([1], "U8"), values(1)), Corrupt, "not U16 or U32"),
    "half floats": ("raw", pair(index([1]), values(1, "F16")), Corrupt, "F16, not BF16"),
}


@pytest.mark.parametrize(
    ("case", "layout"),
    [(case, "v2") for case in BAD_PAIRS]
    + [(case, "v1") for case, row in BAD_PAIRS.items() if row[0] == "raw"],
)
def test_bad_positions_and_values(tmp_path: Path, case: str, layout: str) -> None:
    encoding, edit, error, match = BAD_PAIRS[case]
    with pytest.raises(error, match=match) as caught:
        apply_all(made(tmp_path, layout, encoding, edit))
    assert "tensor 'w'" in caught.value.message
    assert "TRL" in caught.value.message
    assert caught.value.hint


def no_index(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    del tensors["w.idx"]


def no_values(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    del tensors["w.val"]


def say(**fields: str) -> Edit:
    return lambda _, metadata: metadata.update(fields)


def unsay(*keys: str) -> Edit:
    return lambda _, metadata: [metadata.pop(key) for key in keys]


BAD_FILES: dict[str, tuple[str, Edit, type[FormatError], str]] = {
    "no positions": ("v2", no_index, Corrupt, "'.idx' is missing"),
    "no values": ("v2", no_values, Corrupt, "'.val' is missing"),
    "a whole tensor": (
        "v2",
        lambda t, _: t.update(whole=("BF16", (2,), b"abcd")),
        Unsupported,
        "neither positions nor values",
    ),
    "other suffixes": (
        "v2",
        lambda t, _: t.update({"x.indices": index([1]), "x.values": values(1)}),
        Unsupported,
        "neither",
    ),
    "nvcomp": ("v2", say(encoding="nvcomp_cascaded"), Unsupported, "nvcomp_cascaded.*not read"),
    "unknown encoding": ("v2", say(encoding="zip" * 99), Unsupported, "zipzip"),
    "no encoding": ("v2", unsay("encoding"), Unsupported, "not that of a delta"),
    "other format": ("v2", say(format="x"), Unsupported, "not that of a delta"),
    "an anchor": ("v2", say(sparse="False"), Unsupported, "not that of a delta"),
    "odd sparse": ("v2", say(sparse="yes"), Unsupported, "not that of a delta"),
    "count of tensors": ("v2", say(num_changed_params="1"), Corrupt, "num_changed_params is 1"),
    "count of changes": ("v2", say(total_changed_elements="0"), Corrupt, "total_changed_el"),
    "no number": ("v2", say(model_version="-3"), Corrupt, "no whole number"),
    "odd digits": ("v2", say(model_version="٣"), Corrupt, "no whole number"),
    "huge number": ("v2", say(model_version="9" * 5000), Corrupt, "no whole number"),
    "not JSON": ("v1", say(changed_params="["), Corrupt, "not a list of names"),
    "deep JSON": ("v1", say(changed_params="[" * 100_000), Corrupt, "not a list of names"),
    "not names": ("v1", say(changed_params="[1]"), Corrupt, "not a list of names"),
    "other names": ("v1", say(changed_params='["w", "x"]'), Corrupt, "not the tensors"),
    "names twice": ("v1", say(changed_params='["w", "w", "v"]'), Corrupt, "not the tensors"),
    "empty and not": (
        "v1",
        lambda t, _: t.update(__empty_delta__=index([0])),
        Unsupported,
        "neither",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path: Path, case: str) -> None:
    layout, edit, error, match = BAD_FILES[case]
    path = made(tmp_path, layout, "raw" if layout == "v1" else "gap_delta", edit)
    with pytest.raises(error, match=match) as caught:
        trl.open_delta(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_the_step_is_that_of_the_name(tmp_path: Path) -> None:
    path = made(tmp_path, "v2", "raw", lambda *_: None, "step_000004")
    with pytest.raises(Corrupt, match="model_version is 3, and its name says 4"):
        trl.open_delta(path)
    without = made(tmp_path, "v2", "raw", unsay("model_version"), "step_000005")
    with trl.open_delta(without) as delta:
        assert (delta.facts.version, delta.facts.base_version) == (5, 4)


def test_a_step_without_a_base_before_it(tmp_path: Path) -> None:
    path = made(tmp_path, "v2", "raw", say(model_version="0"), "step_000000")
    with trl.open_delta(path) as delta:
        assert delta.facts.version == 0


def test_every_prefix_is_truncated(tmp_path: Path) -> None:
    whole = made(tmp_path, "v2", "gap_delta", lambda *_: None).read_bytes()
    path = tmp_path / "short.safetensors"
    for size in [*range(0, 400), *range(400, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(Truncated):
            apply_all(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(Corrupt, match="follow"):
        trl.open_delta(path)


def test_a_header_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 50).to_bytes(8, "little") + b"{}")
    with pytest.raises(LimitExceeded, match="bytes of header"):
        trl.open_delta(path)
    assert not trl.is_delta(path)


def test_a_look_never_raises(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "junk.safetensors").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    for path in [*tmp_path.iterdir(), tmp_path / "none.safetensors", tmp_path]:
        assert not trl.is_delta(path)
    with pytest.raises(InvalidArgument):
        trl.open_delta(tmp_path / "folder.safetensors")


def test_hostile_steps_in_a_chain(tmp_path: Path) -> None:
    (tmp_path / "deltas").mkdir()
    (tmp_path / "deltas" / "step_000003.safetensors").write_bytes(b"junk")
    (tmp_path / "deltas" / "step_3.safetensors").write_bytes(b"junk")
    (tmp_path / "deltas" / ("step_" + "9" * 40 + ".safetensors")).write_bytes(b"")
    with pytest.raises(FormatError):
        trl.list_versions(tmp_path)


@pytest.mark.claim("trl-v1", "refuse", "damaged bytes, a bad file for each rule")
@pytest.mark.claim("trl-v2", "refuse", "damaged bytes, a bad file for each rule")
@settings(max_examples=80, deadline=None)
@given(data=st.data(), kind=st.sampled_from([("v1", "raw"), ("v2", "raw"), ("v2", "gap_delta")]))
def test_mutations_are_errors_or_other_weights(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: tuple[str, str]
) -> None:
    """There is no checksum: a flipped value bit is another weight. Nothing else ever happens."""
    folder = tmp_path_factory.mktemp("mutated")
    raw = bytearray(sound(*kind))
    header = int.from_bytes(raw[:8], "little") + 8
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(raw) - 1)))
        raw[at] = data.draw(st.integers(0, 255))
    path = folder / "x.safetensors"
    path.write_bytes(raw)
    trl.is_delta(path)
    with suppress(ThinwireError), trl.open_delta(path) as delta:
        for name in delta.tensors:
            new = delta.new_tensor(name, BASE.get(name))
            assert (new.dtype, new.shape) == BASE[name][:2]
