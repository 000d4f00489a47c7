"""Files without a name: what waits on disk, not in memory, and goes with its last view.

A process that is killed leaves nothing of them behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

import numpy as np

from thinwire.checkpoint.disk import ByteArray, os_errors, reserve


@contextmanager
def unnamed_file(folder: Path | str) -> Iterator[BinaryIO]:
    """A new file in ``folder`` that can be written and read until the block ends.

    Raises:
        StoreError: It cannot be made or written.
    """
    with os_errors("cannot write in", folder), TemporaryFile(dir=folder) as file:
        yield cast(BinaryIO, file)


def map_written(file: BinaryIO) -> ByteArray:
    """A read-only view of all that was written so far; it outlives the block of the file."""
    file.flush()
    size_bytes = os.fstat(file.fileno()).st_size
    if not size_bytes:
        return np.empty(0, np.uint8)
    mapped = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.uint8)


def map_reserved(folder: Path, size_bytes: int) -> ByteArray:
    """A writable view of a new file of that size in ``folder``, which is made where it is missing.

    Raises:
        StoreError: The disk is full, or the folder cannot be written to.
    """
    with os_errors("cannot write in", folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not size_bytes:
        return np.empty(0, np.uint8)
    with unnamed_file(folder) as file:
        reserve(file.fileno(), size_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint8)
