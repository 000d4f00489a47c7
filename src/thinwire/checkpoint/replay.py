"""Carrying out a sealed redo log: the only code that changes a checkpoint's files.

A log may have come with a checkpoint from elsewhere, so it is trusted with that checkpoint and with
nothing else: no link is followed, no file with a second name written, no folder removed. All of
that is checked before the first byte changes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from thinwire.checkpoint.disk import check_unshared, open_unshared, os_errors, sync
from thinwire.checkpoint.file_names import MARK_NAME, file_path
from thinwire.checkpoint.redo_log import Block, FileSize, RedoLog, staged_path
from thinwire.errors import BaseUnusable, FormatError, InvalidArgument, StoreError


def replay(checkpoint: Path, redo: Path) -> None:
    """Do everything that the log in ``redo`` says, from its start, and make it durable.

    May be called again however far an earlier call had come.

    Raises:
        BaseUnusable: It cannot be done; the log stays, so that a later call may.
    """
    try:
        # The log must outlive a power cut before the first byte changes.
        sync(redo.parent)
        log = RedoLog(redo)
        with ExitStack() as stack:
            descriptors = [
                stack.enter_context(_opened(file_path(checkpoint, file.name), file))
                for file in log.head.patched
            ]
            for number, file in enumerate(log.head.replaced):
                _check_replaced(staged_path(redo, number), file_path(checkpoint, file.name), file)
            for name in log.head.removed:
                _check_removed(file_path(checkpoint, name))
            _patch(checkpoint, log, descriptors)
        moves = [
            (staged_path(redo, number), file_path(checkpoint, file.name))
            for number, file in enumerate(log.head.replaced)
        ]
        for staged, target in moves:
            if target.name != MARK_NAME:
                _replace(staged, target)
        for name in log.head.removed:
            path = file_path(checkpoint, name)
            with os_errors("cannot remove", path):
                path.unlink(missing_ok=True)
        # The mark says what the folder holds, so it comes when that is true.
        for staged, target in moves:
            if target.name == MARK_NAME:
                _replace(staged, target)
        sync(redo.parent)
    except (FormatError, InvalidArgument) as error:
        raise BaseUnusable(
            f"{checkpoint}: an interrupted in-place update cannot be finished: {error.message}",
            hint=f"Restore the checkpoint from a good copy and remove {redo}",
            path=str(checkpoint),
        ) from error
    except (StoreError, BaseUnusable) as error:
        raise BaseUnusable(
            f"{checkpoint}: the in-place update is not finished: {error.message}",
            hint="Mend that, then call thinwire.checkpoint.recover or apply the delta again",
            path=str(checkpoint),
        ) from error


@contextmanager
def _opened(path: Path, file: FileSize) -> Iterator[int]:
    """A file to be patched, of the right size, for reading and writing."""
    descriptor = open_unshared(path, os.O_RDWR)
    try:
        _check_size(path, os.fstat(descriptor), file)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_size(path: Path, status: os.stat_result, file: FileSize) -> None:
    if status.st_size != file.size:
        raise FormatError(f"{path} has {status.st_size} bytes where the log expects {file.size}")


def _check_replaced(staged: Path, target: Path, file: FileSize) -> None:
    if os.path.lexists(staged):
        _check_size(staged, check_unshared(staged), file)
        if os.path.lexists(target):
            check_unshared(target)
    else:
        # Moved by an earlier replay that was interrupted.
        _check_size(target, check_unshared(target), file)


def _check_removed(path: Path) -> None:
    with os_errors("cannot read", path):
        if os.path.lexists(path) and stat.S_ISDIR(path.lstat().st_mode):
            raise FormatError(f"{path} is a folder where the log removes a file")


def _patch(checkpoint: Path, log: RedoLog, descriptors: list[int]) -> None:
    paths = [file_path(checkpoint, file.name) for file in log.head.patched]
    for block in log.blocks():
        with os_errors("cannot write", paths[block.file_number]):
            _write_words(descriptors[block.file_number], block)
    for path, descriptor in zip(paths, descriptors, strict=True):
        with os_errors("cannot sync", path):
            os.fsync(descriptor)


def _write_words(descriptor: int, block: Block) -> None:
    """Read the bytes from the first to the last changed word, change those words, write them back.

    Not a memory map: there a full disk or a failing device would kill the process.
    """
    if not block.positions.size:
        return
    first, last = int(block.positions[0]), int(block.positions[-1])
    start = block.offset + first * block.word_bytes
    size_bytes = (last - first + 1) * block.word_bytes
    span = np.frombuffer(bytearray(os.pread(descriptor, size_bytes, start)), np.uint8)
    if span.size != size_bytes:
        raise FormatError(f"the file ends before byte {start + size_bytes}")
    word = f"<u{block.word_bytes}"
    span.view(word)[block.positions - np.uint32(first)] = block.words.view(word)
    left = span.data
    while left:
        written = os.pwrite(descriptor, left, start)
        left, start = left[written:], start + written


def _replace(staged: Path, target: Path) -> None:
    if os.path.lexists(staged):
        with os_errors("cannot replace", target):
            staged.replace(target)
