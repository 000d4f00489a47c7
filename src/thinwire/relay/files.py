"""Files in a folder up to a limit: the ones used longest ago go."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from thinwire.checkpoint.disk import os_errors
from thinwire.errors import Unavailable

_LOG = logging.getLogger("thinwire")
_NAME = re.compile(r"[0-9a-f]{64}")
# A disk that failed is left alone for so long.
_PAUSE_S = 5.0
_PASSING_SHARE = 0.5


class Found(NamedTuple):
    """A file's content, and when it was written."""

    data: bytes
    written_s: float


class LruFolder:
    """Files by a name of 64 hexadecimal digits, two levels deep as in ``BlockCache``.

    A help only: what cannot be kept is not kept. Whoever reads proves what was read, so nothing is
    synced, and a file that was cut or changed is a missing one.

    Args:
        folder: Where; is made.
        limit_bytes: What the files may take together.

    Raises:
        StoreError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._passing: OrderedDict[str, int] = OrderedDict()
        self._total_bytes = self._passing_bytes = 0
        self._failed_until_s = 0.0
        self.evicted_count = 0
        with os_errors("cannot use", folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._take_stock()
        self._make_room(0)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def total_bytes(self) -> int:
        """What the files take."""
        return self._total_bytes

    @property
    def is_failing(self) -> bool:
        """Whether the disk did not take something just now."""
        return time.monotonic() < self._failed_until_s

    def get(self, name: str) -> Found | None:
        """A file's content, which is yet to be proved; None: not here."""
        with self._lock:
            size_bytes = self._sizes.get(name)
            if size_bytes is None:
                return None
            self._sizes.move_to_end(name)
            if name in self._passing:
                self._passing.move_to_end(name)
        try:
            with self._path(name).open("rb") as file:
                data = file.read(size_bytes + 1)
                written_s = os.fstat(file.fileno()).st_mtime
        except OSError:
            self.drop(name)
            return None
        return Found(data, written_s)

    def put(self, name: str, data: bytes | memoryview, *, is_passing: bool = False) -> bool:
        """Keep a file, if that is possible; whether it was.

        Args:
            name: Its name.
            data: Its content.
            is_passing: It is one of more files than fit, read one after another: such ones may
                take half of the folder, and then push out each other.
        """
        if self.is_failing or not self._make_room(len(data)):
            return False
        path = self._path(name)
        temporary = path.with_name(f".{name[:16]}-{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            with self._lock:
                self._total_bytes -= len(data)
            self._failed_until_s = time.monotonic() + _PAUSE_S
            _LOG.warning(
                "cannot keep anything in %s (%s): passing it on only", self._folder, error.strerror
            )
            return False
        with self._lock:
            self._total_bytes -= self._sizes.pop(name, 0)
            self._sizes[name] = len(data)
            self._passing_bytes -= self._passing.pop(name, 0)
            if is_passing:
                self._passing[name] = len(data)
                self._passing_bytes += len(data)
        return True

    def drop(self, name: str) -> None:
        """Remove a file that turned out to be missing or wrong."""
        with self._lock:
            self._forget(name)

    def _make_room(self, size_bytes: int) -> bool:
        """Count so much more, after removing what was not used; False: it will never fit."""
        if size_bytes > self.limit_bytes:
            return False
        with self._lock:
            while self._total_bytes + size_bytes > self.limit_bytes and self._sizes:
                is_much = self._passing_bytes > self.limit_bytes * _PASSING_SHARE
                self._forget(next(iter(self._passing if is_much else self._sizes)))
                self.evicted_count += 1
            if self._total_bytes + size_bytes > self.limit_bytes:
                return False  # others are being written
            self._total_bytes += size_bytes
            return True

    def _forget(self, name: str) -> None:
        size_bytes = self._sizes.pop(name, None)
        self._passing_bytes -= self._passing.pop(name, 0)
        if size_bytes is not None:
            self._total_bytes -= size_bytes
            with suppress(OSError):
                self._path(name).unlink()

    def _take_stock(self) -> None:
        """Find what an earlier run has left, the oldest first."""
        found: list[tuple[float, str, int]] = []
        for part in os.scandir(self._folder):
            if len(part.name) != 2 or not part.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(part.path):
                if file.name.startswith("."):
                    # Half written when that run was killed.
                    with suppress(OSError):
                        Path(file.path).unlink()
                elif _NAME.fullmatch(file.name) and file.name[:2] == part.name:
                    status = file.stat(follow_symlinks=False)
                    found.append((status.st_mtime, file.name, status.st_size))
        for _, name, size_bytes in sorted(found):
            self._sizes[name] = size_bytes
            self._total_bytes += size_bytes

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name


def own(folder: Path) -> int:
    """Keep other relays out of a folder; returns the descriptor that holds it.

    Raises:
        Unavailable: Another relay uses it.
        StoreError: It cannot be made or written.
    """
    with os_errors("cannot use", folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "relay.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        # It may be about to end: whoever starts this one again must not give up.
        raise Unavailable(
            f"another relay uses {folder}", hint="End that one, or give each its own --cache"
        ) from None
    return descriptor
