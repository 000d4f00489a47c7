"""Which of several maintainers is in charge of a stream, and the time by the store's clock."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from pathlib import Path

from thinwire.errors import FormatError, NotFound, StreamError, ThinwireError
from thinwire.follow import Stream
from thinwire.follow.leases import end_soon
from thinwire.stream import keys
from thinwire.stream.blocks import digest_of
from thinwire.stream.encoding import MAX_SMALL_BYTES, encode, parse_hint
from thinwire.stream.records import FORMAT, Lease

_LEASE_TTL_S = 900
_BACKGROUND = "background"


class Charge:
    """A maintainer's lease. It only keeps several from doing the same work twice.

    Args:
        stream: The stream.
        folder: The maintainer's own: one that is started again in it keeps its lease.
        is_background: A publisher's own maintainer, which leaves the work to any other.
    """

    def __init__(self, stream: Stream, folder: Path, *, is_background: bool) -> None:
        self._stream = stream
        self._holder = _BACKGROUND if is_background else _holder_of(folder)
        self._written_s = 0.0

    def take(self) -> float | None:
        """Be the one in charge: the time by the store's clock; None: another one is."""
        key = keys.maintainer()
        held = self._lease()
        is_free = held is None or held.holder in (self._holder, _BACKGROUND)
        if not is_free:
            now_s, modified_s = self._store_time(), self._modified_s(key)
            if modified_s is not None and now_s - modified_s < _LEASE_TTL_S:
                return None
        self._write()
        return self._modified_s(key) or self._store_time()

    def keep(self) -> None:
        """Renew the lease, where it is time to."""
        if time.monotonic() - self._written_s > _LEASE_TTL_S / 3:
            self._write()

    def end(self) -> None:
        """Let another one be in charge, if that takes no time."""
        end_soon(self._end)

    def _end(self) -> None:
        with suppress(ThinwireError):
            held = self._lease()
            if held is not None and held.holder == self._holder:
                self._stream.store.delete([keys.maintainer()])

    def _write(self) -> None:
        self._stream.check_there()
        mine = Lease(FORMAT, self._holder, "0" * 32, 1, _LEASE_TTL_S)
        self._stream.store.put(keys.maintainer(), encode(mine))
        self._written_s = time.monotonic()

    def _lease(self) -> Lease | None:
        try:
            data = self._stream.store.get(keys.maintainer(), limit_bytes=MAX_SMALL_BYTES)
            return parse_hint(data, Lease, keys.maintainer())
        except (NotFound, FormatError):
            return None

    def _store_time(self) -> float:
        """The store's clock: when it says that something was written just now."""
        key = f"{keys.LEASES}clock-{self._holder}.json"
        self._stream.store.put(key, b"{}")
        modified_s = self._modified_s(key)
        self._stream.store.delete([key])
        if modified_s is None:
            raise StreamError(f"{self._stream.url}: what was just written is not listed")
        return modified_s

    def _modified_s(self, key: str) -> float | None:
        for entry in self._stream.store.list(keys.LEASES):
            if entry.key == key:
                return entry.modified_s
        return None


def _holder_of(folder: Path) -> str:
    """The same for every run in the same folder: a restarted maintainer keeps its lease."""
    return digest_of(f"{platform.node()}:{folder.absolute()}".encode())[:32]
