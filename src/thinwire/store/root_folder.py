"""A store's folder: made once, and missed where it is away."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from thinwire.errors import Unavailable
from thinwire.store.store import RESERVED_PREFIX

# Where files are written that have no key yet.
STAGING = f"{RESERVED_PREFIX}writing"
# What is said of a file on a file system whose server, or daemon, does not answer.
_NO_ANSWER = {
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
    errno.ENODEV,
}


class RootFolder:
    """A folder, and whether it is there. Once it was, it is never made again.

    A folder that was there and is gone, or has an empty or a closed one in its place, is one that
    is not mounted just now: nothing in it is missing, and nothing is to be made instead of it.

    A file system may give the number of a folder that was removed to the next one. It is another
    one also where it has not got what writers leave in it. That fails where none wrote with this
    module: such a folder cannot be told from one that was emptied, and what must not begin anew in
    it is guarded by a record of its own, as streams are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        # Device and number; None: it was not there yet.
        self._seen: tuple[int, int] | None = None
        self._had_staging = False

    @property
    def was_seen(self) -> bool:
        """Whether it was there."""
        return self._seen is not None

    def check_there(self) -> None:
        """Make sure that nothing is missing only because the whole folder is.

        Raises:
            Unavailable: It was there, and is not.
        """
        # Before the look: another thread may make it meanwhile.
        seen, had_staging = self._seen, self._had_staging
        try:
            status = self.path.stat()
        except FileNotFoundError:
            if seen is None:
                return
            raise self._away("the folder is not there any more") from None
        found = (status.st_dev, status.st_ino)
        try:
            has_staging = (self.path / STAGING).exists()
        except PermissionError:
            has_staging = had_staging
        is_other = seen not in (None, found) or (had_staging and not has_staging)
        if is_other and self._is_empty():
            raise self._away("another folder is in its place, empty or closed")
        if seen is not None or not self._is_empty():
            # An empty one has nothing to lose: what it is to hold may not be mounted yet.
            self._seen, self._had_staging = found, has_staging

    def explain(self, error: OSError) -> None:
        """Raise Unavailable if an error only says that the folder is away."""
        if error.errno in _NO_ANSWER:
            raise self._away(error.strerror or str(error)) from error
        if isinstance(error, FileNotFoundError | PermissionError):
            with suppress(PermissionError):
                self.check_there()

    def make_staging(self) -> Path:
        """The folder for what has no key yet; made, and the store's folder where it never was.

        Raises:
            Unavailable: The store's folder is away.
        """
        staging = self.path / STAGING
        self.check_there()
        make_folders(staging, self.path if self.was_seen else Path(staging.anchor))
        try:
            self.check_there()
        except Unavailable:
            with suppress(OSError):
                staging.rmdir()
            raise
        return staging

    def _is_empty(self) -> bool:
        """Whether nothing is in it, or nobody may look: some close the folder below a mount."""
        try:
            with os.scandir(self.path) as found:
                return all(entry.name == STAGING for entry in found)
        except PermissionError:
            return True
        except NotADirectoryError:
            return False

    def _away(self, reason: str) -> Unavailable:
        url = self.path.as_uri()
        return Unavailable(
            f"{url}: {reason}",
            hint="Is it mounted, or was it moved? Nothing is made in its place; what is to begin"
            " anew there must be opened anew",
            url=url,
        )


def make_folders(folder: Path, top: Path) -> None:
    """Make a folder and the ones above it up to ``top``, which is not made: each name durable."""
    if folder == top or folder.is_dir():
        return
    make_folders(folder.parent, top)
    with suppress(FileExistsError):
        folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
