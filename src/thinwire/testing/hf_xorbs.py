"""What hf-xet uploads, taken apart: xorbs (chunks of data) and shards (which chunks make a file).

For :mod:`thinwire.testing.hf_server`; the layouts are those of the Xet protocol's specification.
"""

from __future__ import annotations

import struct

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_CHUNK_HEADER = 8
_MAX_CHUNK_BYTES = 1 << 24
_SHARD_TAG = b"HFRepoMetaData\0UigEj\x7b\x81\x57\x83\xa5\xbd\xd9\x5c\xcd\xd1\x4a\xa9"
_ENTRY_BYTES = 48
_LAST_ENTRY = b"\xff" * 32
_WITH_VERIFICATION, _WITH_METADATA = 1 << 31, 1 << 30


def decode_xorb(data: bytes) -> list[bytes]:
    """The chunks of a serialized xorb.

    Raises:
        ValueError: It is none.
    """
    chunks, at = [], 0
    # Behind the chunks hf-xet may write an index, which begins with a tag instead of a version.
    while at < len(data) and data[at] == 0:
        packed_bytes = int.from_bytes(data[at + 1 : at + 4], "little")
        scheme, raw_bytes = data[at + 4], int.from_bytes(data[at + 5 : at + 8], "little")
        at += _CHUNK_HEADER + packed_bytes
        if at > len(data) or scheme > 2:
            raise ValueError("a chunk is cut, or compressed in an unknown way")
        chunk = data[at - packed_bytes : at]
        if scheme:
            chunk = _decode_lz4(chunk)
        if scheme == 2:
            chunk = _interleave(chunk)
        if len(chunk) != raw_bytes:
            raise ValueError("a chunk has another length than it says")
        chunks.append(chunk)
    return chunks


def _interleave(grouped: bytes) -> bytes:
    whole, at = bytearray(len(grouped)), 0
    for phase in range(4):
        count = len(whole[phase::4])
        whole[phase::4] = grouped[at : at + count]
        at += count
    return bytes(whole)


def _decode_lz4(frame: bytes) -> bytes:
    if frame[:4] != _LZ4_MAGIC or frame[4] >> 6 != 1:
        raise ValueError("this is no LZ4 frame")
    flags = frame[4]
    at = 7 + (8 if flags & 8 else 0) + (4 if flags & 1 else 0)
    out = bytearray()
    while True:
        (size,) = struct.unpack_from("<I", frame, at)
        at += 4
        if size == 0:
            return bytes(out)
        block = frame[at : at + (size & 0x7FFFFFFF)]
        at += len(block) + (4 if flags & 16 else 0)
        if size >> 31:
            out += block
        else:
            _decode_lz4_block(block, out)


def _decode_lz4_block(block: bytes, out: bytearray) -> None:
    at = 0

    def length(start: int) -> int:
        nonlocal at
        if start == 15:
            while True:
                start += block[at]
                at += 1
                if block[at - 1] != 255:
                    break
        return start

    while at < len(block):
        token = block[at]
        at += 1
        literal_bytes = length(token >> 4)
        out += block[at : at + literal_bytes]
        at += literal_bytes
        if at >= len(block):
            return
        distance = int.from_bytes(block[at : at + 2], "little")
        at += 2
        match_bytes = length(token & 15) + 4
        if not 0 < distance <= len(out) or len(out) + match_bytes > _MAX_CHUNK_BYTES:
            raise ValueError("an LZ4 match lies outside of the data")
        piece = bytes(out[-distance:][:match_bytes])
        out += (piece * (match_bytes // len(piece) + 1))[:match_bytes]


def decode_shard(data: bytes) -> dict[str, list[tuple[str, int, int, int]]]:
    """The terms of each file in a shard: (xorb, bytes, first chunk, chunk behind the last)."""
    if data[:32] != _SHARD_TAG or struct.unpack_from("<Q", data, 32) != (2,):
        raise ValueError("this is no shard of version 2")
    files, at = {}, _ENTRY_BYTES
    while data[at : at + 32] != _LAST_ENTRY:
        flags, count = struct.unpack_from("<II", data, at + 32)
        name = _hex(data[at : at + 32])
        terms = []
        for _ in range(count):
            at += _ENTRY_BYTES
            _, size, first, last = struct.unpack_from("<IIII", data, at + 32)
            terms.append((_hex(data[at : at + 32]), size, first, last))
        at += _ENTRY_BYTES * (1 + (count if flags & _WITH_VERIFICATION else 0))
        at += _ENTRY_BYTES if flags & _WITH_METADATA else 0
        files[name] = terms
    return files


def _hex(digest: bytes) -> str:
    """A hash as Xet writes it: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))
