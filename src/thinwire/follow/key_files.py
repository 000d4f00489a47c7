"""Private keys on disk: never readable by others, never through a mode that is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from thinwire.checkpoint.disk import (
    os_errors,
    put_in_place,
    remove_quietly,
    sync,
    temporary_sibling,
    write_all,
)
from thinwire.errors import AccessDenied, InvalidArgument
from thinwire.stream.signing import SigningKey

_MODE = 0o600
_MAX_BYTES = 1 << 16


def read_signing_key(path: Path | None) -> SigningKey | None:
    """The key in a file; None for None.

    Raises:
        AccessDenied: Others than its owner may read or write the file.
        InvalidArgument: It holds no signing key.
        StoreError: It cannot be read.
    """
    if path is None:
        return None
    with os_errors("cannot read the signing key", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"the signing key {path} is not a file", path=str(path))
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                raise AccessDenied(
                    f"others than its owner may use the signing key {path} (its mode is {mode:o})",
                    hint="Make it private: chmod 600. If others may have read it, make a new one",
                    path=str(path),
                )
            pem = os.read(descriptor, _MAX_BYTES)
        finally:
            os.close(descriptor)
    return SigningKey.from_pem(pem)


def write_signing_key(path: Path, key: SigningKey, *, overwrite: bool) -> None:
    """Write a key as PEM with mode 600. The file appears complete or not at all.

    Raises:
        AlreadyExists: The file exists, and ``overwrite`` was not said.
        StoreError: It cannot be written.
    """
    temporary = temporary_sibling(path)
    try:
        with os_errors("cannot write", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(temporary, flags, _MODE)
            try:
                # A strange umask may have taken bits away.
                os.fchmod(descriptor, _MODE)
                write_all(descriptor, key.to_pem())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if not overwrite:
                # Unlike renaming, linking never replaces.
                os.link(temporary, path)
                sync(path.absolute().parent)
        if overwrite:
            put_in_place(temporary, path, overwrite=True)
    finally:
        remove_quietly(temporary)
