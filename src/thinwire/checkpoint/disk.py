"""Effects on files: mapping, reserving, writing durably, and errors that say what and where."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinwire.errors import BaseUnusable, InvalidArgument, StoreError, ThinwireError, from_os_error

ByteArray = npt.NDArray[np.uint8]

_ZEROS_BYTES = 1 << 20
# What a file system without preallocation answers.
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}


@contextmanager
def os_errors(doing: str, path: object) -> Iterator[None]:
    """Turn an ``OSError`` met inside into the ``StoreError`` that says what was being done."""
    try:
        yield
    except ThinwireError:
        raise
    except OSError as error:
        raise from_os_error(error, doing, path) from error


def map_file(path: Path, *, follow_link: bool = True) -> ByteArray:
    """A read-only view of a whole regular file; it stays mapped for as long as the view lives.

    Shrinking the file meanwhile kills the process (SIGBUS), as with any memory map.

    Raises:
        StoreError: The file cannot be opened or mapped.
        InvalidArgument: It is not a regular file.
    """
    with os_errors("cannot read", path):
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags if follow_link else flags | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(
                    f"{path} is not a regular file", hint="Pass a file", path=str(path)
                )
            if status.st_size == 0:
                return np.empty(0, np.uint8)
            mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def open_unshared(path: Path, flags: int) -> int:
    """A descriptor of an existing regular file that is nobody else's: no link, no second name.

    Raises:
        BaseUnusable: It is one of these, or not a regular file.
        StoreError: It cannot be opened.
    """
    check_unshared(path)
    with os_errors("cannot open", path):
        # Looked at again once it is open: by then the name may mean another file.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        _refuse_shared(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_unshared(path: Path) -> os.stat_result:
    """The status of an existing regular file; errors as :func:`open_unshared`."""
    with os_errors("cannot read", path):
        status = path.lstat()
    _refuse_shared(path, status)
    return status


def shared_error(path: Path, reason: str) -> BaseUnusable:
    """The refusal to change in place a file that is also, or really, somewhere else."""
    return BaseUnusable(
        f"{path} {reason}: changing it in place could change another checkpoint too",
        hint="Apply the delta to a new path, or replace the file by a copy of its own",
        path=str(path),
    )


def _refuse_shared(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise shared_error(path, "is a link")
    if not stat.S_ISREG(status.st_mode):
        raise BaseUnusable(
            f"{path} is not a regular file", hint="Move it elsewhere", path=str(path)
        )
    if status.st_nlink > 1:
        raise shared_error(path, f"has {status.st_nlink} names")


def create(path: Path) -> int:
    """A descriptor, for reading and writing, of a new file; the file must not exist."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Append all of ``data``; the system may take it in pieces."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a new file and make it durable."""
    with os_errors("cannot write", path):
        descriptor = create(path)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Take the disk space of a new file, so that a full disk shows now and not in a memory map."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
        else:
            return
    zeros = memoryview(bytes(min(size_bytes, _ZEROS_BYTES)))
    for start in range(0, size_bytes, _ZEROS_BYTES):
        write_all(descriptor, zeros[: size_bytes - start])


def create_mapped(path: Path, size_bytes: int) -> ByteArray:
    """A new file of ``size_bytes``, its space reserved, as a writable view; see :func:`sync`."""
    with os_errors("cannot write", path):
        descriptor = create(path)
        try:
            reserve(descriptor, size_bytes)
            mapped = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def sync(path: Path) -> None:
    """Make a file's bytes, also those written through a map, or a folder's names durable."""
    with os_errors("cannot sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def temporary_sibling(path: Path) -> Path:
    """A hidden name, not in use, in the folder of ``path``: on the same file system."""
    # Cut, so that a long name does not outgrow what the file system takes.
    return path.with_name(f".{path.name[:48]}.thinwire-{secrets.token_hex(6)}")


def put_in_place(temporary: Path, target: Path, *, overwrite: bool = False) -> None:
    """Give a finished file or folder its name, durably.

    After an error it does not have that name, except where it replaced another: better the new one,
    which is whole, than none.
    """
    with os_errors("cannot write", target):
        if overwrite:
            temporary.replace(target)
        else:
            temporary.rename(target)
    try:
        sync(target.parent)
    except StoreError:
        if not overwrite:
            remove_quietly(target)
        raise


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it is there: only under names of thinwire's own."""
    with os_errors("cannot remove", path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_quietly(path: Path) -> None:
    """Like :func:`remove` after a failure or a success, which matters more than what is left."""
    with suppress(StoreError):
        remove(path)
