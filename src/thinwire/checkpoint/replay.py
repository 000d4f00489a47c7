"""Carrying out a sealed redo log: the only code that changes a checkpoint's files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from thinwire.checkpoint.disk import os_errors, remove, sync
from thinwire.checkpoint.file_names import file_path
from thinwire.checkpoint.redo_log import Block, FileSize, RedoLog, staged_path
from thinwire.errors import BaseUnusable, FormatError, StoreError


def replay(checkpoint: Path, redo: Path) -> str:
    """Do everything that the log in ``redo`` says, from its start, and make it durable.

    May be called again however far an earlier call had come.

    Returns:
        The identity of the delta that the log was made from.

    Raises:
        BaseUnusable: It cannot be done; the log stays, so that a later call may.
    """
    try:
        # The log must outlive a power cut before the first byte changes.
        sync(redo.parent)
        log = RedoLog(redo)
        for file in log.head.patched:
            _check_size(file_path(checkpoint, file.name), file)
        _patch(checkpoint, log)
        for number, file in enumerate(log.head.replaced):
            _replace(staged_path(redo, number), file_path(checkpoint, file.name), file)
        for name in log.head.removed:
            remove(file_path(checkpoint, name))
        sync(redo.parent)
    except FormatError as error:
        raise BaseUnusable(
            f"{checkpoint}: an interrupted in-place update cannot be finished: {error.message}",
            hint=f"Restore the checkpoint from a good copy and remove {redo}",
            path=str(checkpoint),
        ) from error
    except StoreError as error:
        raise BaseUnusable(
            f"{checkpoint}: the in-place update is not finished: {error.message}",
            hint="Mend that, then call thinwire.checkpoint.recover or apply the delta again",
            path=str(checkpoint),
        ) from error
    return log.head.delta


def _check_size(path: Path, file: FileSize) -> None:
    with os_errors("cannot read", path):
        size_bytes = path.stat().st_size
    if size_bytes != file.size:
        raise FormatError(f"{path} has {size_bytes} bytes where the log expects {file.size}")


def _patch(checkpoint: Path, log: RedoLog) -> None:
    paths = [file_path(checkpoint, file.name) for file in log.head.patched]
    descriptors: list[int] = []
    try:
        for path in paths:
            with os_errors("cannot write", path):
                descriptors.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        for block in log.blocks():
            with os_errors("cannot write", paths[block.file_number]):
                _write_words(descriptors[block.file_number], block)
        for path, descriptor in zip(paths, descriptors, strict=True):
            with os_errors("cannot sync", path):
                os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


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


def _replace(staged: Path, target: Path, file: FileSize) -> None:
    if not staged.exists():
        # Moved by an earlier replay that was interrupted.
        _check_size(target, file)
        return
    _check_size(staged, file)
    with os_errors("cannot replace", target):
        staged.replace(target)
