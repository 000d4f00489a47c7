"""One process at a time updates a checkpoint in place."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.checkpoint.disk import os_errors
from thinwire.errors import BaseUnusable


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the lock file ``path``, which exists only meanwhile.

    The system lets go of the lock when the process dies; the file then stays, harmless.

    Raises:
        BaseUnusable: Someone else holds it; nothing waits.
        StoreError: The lock file cannot be made.
    """
    with os_errors("cannot lock", path):
        descriptor = _acquire(path)
    try:
        yield
    finally:
        # Removed while locked: whoever opened it before finds in _is_current that it is gone.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        # A link that came with the checkpoint must not make or lock a file elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise BaseUnusable(
                f"another process is updating {path.parent}, or something else in this one",
                hint="Wait until it has ended, or close the other publisher or follower",
                path=str(path),
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the locked file is still the one of that name."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)
