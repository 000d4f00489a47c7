"""A folder of verified blocks that several followers on one host share."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.checkpoint.disk import os_errors
from thinwire.stream.blocks import digest_of

DEFAULT_LIMIT_BYTES = 32 << 30
# Looking through the folder at each put would cost more than the blocks.
_PUTS_BETWEEN_LOOKS = 64
_LOCKS = 64
_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.02


class BlockCache:
    """Blocks by their BLAKE3 digest. What is read back is verified, so anyone may write there.

    The oldest blocks go when there are more than ``limit_bytes``. A cache is a help only: where it
    cannot be read or written, blocks come from the store.
    """

    def __init__(
        self, folder: str | os.PathLike[str], limit_bytes: int = DEFAULT_LIMIT_BYTES
    ) -> None:
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        self._puts = 0
        with os_errors("cannot create", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, digest: str, size_bytes: int) -> bytes | None:
        """A block, or None."""
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                data = file.read(size_bytes + 1)
        except OSError:
            return None
        if len(data) != size_bytes or digest_of(data) != digest:
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def put(self, digest: str, data: bytes | memoryview) -> None:
        """Keep a verified block, if that is possible."""
        path = self._path(digest)
        temporary = path.with_name(f".{digest[:16]}-{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
        self._puts += 1
        if self._puts % _PUTS_BETWEEN_LOOKS == 0:
            self.trim()

    @contextmanager
    def fetching(self, digest: str) -> Iterator[None]:
        """Wait until no other process fetches the object that begins with this block.

        The one that waited then finds the blocks here. A process that dies lets go; one that hangs
        is waited for ``_PATIENCE_S``, and then the object is fetched twice.
        """
        try:
            number = int(digest[:8], 16) % _LOCKS
            descriptor = os.open(
                self._folder / f"lock-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except OSError:
            yield
            return
        try:
            _lock_patiently(descriptor)
            yield
        finally:
            os.close(descriptor)

    def trim(self) -> None:
        """Remove the blocks that were used longest ago until the rest fits the limit."""
        found = []
        with suppress(OSError):
            for path in self._folder.glob("??/*"):
                with suppress(OSError):
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest


def _lock_patiently(descriptor: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_EVERY_S)
        except OSError:
            return
        else:
            return
