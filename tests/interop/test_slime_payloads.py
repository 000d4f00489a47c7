"""slime's weight_v: payloads, sizes and checksums."""

from __future__ import annotations

import resource
import struct
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    InvalidArgument,
    LimitExceeded,
    TensorMismatch,
    ThinwireError,
    Unsupported,
)
from thinwire.interop import checksums, skyrl, slime
from thinwire.interop.payload_files import declared_bytes

from . import by_hand
from .making import (
    MIXED,
    MIXED_NEW,
    Tensors,
    applied,
    bits_of,
    change_between,
    checkpoint_bits,
    write_checkpoint,
    written,
)

SMALL: Tensors = {"w": ("U8", [8], b"abcdefgh")}
SMALL_NEW: Tensors = {"w": ("U8", [8], b"abXdefgY")}


def read_payload(payload: bytes, tmp_path: Path, encoding: str = "overwrite") -> bytes:
    """What becomes of SMALL by a payload."""
    base = write_checkpoint(tmp_path / "small", SMALL)
    text = by_hand.HASHES["xxh3-128"](SMALL_NEW["w"][2])
    folder = by_hand.write_slime(
        tmp_path / "weight_v000001", [("w", payload, text)], encoding=encoding
    )
    with slime.open_delta(folder) as delta:
        before = checkpoint_bits(base)
        try:
            return delta.new_tensor("w", base.tensors["w"]).data.tobytes()
        finally:
            assert checkpoint_bits(base) == before


def frame(data: bytes) -> bytes:
    return by_hand.zstd.compress(data, 1)


def test_positions_in_any_order(tmp_path: Path) -> None:
    """slime's receiver does not ask for an order."""
    plain = struct.pack("<III", 2, 7, 2) + b"YX"
    assert read_payload(frame(plain), tmp_path) == SMALL_NEW["w"][2]


OVERWRITES: list[tuple[bytes, type[ThinwireError], str]] = [
    (struct.pack("<III", 2, 2, 8) + b"XY", TensorMismatch, "changes byte 8, .* tensor has 8"),
    (struct.pack("<III", 2, 2, 0xFFFFFFFF) + b"XY", TensorMismatch, "changes byte 4294967295"),
    (struct.pack("<III", 2, 7, 7) + b"XY", Corrupt, "changes a byte twice"),
    (struct.pack("<IIII", 3, 7, 2, 7) + b"XYX", Corrupt, "changes a byte twice"),
    (struct.pack("<III", 1, 2, 7) + b"XY", Corrupt, "room for 2 changes"),
    (struct.pack("<III", 3, 2, 7) + b"XY", Corrupt, "room for 2 changes"),
    (struct.pack("<III", 0xFFFFFFFF, 2, 7) + b"XY", Corrupt, "room for 2 changes"),
    (struct.pack("<III", 2, 2, 7) + b"X", Corrupt, "has 13 bytes, which no number"),
    (struct.pack("<III", 2, 2, 7) + b"XYZ", Corrupt, "has 15 bytes, which no number"),
    (b"", Corrupt, "has 0 bytes, which no number"),
    (b"\0\0\0", Corrupt, "has 3 bytes, which no number"),
    (struct.pack("<I", 0), ChecksumMismatch, "xxh3-128"),
    (struct.pack("<II", 1, 2) + b"X", ChecksumMismatch, "xxh3-128"),
    (struct.pack("<10I", 9, *range(9)) + b"x" * 9, TensorMismatch, "changes 9 bytes"),
]


