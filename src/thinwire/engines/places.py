"""The file that tells an engine's ranks which words of the host's copy changed.

A host's follower writes it, the ranks on that host read it; it never comes from a store. All
numbers are little-endian::

    magic 8 | blocks | XXH3-64 of all before 8

    block: name bytes 2 | name (UTF-8) | first word 8 | count 4 | positions 4 each

Positions rise, count from the first word, and lie within a chunk. The count ``WHOLE`` stands for
any word of the tensor. Blocks of several updates may follow each other: a word that changed twice
is named twice.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.checkpoint.disk import map_file, os_errors
from thinwire.codec.delta import ChunkChanges
from thinwire.codec.digest import CHUNK_WORDS, xxh3_64
from thinwire.codec.dtypes import MAX_TENSOR_BYTES
from thinwire.errors import ChecksumMismatch, Corrupt, Truncated

MAGIC = b"TWPLACE1"
WHOLE = 0xFFFFFFFF
_NAME = struct.Struct("<H")
_BLOCK = struct.Struct("<QI")
_DIGEST = struct.Struct("<Q")


class Block(NamedTuple):
    """Changed words of one tensor; ``positions`` is None where any word may have changed."""

    name: str
    first_word: int
    positions: np.ndarray[Any, np.dtype[np.uint32]] | None


class PlacesFile:
    """Written while a host's copy changes; sealed, it can be read.

    Args:
        path: The file; it is made anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.word_count = 0
        self._is_sealed = False
        with os_errors("cannot write", path):
            self._file = path.open("wb")
            self._file.write(MAGIC)

    def add(self, change: ChunkChanges) -> None:
        """Name the changed words of a chunk."""
        self._block(change.name, change.first_word, int(change.positions.size))
        with os_errors("cannot write", self.path):
            self._file.write(change.positions.astype("<u4", copy=False).tobytes())
        self.word_count += int(change.positions.size)

    def add_whole(self, name: str, word_count: int) -> None:
        """Say that any word of a tensor may have changed."""
        self._block(name, 0, WHOLE)
        self.word_count += word_count

    def seal(self) -> None:
        """Finish the file. What is added afterwards needs another seal."""
        with os_errors("cannot write", self.path):
            self._unseal()
            self._file.flush()
            self._file.write(_DIGEST.pack(xxh3_64(map_file(self.path))))
            self._file.flush()
        self._is_sealed = True

    def rename(self, path: Path) -> None:
        """Give the file another name."""
        with os_errors("cannot rename", self.path):
            self.path.rename(path)
        self.path = path

    def close(self) -> None:
        """Close the file; it stays where it is."""
        self._file.close()

    def _block(self, name: str, first_word: int, count: int) -> None:
        encoded = name.encode()
        with os_errors("cannot write", self.path):
            self._unseal()
            self._file.write(_NAME.pack(len(encoded)) + encoded + _BLOCK.pack(first_word, count))

    def _unseal(self) -> None:
        """Take the digest off the end."""
        if self._is_sealed:
            self._file.seek(-_DIGEST.size, os.SEEK_END)
            self._file.truncate()
            self._is_sealed = False


def read_places(path: Path) -> Iterator[Block]:
    """The blocks of a sealed file, as views of it.

    Raises:
        FormatError: It is not what was sealed.
        StoreError: It cannot be read.
    """
    data = map_file(path, follow_link=False)
    end = data.size - _DIGEST.size
    if end < len(MAGIC):
        raise Truncated(f"{path}: {data.size} bytes are too few")
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise Corrupt(f"{path} does not list changed words")
    (digest,) = _DIGEST.unpack_from(data.data, end)
    if digest != xxh3_64(data[:end]):
        raise ChecksumMismatch(f"{path} is not what its digest says")
    at = len(MAGIC)
    while at < end:
        block, at = _read_block(data, at, end, path)
        yield block


def _read_block(data: Any, start: int, end: int, path: Path) -> tuple[Block, int]:
    name_at = start + _NAME.size
    if name_at > end:
        raise Truncated(f"{path}: the block at byte {start} is cut")
    (name_bytes,) = _NAME.unpack_from(data.data, start)
    at = name_at + name_bytes + _BLOCK.size
    if at > end:
        raise Truncated(f"{path}: the block at byte {start} is cut")
    try:
        name = data[name_at : name_at + name_bytes].tobytes().decode()
    except UnicodeDecodeError:
        raise Corrupt(f"{path}: the name in the block at byte {start} is not UTF-8") from None
    first_word, count = _BLOCK.unpack_from(data.data, at - _BLOCK.size)
    if first_word >= MAX_TENSOR_BYTES:
        raise Corrupt(f"{path}: the block at byte {start} begins beyond any tensor")
    if count == WHOLE:
        return Block(name, 0, None), at
    after = at + 4 * count
    if after > end:
        raise Truncated(f"{path}: the block at byte {start} is cut")
    # Names are of any length, so positions lie anywhere.
    positions = np.frombuffer(data[at:after].tobytes(), "<u4")
    if count and ((positions[1:] <= positions[:-1]).any() or positions[-1] >= CHUNK_WORDS):
        raise Corrupt(f"{path}: the positions of the block at byte {start} do not rise")
    return Block(name, first_word, positions), after
