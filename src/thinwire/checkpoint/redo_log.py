"""The redo log of an in-place update: what to do to which file, whole or worthless.

A log folder holds ``log`` and the files ``new-0``, ``new-1``, ... that will replace others. The
layout of ``log``, all numbers little-endian::

    magic 8 | head bytes 4 | head (JSON) | blocks | XXH3-64 of all before 8

    block: file number 4 | byte offset 8 | word bytes 1 | count 4 | positions 4 each | words

A block says which words, counted from the offset, get which new bits. Doing it twice is doing it
once, so a log may be replayed from its start after a crash at any point.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from thinwire.checkpoint.disk import ByteArray, create, map_file, os_errors, write_all
from thinwire.checkpoint.file_names import MARK_NAME, MAX_MARK_BYTES, SINGLE_FILE, name_fault
from thinwire.codec.digest import CHUNK_WORDS, xxh3_64
from thinwire.errors import ChecksumMismatch, FormatError, LimitExceeded, Truncated

LOG_NAME = "log"
MAGIC = b"TWREDO1\n"
_HEAD_BYTES = struct.Struct("<I")
_BLOCK = struct.Struct("<IQBI")
_DIGEST = struct.Struct("<Q")
_WORD_BYTES = (1, 2, 4, 8)


class FileSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the checkpoint by name, and its size in bytes once the update is done."""

    name: str
    size: int


class RedoHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an update does besides the blocks.

    Attributes:
        delta: Identity of the delta, for whoever looks into the log.
        patched: The files that blocks name by number; their size does not change.
        replaced: The files that ``new-0``, ``new-1``, ... become; the folder's mark may be one.
        removed: The files that go.
    """

    delta: str
    patched: list[FileSize]
    replaced: list[FileSize]
    removed: list[str]


class Block(NamedTuple):
    """Words to write: ``positions`` count words of ``word_bytes`` from byte ``offset``.

    They rise and are below ``CHUNK_WORDS``.
    """

    file_number: int
    offset: int
    word_bytes: int
    positions: npt.NDArray[np.uint32]
    words: ByteArray


class RedoWriter:
    """Writes a log block by block; worthless until :meth:`finish` has returned."""

    def __init__(self, folder: Path, head: RedoHead) -> None:
        self._path = folder / LOG_NAME
        packed = msgspec.json.encode(head)
        with os_errors("cannot write", self._path):
            self._descriptor = create(self._path)
            write_all(self._descriptor, MAGIC + _HEAD_BYTES.pack(len(packed)) + packed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def add(self, block: Block) -> None:
        """Append a block.

        Raises:
            StoreError: The disk is full or failed.
        """
        fixed = _BLOCK.pack(block.file_number, block.offset, block.word_bytes, block.positions.size)
        positions = block.positions.astype("<u4", copy=False).tobytes()
        with os_errors("cannot write", self._path):
            write_all(self._descriptor, fixed + positions + block.words.tobytes())

    def finish(self) -> None:
        """Seal the log and make it durable."""
        with os_errors("cannot write", self._path):
            digest = xxh3_64(map_file(self._path))
            write_all(self._descriptor, _DIGEST.pack(digest))
            os.fsync(self._descriptor)


class RedoLog:
    """A sealed log, mapped and verified.

    A digest shows what an accident did, not who wrote the log: it may have come with a checkpoint
    from elsewhere. So names and blocks are checked too, before anything is done.
    """

    def __init__(self, folder: Path) -> None:
        """Open the log in ``folder``.

        Raises:
            FormatError: The log is not what was sealed.
            StoreError: It cannot be read.
        """
        self._path = folder / LOG_NAME
        if folder.is_symlink():
            raise FormatError(f"{folder} is a link")
        self._data = map_file(self._path, follow_link=False)
        self._end = self._data.size - _DIGEST.size
        first = len(MAGIC) + _HEAD_BYTES.size
        if self._end < first:
            raise Truncated(f"{self._path}: {self._data.size} bytes are too few for a redo log")
        (digest,) = _DIGEST.unpack_from(self._data.data, self._end)
        if digest != xxh3_64(self._data[: self._end]):
            raise ChecksumMismatch(f"{self._path} is not what its digest says")
        (head_bytes,) = _HEAD_BYTES.unpack_from(self._data.data, len(MAGIC))
        self._first_block = first + head_bytes
        if self._data[: len(MAGIC)].tobytes() != MAGIC or self._first_block > self._end:
            raise FormatError(f"{self._path} is not a redo log")
        try:
            packed = self._data[first : self._first_block].tobytes()
            self.head = msgspec.json.decode(packed, type=RedoHead)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{self._path}: the head is malformed: {error}") from None
        self._check_names()
        for _ in self.blocks():
            pass

    def blocks(self) -> Iterator[Block]:
        """The blocks in order, as views of the mapped log."""
        at = self._first_block
        while at < self._end:
            block, at = self._read_block(at)
            yield block

    def _read_block(self, start: int) -> tuple[Block, int]:
        """The block at a place in the log, and where the next one begins."""
        at = start + _BLOCK.size
        if at > self._end:
            raise self._unsound(start, "is cut")
        number, offset, word_bytes, count = _BLOCK.unpack_from(self._data.data, start)
        words_at = at + 4 * count
        after = words_at + word_bytes * count
        if after > self._end:
            raise self._unsound(start, "is cut")
        if number >= len(self.head.patched):
            raise self._unsound(start, f"is of file {number}, which the head does not name")
        if word_bytes not in _WORD_BYTES:
            raise self._unsound(start, f"has words of {word_bytes} bytes")
        positions = self._data[at:words_at].view("<u4")
        if count:
            if (positions[1:] <= positions[:-1]).any():
                raise self._unsound(start, "has positions that do not rise")
            # What is between them is read at once when the block is replayed.
            if positions[-1] >= CHUNK_WORDS:
                raise self._unsound(start, f"has words {CHUNK_WORDS} or further apart")
            if offset + (int(positions[-1]) + 1) * word_bytes > self.head.patched[number].size:
                raise self._unsound(start, "reaches beyond the end of its file")
        return Block(number, offset, word_bytes, positions, self._data[words_at:after]), after

    def _check_names(self) -> None:
        head = self.head
        # Of thinwire's own files only the mark may be replaced, and none patched or removed.
        marks = [file for file in head.replaced if file.name == MARK_NAME]
        if any(file.size > MAX_MARK_BYTES for file in marks):
            raise LimitExceeded(f"{self._path}: the mark has more than {MAX_MARK_BYTES} bytes")
        kept = [*head.patched, *(file for file in head.replaced if file not in marks)]
        names = [file.name for file in kept if file.name != SINGLE_FILE]
        for name in [*names, *head.removed]:
            if fault := name_fault(name):
                raise FormatError(f"{self._path}: the file name {name[:80]!r} {fault}")

    def _unsound(self, start: int, reason: str) -> FormatError:
        return FormatError(f"{self._path}: the block at byte {start} {reason}")


def staged_path(folder: Path, number: int) -> Path:
    """Where the new content of the ``number``-th replaced file waits."""
    return folder / f"new-{number}"
