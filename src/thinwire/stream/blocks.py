"""Objects are digested in blocks, so that any part can be fetched, and proved, alone.

The source of the method is the block list of rsync and BitTorrent; the hash is BLAKE3-256.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3

from thinwire.errors import ChecksumMismatch, Corrupt, LimitExceeded

MIN_BLOCK_BYTES = 1 << 18
MAX_BLOCK_BYTES = 1 << 26
MAX_BLOCKS = 1 << 20
# More blocks than this, and they grow instead: 64 characters each stand in the manifest.
_WANTED_BLOCKS = 1 << 8
Buffer = bytes | bytearray | memoryview
DIGEST = re.compile(r"[0-9a-f]{64}")


class ObjectRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object's size and the BLAKE3 digest of each of its blocks of ``block`` bytes."""

    size: int
    block: int
    blocks: list[str]

    @property
    def digest(self) -> str:
        """One digest for all: that of the only block, or of the digests together."""
        if len(self.blocks) == 1:
            return self.blocks[0]
        return digest_of("".join(self.blocks).encode())

    def span(self, number: int) -> tuple[int, int]:
        """The half-open byte range of a block."""
        start = number * self.block
        return start, min(self.size, start + self.block)


def digest_of(data: Buffer) -> str:
    """BLAKE3-256 in hexadecimal."""
    return blake3(data).hexdigest()


def block_bytes_for(size_bytes: int) -> int:
    """The block size for an object: fine for small ones, and a short list for large ones."""
    block = MIN_BLOCK_BYTES
    while block < MAX_BLOCK_BYTES and size_bytes > block * _WANTED_BLOCKS:
        block *= 2
    return block


def record_of(data: bytes) -> ObjectRecord:
    """The record of bytes in memory."""
    view = memoryview(data)
    block = block_bytes_for(len(data))
    starts = range(0, len(data), block) if data else [0]
    return ObjectRecord(len(data), block, [digest_of(view[s : s + block]) for s in starts])


def record_of_file(path: Path) -> ObjectRecord:
    """The record of a file; a block at a time is in memory."""
    size_bytes = path.stat().st_size
    block = block_bytes_for(size_bytes)
    with path.open("rb") as file:
        digests = [digest_of(data) for data in iter(lambda: file.read(block), b"")]
    return ObjectRecord(size_bytes, block, digests or [digest_of(b"")])


def check_block(record: ObjectRecord, number: int, data: Buffer, what: str) -> None:
    """Raise ChecksumMismatch unless ``data`` is the block."""
    if digest_of(data) != record.blocks[number]:
        start, stop = record.span(number)
        raise ChecksumMismatch(
            f"{what}: bytes {start} to {stop} are not what the manifest says",
            hint="Someone or something changed the object; `thinwire fsck` shows what else",
            what=what,
        )


def blocks_of(record: ObjectRecord, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The blocks that cover half-open byte ranges, rising."""
    numbers: set[int] = set()
    for start, stop in ranges:
        if start < stop:
            numbers.update(range(start // record.block, -(-stop // record.block)))
    return sorted(numbers)


def check_record(record: ObjectRecord, what: str) -> None:
    """Raise unless a record from a manifest is one that we could have written.

    Raises:
        Corrupt, LimitExceeded: It is not.
    """
    power_of_two = record.block > 0 and record.block & (record.block - 1) == 0
    if not power_of_two or not MIN_BLOCK_BYTES <= record.block <= MAX_BLOCK_BYTES:
        raise Corrupt(f"{what}: blocks of {record.block} bytes")
    if not 0 <= record.size <= MAX_BLOCK_BYTES * MAX_BLOCKS:
        raise LimitExceeded(f"{what}: {record.size} bytes")
    if len(record.blocks) != max(1, -(-record.size // record.block)):
        raise Corrupt(f"{what}: {len(record.blocks)} digests for {record.size} bytes")
    if not all(DIGEST.fullmatch(digest) for digest in record.blocks):
        raise Corrupt(f"{what}: a digest is malformed")
