"""A follower tells the stream which version it still needs."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress

from thinwire.errors import StoreError, ThinwireError
from thinwire.store import Store
from thinwire.stream import keys
from thinwire.stream.encoding import encode
from thinwire.stream.records import FORMAT, Lease

TTL_S = 1800
_EVERY_S = 600


class LeaseKeeper:
    """Writes a lease now and then; whoever may not write goes without."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._holder = secrets.token_hex(16)
        self._written_s: float | None = None
        self._may_write = True

    def renew(self, lineage: str, version: int) -> StoreError | None:
        """Write the lease, if it is time to; returns what prevented it."""
        now_s = time.monotonic()
        is_fresh = self._written_s is not None and now_s - self._written_s < _EVERY_S
        if is_fresh or not self._may_write:
            return None
        lease = Lease(FORMAT, self._holder, lineage, version, TTL_S)
        try:
            self._store.put(keys.lease(self._holder), encode(lease))
        except StoreError as error:
            self._may_write = error.retryable
            return error
        self._written_s = now_s
        return None

    def end(self) -> None:
        """Remove the lease, if there is one."""
        if self._written_s is not None:
            with suppress(ThinwireError):
                self._store.delete([keys.lease(self._holder)])
            self._written_s = None
