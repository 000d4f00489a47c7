"""NeMo-RL's payloads: how much a small file may ask for."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.errors import LimitExceeded, Unsupported
from thinwire.interop import nemo

from .making import Tensor
from .nemo_by_hand import packed, payload, saved, sound, zstd


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    packer = zstd.ZstdCompressor(1)
    data = b"".join(
        [packer.compress(sound("xor"))]
        + [packer.compress(bytes(1 << 20)) for _ in range(300)]
        + [packer.flush()]
    )
    (tmp_path / "x.pt").write_bytes(data)
    assert len(data) < 100_000
    with pytest.raises(LimitExceeded, match="unpacks to more than 67108864"):
        nemo.open_delta(tmp_path / "x.pt")


BOMBS: dict[str, Callable[[int], bytes]] = {
    "dicts": lambda count: b"\x80\x02" + b"}" * count + b".",
    "lists in one": lambda count: b"\x80\x02](" + b"]" * count + b"e.",
    "calls": lambda count: (
        b"\x80\x02ccollections\nOrderedDict\nq\0)q\1" + b"h\0h\1R" * (count // 3) + b"."
    ),
    "texts": lambda count: b"\x80\x02X" + struct.pack("<I", 40 << 20) + bytes(40 << 20) + b".",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_cannot_ask_for_a_large_pickle(tmp_path: Path, case: str) -> None:
    """Four million opcodes pack to a few hundred bytes, and each makes something."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", BOMBS[case]((1 << 22) - 99))
        archive.writestr("archive/version", "3")
    path = packed(tmp_path, buffer.getvalue())
    assert path.stat().st_size < 30_000
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded, match="bytes of pickle"):
            nemo.open_delta(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("case", ["dicts", "lists in one", "calls"])
def test_opcodes_are_limited_by_what_was_sent(tmp_path: Path, case: str) -> None:
    """Where the pickle is short enough for its bytes to pass."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", BOMBS[case](1 << 20))
        archive.writestr("archive/version", "3")
    path = packed(tmp_path, buffer.getvalue())
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded, match=r"opcodes|values"):
            nemo.open_delta(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


def test_a_directory_of_long_extra_fields(tmp_path: Path) -> None:
    """Fields that nobody asked for, as many as fit, and the wide sizes behind them."""
    members = {"archive/data.pkl": b"\x80\x02K\1.", "archive/version": b"3"}
    out, directory = bytearray(), bytearray()
    for name, data in members.items():
        start, checksum = len(out), zlib.crc32(data)
        sizes = struct.pack("<I2I2H", checksum, len(data), len(data), len(name), 0)
        out += b"PK\3\4" + bytes(10) + sizes + name.encode() + data
        extra = b"\xff\xff\0\0" * 16_000 + struct.pack("<2HQ", 1, 8, start)
        fields = struct.pack("<I2I3H", checksum, len(data), len(data), len(name), len(extra), 0)
        directory += b"PK\1\2" + bytes(12) + fields + bytes(8) + b"\xff" * 4
        directory += name.encode() + extra
    count = len(members)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(out), 0)
    with pytest.raises(Unsupported, match="no tuple of positions"):
        nemo.open_delta(packed(tmp_path, bytes(out + directory + end)))


def test_many_tensors_are_read(tmp_path: Path) -> None:
    """However well they pack: 3000 tables that differ in their names and places alone."""
    old: dict[str, Tensor] = {f"layers.{n}.w": ("U8", [4], bytes(4)) for n in range(3000)}
    new: dict[str, Tensor] = {name: ("U8", [4], b"\1\0\1\0") for name in old}
    with nemo.open_delta(packed(tmp_path, saved(*payload(old, new, "xor")))) as delta:
        assert len(delta.tensors) == 3000
