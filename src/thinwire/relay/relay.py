"""One stream behind a relay: what it holds, what it fetches, whom it tells."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import AccessDenied, Unavailable
from thinwire.follow import Stream
from thinwire.relay.blocks import Blocks, BlockShelf
from thinwire.relay.files import LruFolder
from thinwire.relay.needs import Needs, UpstreamLease
from thinwire.relay.records import Records
from thinwire.relay.upstream import Upstream
from thinwire.relay.watch import Watch
from thinwire.relay.workers import Flights, done
from thinwire.store import Entry, Store, StoreWrapper
from thinwire.stream.places import Place, place_of, record_keys

_LOG = logging.getLogger("thinwire")
# Of a cache's limit, what records may take: they are small, and last for good.
_RECORDS_SHARE = 16
# Less would not hold what is being passed on.
MIN_CACHE_BYTES = 16 << 20
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
        self._first_leases: Flights[str, None] = Flights()
        self._listing = threading.Semaphore(_LISTED_PAGES)
        self.upstream.on_stall = self._on_stall
        self.upstream.on_back = self.watch.wake
        self._is_stopped = threading.Event()
        self._is_size_told = False
        self.served_bytes = 0
        self.request_count = 0

    def start(self) -> None:
        """Begin to look for versions."""
        self.records.recall()
        self.watch.start()
        threading.Thread(target=self._tick, name="thinwire-tick", daemon=True).start()

    def stop(self) -> None:
        """End; nothing that hangs is waited for.

        The lease stays as long as somebody needs it, and ends by itself: followers say what they
        need again only after minutes, and the relay may be back long before.
        """
        self._is_stopped.set()
        self.watch.stop()
        ended = threading.Event()

        def end() -> None:
            with suppress(Exception):
                self._lease.end_unneeded()
            ended.set()

        self.upstream.asides.submit(end)
        ended.wait(2.0)
        self.upstream.close()

    def need(self, place: Place, lineage: str) -> Future[None]:
        """A follower needs a version; done once it is known whether the store can be told.

        Raises:
            AccessDenied: The relay may not write leases: the follower should do so itself.
            Unavailable: There are too many followers.
        """
        self._lease.check_may_write()
        self.needs.put(place.holder, lineage, place.version)
        if not self._lease.is_due:
            return done(None)
        if self._lease.is_tried:
            self.watch.wake()
            return done(None)
        flight, is_new = self._first_leases.join("")
        if is_new:
            self.upstream.asides.submit(lambda: self._renew_first(flight))
        return flight

    def check_need(self, place: Place) -> None:
        """Once that is known: whether it can.

        Raises:
            AccessDenied: It cannot.
        """
        try:
            self._lease.check_may_write()
        except AccessDenied:
            self.needs.drop(place.holder, place.version)
            raise

    def _renew_first(self, flight: Future[None]) -> None:
        try:
            self._lease.renew()
        finally:
            self._first_leases.land(flight, None)
            self._first_leases.forget("", flight)

    def is_too_large(self, objects_bytes: int) -> bool:
        """Whether objects that are read together do not fit into the cache."""
        limit_bytes = self.shelf.files.limit_bytes
        if objects_bytes <= limit_bytes:
            return False
        if not self._is_size_told:
            self._is_size_told = True
            _LOG.warning(
                "%s: %d bytes are read together, and the cache takes %d: each follower that joins"
                " costs a download; give a larger --limit-bytes",
                self.name,
                objects_bytes,
                limit_bytes,
            )
        return True

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
            self.upstream.asides.submit(lambda: self._list(prefix, after, flight))
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

    def _on_stall(self, error: Unavailable) -> None:
        self.records.fail_all(error)
        self.blocks.fail_all(error)
        for key, flight in self._listings.take_all():
            self._listings.fail(key, flight, error)

    def _tick(self) -> None:
        while not self._is_stopped.wait(_TICK_S):
            try:
                self.upstream.tick()
            except Exception:
                # Only ticks find out that a store is back.
                _LOG.exception("looking whether %s answers failed", self.upstream.url)


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