@pytest.mark.parametrize(("plain", "error", "what"), OVERWRITES, ids=range(len(OVERWRITES)))
def test_overwrite(plain: bytes, error: type[ThinwireError], what: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=what) as caught:
        read_payload(frame(plain), tmp_path)
    assert "slime's weight_v" in str(caught.value)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (frame(bytes(7)), TensorMismatch),
        (frame(bytes(9)), TensorMismatch),
        (frame(b""), TensorMismatch),
        (frame(bytes(8)), ChecksumMismatch),
        (frame(bytes(8)) + b"x", Corrupt),
        (frame(bytes(8)) * 2, Corrupt),
        (frame(bytes(8))[:-1], Corrupt),
        (b"", Corrupt),
        (b"not zstd at all", Corrupt),
        (by_hand.zstd.compress(bytes(8), 1)[:4] + b"\xff" * 20, TensorMismatch),
    ],
    ids=range(10),
)
def test_xor(payload: bytes, error: type[ThinwireError], tmp_path: Path) -> None:
    with pytest.raises(error, match="slime's weight_v"):
        read_payload(payload, tmp_path, "xor")


def test_xor_without_a_size_is_read(tmp_path: Path) -> None:
    """As slime's receiver does, which reads it as a stream; overwrite it unpacks in one go."""
    plain = by_hand.xor(SMALL["w"][2], SMALL_NEW["w"][2])
    compressor = by_hand.zstd.ZstdCompressor(1)
    payload = compressor.compress(plain) + compressor.flush()
    assert read_payload(payload, tmp_path, "xor") == SMALL_NEW["w"][2]
    compressor = by_hand.zstd.ZstdCompressor(1)
    plain = by_hand.overwrite(SMALL["w"][2], SMALL_NEW["w"][2])
    with pytest.raises(Corrupt, match="no zstd frame that says its size"):
        read_payload(compressor.compress(plain) + compressor.flush(), tmp_path / "2")


@pytest.mark.parametrize("is_sized", [True, False])
def test_a_large_window_is_said_to_be_one(is_sized: bool, tmp_path: Path) -> None:
    """Such a frame is sound: its reader would have to take too much memory for it."""
    size = 9 << 20
    options = {by_hand.zstd.CompressionParameter.window_log: 27}
    packer = by_hand.zstd.ZstdCompressor(options=options)
    if is_sized:
        packer.set_pledged_input_size(size)
    payload = packer.compress(bytes(size)) + packer.flush()
    base = write_checkpoint(tmp_path / "base", {"w": ("U8", [size], bytes(size))})
    folder = by_hand.write_slime(tmp_path / "weight_v000001", [("w", payload, "0" * 32)])
    window_bytes = size if is_sized else 1 << 27
    with (
        slime.open_delta(folder) as delta,
        pytest.raises(LimitExceeded, match=f"'w'.* window of {window_bytes} bytes") as caught,
    ):
        delta.new_tensor("w", base.tensors["w"])
    assert "level 19" in caught.value.hint


@pytest.mark.parametrize("system", [slime, skyrl])
def test_a_delta_may_have_more_files_than_a_process(system: ModuleType, tmp_path: Path) -> None:
    old: Tensors = {f"t{number}": ("U8", [2], b"\0a") for number in range(200)}
    new: Tensors = {name: ("U8", [2], b"\1a") for name in old}
    change = change_between(tmp_path, old, new)
    folder = written(system, tmp_path, change, max_file_bytes=1)
    assert len(list(folder.glob("*.safetensors"))) == 200
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_count = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_count + 50, before[1]))
    try:
        with system.open_delta(folder) as delta:
            assert applied(change.base, delta) == bits_of(new)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_more_files_are_written_than_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.interop.payload_files.MAX_FILES", 2)
    names = "abc"
    change = change_between(
        tmp_path,
        {name: ("U8", [1], b"\0") for name in names},
        {name: ("U8", [1], b"\1") for name in names},
    )
    with pytest.raises(LimitExceeded, match=r"more than 2 files.*larger max_file_bytes"):
        written(slime, tmp_path, change, max_file_bytes=1)


