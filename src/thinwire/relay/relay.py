"""One stream behind a relay: what it holds, what it fetches, whom it tells."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import Unavailable
from thinwire.follow import Stream
from thinwire.relay.blocks import Blocks, BlockShelf
from thinwire.relay.files import LruFolder
from thinwire.relay.needs import Needs, UpstreamLease
from thinwire.relay.records import Held, Records
from thinwire.relay.upstream import Upstream
from thinwire.relay.watch import Watch
from thinwire.relay.workers import Flights
from thinwire.store import Entry, Store, StoreWrapper
from thinwire.stream.blocks import ObjectRecord
from thinwire.stream.places import Place, place_of, record_keys

# Of a cache's limit, what records may take: they are small, and last for good.
_RECORDS_SHARE = 16
MIN_CACHE_BYTES = 8 << 20
PAGE = 1_000
_LISTED_PAGES = 2
# Looks for stalls, and whether the store is back.
_TICK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where a relay keeps what it has fetched; all its streams share them."""

    records: LruFolder
    shelf: BlockShelf

    @classmethod
    def at(cls, folder: Path, limit_bytes: int) -> Folders:
        """Open them.

        Raises:
            StoreError: They cannot be made or read.
        """
        limit_bytes = max(limit_bytes, MIN_CACHE_BYTES)
        records_bytes = limit_bytes // _RECORDS_SHARE
        return cls(
            records=LruFolder(folder / "records", records_bytes),
            shelf=BlockShelf(LruFolder(folder / "blocks", limit_bytes - records_bytes)),
        )


class StreamRelay:
    """What a relay does for one stream.

    Args:
        name: What the stream is called here.
        store: Its store, without retries.
        folders: Where things are kept.
        trusted_keys: The pinned keys; empty: unsigned streams are passed on too.
        poll_s: The shortest time between two looks for a new version.
        fetches: Whether what leads to a new version is fetched before anybody asks.

    Attributes:
        served_bytes: What went out to followers.
        request_count: Requests of followers.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        folders: Folders,
        *,
        trusted_keys: Collection[str] = (),
        poll_s: float = 1.0,
        fetches: bool = True,
    ) -> None:
        self.name = name
        self.upstream = Upstream(store)
        self.shelf = folders.shelf
        self.records = Records(self.upstream, folders.records, trusted_keys)
        self.blocks = Blocks(self.upstream, folders.shelf)
        self.needs = Needs()
        self._lease = UpstreamLease(store, self.needs)
        self.watch = Watch(
            self.upstream,
            self.records,
            self.blocks,
            self._lease,
            Stream(_HeldStore(store, self.records, self.upstream), trusted_keys=trusted_keys),
            poll_s=poll_s,
            fetches=fetches,
            largest_bytes=folders.shelf.files.limit_bytes,
        )
        self._listings: Flights[tuple[str, str], list[Entry]] = Flights()
        self._listing = threading.Semaphore(_LISTED_PAGES)
        self.upstream.on_away = self._on_away
        self.upstream.on_back = self.watch.wake
        self._is_stopped = threading.Event()
        self.served_bytes = 0
        self.request_count = 0

    def start(self) -> None:
        """Begin to look for versions."""
        self.records.recall()
        self.watch.start()
        threading.Thread(target=self._tick, name="thinwire-tick", daemon=True).start()

    def stop(self) -> None:
        """End, and the lease with it; nothing that hangs is waited for."""
        self._is_stopped.set()
        self.watch.stop()
        ended = threading.Event()

        def end() -> None:
            with suppress(Exception):
                self._lease.end()
            ended.set()

        self.upstream.workers.submit(end)
        ended.wait(2.0)
        self.upstream.workers.close()

    def need(self, place: Place, lineage: str) -> None:
        """A follower needs a version.

        Raises:
            Unavailable: There are too many followers.
        """
        self.needs.put(place.holder, lineage, place.version)
        if self._lease.is_due:
            self.watch.wake()

    def named_by(self, place: Place) -> list[Place]:
        """The places of the records of which one names an object."""
        return [found for key in record_keys(place) if (found := place_of(key)) is not None]

    def list_page(self, prefix: str, after: str) -> Future[list[Entry]]:
        """One page of what a listing of the store shows of the stream.

        The result raises:
            Unavailable: The store is away.
        """
        flight, is_new = self._listings.join((prefix, after))
        if is_new:
            if not self._listing.acquire(blocking=False):
                busy = Unavailable("too many listings are under way", hint="Try again in a moment")
                self._listings.fail((prefix, after), flight, busy)
                return flight
            self.upstream.workers.submit(lambda: self._list(prefix, after, flight))
        return flight

    def _list(self, prefix: str, after: str, flight: Future[list[Entry]]) -> None:
        try:
            found = self.upstream.call(lambda store: _first_page(store, prefix, after))
        except Exception as error:
            self._listings.fail((prefix, after), flight, error)
        else:
            self._listings.land(flight, found)
            self._listings.forget((prefix, after), flight)
        finally:
            self._listing.release()

    def _on_away(self, error: Unavailable) -> None:
        self.records.fail_all(error)
        self.blocks.fail_all(error)
        for key, flight in self._listings.take_all():
            self._listings.fail(key, flight, error)

    def _tick(self) -> None:
        while not self._is_stopped.wait(_TICK_S):
            self.upstream.tick()


class _HeldStore(StoreWrapper):
    """What is held of a stream's records, as a store, for who reads the stream in the relay."""

    def __init__(self, store: Store, records: Records, upstream: Upstream) -> None:
        super().__init__(store)
        self._records = records
        self._upstream = upstream

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``; of records."""
        place = place_of(key)
        assert place is not None
        return self._records.read(place)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``."""
        yield from self._upstream.call(lambda store: [*store.list(prefix, after=after)])


def object_in(held: Held, key: str) -> ObjectRecord | None:
    """The object that a record names by a key."""
    return None if held.data is None else held.objects.get(key)


def _first_page(store: Store, prefix: str, after: str) -> list[Entry]:
    page: list[Entry] = []
    for entry in store.list(prefix, after=after):
        place = place_of(entry.key)
        # Who holds a lease, and what else lies in the bucket, is nobody's business here.
        if place is not None and place.kind != "lease":
            page.append(entry)
            if len(page) > PAGE:
                break
    return page
