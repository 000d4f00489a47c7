"""grail's deltas: how much a frame may hold, and that nothing is taken before that is known."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import Corrupt, FormatError, LimitExceeded, ThinwireError, Truncated
from thinwire.interop import grail
from thinwire.interop.unpacked import FrameReader

from . import sparse_by_hand as by_hand
from .making import Tensor, write_checkpoint
from .test_grail_hostile import LAYOUTS, apply_all, folder_of, sound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_is_what_the_header_says(tmp_path: Path, layout: str) -> None:
    file = sound(layout)
    with pytest.raises(Truncated, match="where its header names"):
        apply_all(folder_of(tmp_path / "short", file[:-1], layout))
    with pytest.raises(LimitExceeded, match="unpacks to more than"):
        apply_all(folder_of(tmp_path / "long", file + b"x", layout))


def test_frames(tmp_path: Path) -> None:
    packed = by_hand.zstd.compress(sound("v3.1"), 1)
    options = {"layout": "v3.1", "window": 5, "before": 4}
    for number in range(0, len(packed), 13):
        delta = by_hand.grail_folder(tmp_path / f"{number}", packed[:number], **options)
        with pytest.raises(FormatError):
            apply_all(delta)
    for name, tail in (("junk", b"x"), ("frame", by_hand.zstd.compress(b"x", 1))):
        delta = by_hand.grail_folder(tmp_path / name, packed + tail, **options)
        with pytest.raises(Corrupt, match="follow the zstd frame"):
            apply_all(delta)


def test_a_bomb_takes_neither_memory_nor_disk(tmp_path: Path) -> None:
    """A small file that claims gigabytes is refused before it is unpacked."""
    elements = 1 << 30
    row = {
        "name": "a",
        "shape": [elements],
        "num_nonzero": elements,
        "value_dtype": "bfloat16",
        "indices_offset": 0,
        "indices_size": 4 * elements,
        "values_offset": 4 * elements,
        "values_size": 2 * elements,
    }
    claimed = packed_with_zeros(by_hand.grail_file(2, [row], b""))
    said = by_hand.grail_folder(tmp_path, claimed, layout="v2", window=5, before=4)
    # The same zeros behind an honest header: no more than it names is ever written.
    followed = packed_with_zeros(sound("v2"))
    long = by_hand.grail_folder(tmp_path / "b", followed, layout="v2", window=5, before=4)
    assert len(claimed) < 100_000
    huge = StoredTensor("BF16", (elements,), np.broadcast_to(np.uint8(0), 2 * elements))
    tracemalloc.start()
    try:
        with (
            grail.open_delta(said) as opened,
            pytest.raises(LimitExceeded, match="bytes of changes"),
        ):
            opened.new_tensor("a", huge)
        with pytest.raises(LimitExceeded, match="unpacks to more"):
            apply_all(long)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def packed_with_zeros(file: bytes) -> bytes:
    packer = by_hand.zstd.ZstdCompressor(1)
    pieces = [packer.compress(file)]
    pieces += [packer.compress(bytes(1 << 20)) for _ in range(300)]
    return b"".join([*pieces, packer.flush()])


def test_the_base_bounds_what_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all new weights are alike they pack well; the base says that they may be so many."""
    monkeypatch.setattr("thinwire.interop.unpacked.SMALL_BYTES", 1000)
    old: dict[str, Tensor] = {"a": ("BF16", [400, 300], bytes(240_000))}
    new: dict[str, Tensor] = {"a": ("BF16", [400, 300], b"\1\1" * 120_000)}
    folder = by_hand.write_grail(tmp_path, old, new, "v2", 5, 4)
    base = write_checkpoint(tmp_path / "base", old)
    with grail.open_delta(folder) as delta:
        with pytest.raises(LimitExceeded, match="bytes of changes"):
            delta.new_tensor("a", base.tensors["a"])
        delta.check_base(base)
        assert delta.new_tensor("a", base.tensors["a"]).data.tobytes() == new["a"][2]


def test_a_large_window_is_refused(tmp_path: Path) -> None:
    """A frame may ask its reader for gigabytes of memory before its first byte."""
    options = {
        by_hand.zstd.CompressionParameter.window_log: 27,
        by_hand.zstd.CompressionParameter.compression_level: 1,
    }
    packer = by_hand.zstd.ZstdCompressor(options=options)
    packed = packer.compress(sound("v2")) + packer.flush()
    delta = by_hand.grail_folder(tmp_path, packed, layout="v2", window=5, before=4)
    with pytest.raises(LimitExceeded, match="a window of 134217728 bytes"):
        grail.open_delta(delta)


def test_a_small_file_cannot_ask_for_a_long_header(tmp_path: Path) -> None:
    """What a header becomes takes many times its bytes of memory, and it is parsed first."""
    text = b'{"version":31,"tensors":[' + b"[]," * (20 << 20) + b"0]}"
    file = len(text).to_bytes(4, "little") + text
    folder = folder_of(tmp_path, file)
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded, match="bytes of header"):
            grail.open_delta(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_header_of_many_tensors_is_read(tmp_path: Path) -> None:
    """However well it packs: here all tensors but their names are alike."""
    old: dict[str, Tensor] = {f"layers.{n}.w": ("BF16", [4], bytes(8)) for n in range(9000)}
    new: dict[str, Tensor] = {name: ("BF16", [4], b"\1" + bytes(7)) for name in old}
    with grail.open_delta(by_hand.write_grail(tmp_path, old, new, "v3.1", 5, 4)) as delta:
        assert len(delta.tensors) == 9000


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_mutated_frames_never_unpack_to_more(data: st.DataObject) -> None:
    packed = bytearray(by_hand.zstd.compress(sound("v3.1"), 1))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ThinwireError):
        limit = len(sound("v3.1"))
        frame = np.frombuffer(bytes(packed), np.uint8)
        assert FrameReader("x", "y", frame).unpack(limit).size <= limit
