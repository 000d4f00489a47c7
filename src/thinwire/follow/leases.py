"""A follower tells the stream which version it still needs."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from thinwire.errors import AccessDenied, NotFound, ThinwireError
from thinwire.store import Store
from thinwire.stream import keys
from thinwire.stream.encoding import encode
from thinwire.stream.records import FORMAT, LEASE_TTL_S, Lease

_EVERY_S = LEASE_TTL_S / 3
# A store that is away is tried again for long, and a lease ends by itself.
_END_WITHIN_S = 3.0


def end_soon(end: Callable[[], None]) -> None:
    """Call what ends a lease, and wait for it, unless the store is away."""
    ending = threading.Thread(target=end, name="thinwire-lease", daemon=True)
    ending.start()
    ending.join(_END_WITHIN_S)


class LeaseKeeper:
    """Writes a lease now and then; whoever may not write goes without."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._holder = secrets.token_hex(16)
        self._written_s = 0.0
        self._key: str | None = None
        self._may_write = True

    @property
    def is_written(self) -> bool:
        """Whether the stream has been told."""
        return self._key is not None

    def renew(self, lineage: str, version: int) -> ThinwireError | None:
        """Write the lease, if it is time to; returns what prevented it."""
        now_s = time.monotonic()
        is_fresh = self._key is not None and now_s - self._written_s < _EVERY_S
        if is_fresh or not self._may_write:
            return None
        key = keys.lease(self._holder, version)
        lease = Lease(FORMAT, self._holder, lineage, version, LEASE_TTL_S)
        # A lease is a courtesy: nothing that is said of one ends a follower.
        try:
            # Where no stream is to be seen the store is away, and nothing is to be made there.
            self._store.get_range(keys.STREAM, 0, 0)
        except ThinwireError as error:
            # Some say of what is missing that nobody may look for it.
            self._may_write = error.retryable or isinstance(error, NotFound | AccessDenied)
            return error
        try:
            self._store.put(key, encode(lease))
        except ThinwireError as error:
            self._may_write = error.retryable or isinstance(error, NotFound)
            return error
        before, self._key, self._written_s = self._key, key, now_s
        if before not in (None, key):
            self._delete(before)
        return None

    def end(self) -> None:
        """Remove the lease, if there is one and that takes no time."""
        key, self._key = self._key, None
        if key is not None:
            end_soon(lambda: self._delete(key))

    def _delete(self, key: str | None) -> None:
        # What stays ends by itself.
        with suppress(ThinwireError):
            self._store.delete([key] if key else [])
