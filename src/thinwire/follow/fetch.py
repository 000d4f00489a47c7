"""Objects from the store, block by block: in parallel, verified, in bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from thinwire.checkpoint.disk import create, os_errors
from thinwire.codec.threads import map_in_order
from thinwire.errors import ChecksumMismatch, InvalidArgument
from thinwire.follow.cache import BlockCache
from thinwire.follow.relayed import RelayedStore
from thinwire.store import Store
from thinwire.stream.blocks import ObjectRecord, check_block

DEFAULT_MEMORY_BYTES = 256 << 20
MIN_MEMORY_BYTES = 16 << 20
# Neighbouring blocks are asked for together up to this size: enough to hide a round trip.
_RANGE_BYTES = 8 << 20
_PARALLEL = 16


class Wanted(NamedTuple):
    """An object to fetch: where it lies, what it must be, its name for messages."""

    key: str
    record: ObjectRecord
    what: str


class Fetcher:
    """Fetches objects of one store. Safe to use from several threads.

    Args:
        store: The store.
        cache: Where blocks are looked for first, and kept.
        memory_limit_bytes: What fetching may hold in memory.
        on_bytes: Called with the size of whatever arrived, from any of its threads.

    Attributes:
        fetched_bytes: What crossed the network so far.
        cached_bytes: What the cache had.
    """

    def __init__(
        self,
        store: Store,
        *,
        cache: BlockCache | None = None,
        memory_limit_bytes: int = DEFAULT_MEMORY_BYTES,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        if memory_limit_bytes < MIN_MEMORY_BYTES:
            raise InvalidArgument(
                f"memory_limit_bytes is {memory_limit_bytes}",
                hint=f"Choose {MIN_MEMORY_BYTES} or more",
            )
        self._store = store
        self._cache = cache
        self._memory_bytes = memory_limit_bytes
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self.fetched_bytes = 0
        self.cached_bytes = 0

    def fork(self, on_bytes: Callable[[int], None] | None = None) -> Fetcher:
        """Another one with counts of its own, for one thing to fetch."""
        return Fetcher(
            self._store,
            cache=self._cache,
            memory_limit_bytes=self._memory_bytes,
            on_bytes=on_bytes,
        )

    def is_small(self, record: ObjectRecord) -> bool:
        """Whether an object may be held in memory whole."""
        return record.size <= min(_RANGE_BYTES, self._memory_bytes // 4)

    def bytes_of(self, wanted: Wanted) -> bytes:
        """A small object, whole, in one request."""
        assert self.is_small(wanted.record)
        count = len(wanted.record.blocks)
        return b"".join(data for _, data in self._blocks(wanted, [range(count)]))

    def into_file(
        self,
        wanted: Wanted,
        path: Path,
        numbers: Iterable[int] | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Write an object, or just some of its blocks, to ``path``, where it may be a new file.

        With some blocks only, the file has its full size and holes in between.

        Raises:
            ChecksumMismatch: A block is not what the record says.
            NotFound, StoreError: It cannot be fetched or written.
        """
        record = wanted.record
        chosen = range(len(record.blocks)) if numbers is None else sorted(set(numbers))
        ranges = list(self._ranges(record, chosen))
        with os_errors("cannot write", path):
            exists = path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if exists else create(path)
        try:
            with os_errors("cannot write", path):
                os.truncate(descriptor, record.size)
                for start, data in self._blocks(wanted, ranges):
                    _write_at(descriptor, data, start)
                    if on_bytes:
                        on_bytes(len(data))
        finally:
            os.close(descriptor)

    def _ranges(self, record: ObjectRecord, numbers: Iterable[int]) -> Iterator[range]:
        """Blocks that follow each other, together up to the size of a range."""
        most = max(1, _RANGE_BYTES // record.block)
        first = last = -1
        for number in numbers:
            if first < 0:
                first = number
            elif number != last + 1 or number - first >= most:
                yield range(first, last + 1)
                first = number
            last = number
        if first >= 0:
            yield range(first, last + 1)

    def _blocks(self, wanted: Wanted, ranges: list[range]) -> Iterator[tuple[int, bytes]]:
        """The verified data of each range with its place in the object, in order."""
        largest = max([1, *(self._size(wanted.record, r) for r in ranges)])
        # A range is held about twice: as the client received it and as bytes. And map_in_order
        # lets results wait: twice as many as there are workers.
        workers = max(1, min(_PARALLEL, len(ranges), self._memory_bytes // (8 * largest)))
        guard = self._cache.fetching(wanted.record.blocks[0]) if self._cache else nullcontext()
        with guard:
            yield from map_in_order(lambda r: self._range(wanted, r), ranges, workers)

    def _range(self, wanted: Wanted, numbers: range) -> tuple[int, bytes]:
        record = wanted.record
        start, stop = record.span(numbers[0])[0], record.span(numbers[-1])[1]
        if cached := self._cached(record, numbers):
            with self._lock:
                self.cached_bytes += stop - start
            self._tell(stop - start)
            return start, cached
        try:
            data = self._fetched(self._store, wanted, numbers)
        except ChecksumMismatch:
            if not isinstance(self._store, RelayedStore) or not self._store.distrust(wanted.key):
                raise
            data = self._fetched(self._store.upstream, wanted, numbers)
        else:
            if isinstance(self._store, RelayedStore):
                self._store.believe()
        self._tell(stop - start)
        return start, data

    def _fetched(self, store: Store, wanted: Wanted, numbers: range) -> bytes:
        """Neighbouring blocks, verified and kept in the cache."""
        record = wanted.record
        start, stop = record.span(numbers[0])[0], record.span(numbers[-1])[1]
        data = self._get(store, wanted, start, stop)
        with self._lock:
            self.fetched_bytes += stop - start
        view = memoryview(data)
        for number in numbers:
            low, high = record.span(number)
            block = view[low - start : high - start]
            check_block(record, number, block, wanted.what)
            if self._cache:
                self._cache.put(record.blocks[number], block)
        return data

    def _tell(self, byte_count: int) -> None:
        if self._on_bytes is not None:
            self._on_bytes(byte_count)

    @staticmethod
    def _get(store: Store, wanted: Wanted, start: int, stop: int) -> bytes:
        whole = start == 0 and stop == wanted.record.size
        if not whole:
            return store.get_range(wanted.key, start, stop)
        data = store.get(wanted.key, limit_bytes=stop)
        if len(data) != stop:
            raise ChecksumMismatch(
                f"{wanted.what} has {len(data)} bytes where the manifest says {stop}",
                hint="Someone or something changed the object; `thinwire fsck` shows what else",
            )
        return data

    def _cached(self, record: ObjectRecord, numbers: range) -> bytes | None:
        if self._cache is None:
            return None
        found = []
        for number in numbers:
            start, stop = record.span(number)
            data = self._cache.get(record.blocks[number], stop - start)
            if data is None:
                return None
            found.append(data)
        return b"".join(found)

    @staticmethod
    def _size(record: ObjectRecord, numbers: range) -> int:
        return record.span(numbers[-1])[1] - record.span(numbers[0])[0]


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, start)
        left, start = left[written:], start + written


def in_parallel(actions: list[Callable[[], None]], workers: int) -> None:
    """Run all; the first error in order is raised once all have ended."""
    if len(actions) == 1:
        actions[0]()
        return
    with ThreadPoolExecutor(max(1, workers)) as pool:
        futures = [pool.submit(action) for action in actions]
    for future in futures:
        future.result()