def test_a_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    change = change_between(tmp_path, SMALL, SMALL_NEW)
    folder = written(slime, tmp_path, change)
    [path] = folder.glob("*.safetensors")
    with slime.open_delta(folder) as delta:
        content = path.read_bytes()
        path.write_bytes(content + b"x")
        with pytest.raises(Corrupt, match=r"had \d+ when it was opened"):
            delta.new_tensor("w", change.base.tensors["w"])
        path.write_bytes(content)
        assert applied(change.base, delta) == bits_of(SMALL_NEW)


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """A payload of 17 kB that unpacks to 512 MiB, for a tensor of 1000 bytes."""
    compressor = by_hand.zstd.ZstdCompressor(3)
    parts = [compressor.compress(bytes(1 << 24)) for _ in range(32)]
    bomb = b"".join([*parts, compressor.flush()])
    assert declared_bytes(np.frombuffer(bomb, np.uint8)) is None
    declared = by_hand.zstd.compress(bytes(1 << 26))
    base = write_checkpoint(tmp_path / "base", {"w": ("U8", [1000], bytes(1000))})
    for number, (payload, encoding) in enumerate(
        [(bomb, "xor"), (declared, "xor"), (bomb, "overwrite"), (declared, "overwrite")]
    ):
        folder = by_hand.write_slime(
            tmp_path / f"{number}" / "weight_v000001", [("w", payload, "0" * 32)], encoding=encoding
        )
        delta = slime.open_delta(folder)
        tracemalloc.start()
        try:
            with pytest.raises(ThinwireError, match="slime's weight_v format"):
                delta.new_tensor("w", base.tensors["w"])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4 << 20


def test_limits_come_before_memory(tmp_path: Path) -> None:
    folder = by_hand.write_slime(tmp_path / "weight_v000001", [])
    with (folder / INDEX_NAME).open("r+b") as file:
        file.truncate((64 << 20) + 1)
    assert not slime.is_delta(folder)
    with pytest.raises(LimitExceeded, match="bytes of index; the limit is"):
        slime.open_delta(folder)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65791, 65792, 1 << 20])
def test_frames_say_their_size(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    for level in (1, 19):
        frame = by_hand.zstd.compress(data, level)
        assert declared_bytes(np.frombuffer(frame, np.uint8)) == size
        assert by_hand.zstd.get_frame_info(frame).decompressed_size == size
        for stop in range(min(len(frame), 6)):
            assert declared_bytes(np.frombuffer(frame[:stop], np.uint8)) is None


class TestChecksums:
    def test_known_values(self) -> None:
        empty = np.empty(0, np.uint8)
        assert checksums.checksum("xxh3-128", empty) == "99aa06d3014798d86001c324468d497f"
        assert checksums.checksum("adler32", empty) == "00000001"
        assert checksums.checksum("blake3", empty).startswith("af1349b9f5f9a1a6")
        assert checksums.checksum("sha256", empty).startswith("e3b0c44298fc1c14")

    def test_adler_in_hex_and_decimal(self) -> None:
        data = np.frombuffer(b"some weights", np.uint8)
        value = int(checksums.checksum("adler32", data), 16)
        for text in (f"{value:08x}", f"{value:08X}", f"{value:x}", f"{value}"):
            assert checksums.is_checksum("adler32", text, data)
        for text in (
            "",
            f"{value + 1}",
            f"{value + 1:08x}",
            f" {value}",
            f"0x{value:x}",
            "\u0663",
            "9" * 99,
        ):
            assert not checksums.is_checksum("adler32", text, data)

    def test_unknown(self) -> None:
        with pytest.raises(Unsupported, match="'md5'"):
            checksums.checksum("md5", np.empty(0, np.uint8))

    def test_a_missing_package(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        folder = written(slime, tmp_path, change)
        monkeypatch.setitem(sys.modules, "xxhash", None)
        with pytest.raises(InvalidArgument, match=r"pip install 'thinwire\[interop\]'"):
            written(slime, tmp_path, change, version=2)
        assert list((tmp_path / "out-2").iterdir()) == []
        # A delta can still be looked at, and others can be written.
        delta = slime.open_delta(folder)
        with pytest.raises(InvalidArgument, match=r"pip install 'thinwire\[interop\]'"):
            delta.new_tensor("w", change.base.tensors["w"])
        written(slime, tmp_path, change, version=3, checksum="blake3")
