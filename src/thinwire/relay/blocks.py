"""The blocks of objects: each fetched once, proved, and kept in memory and on disk."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import NamedTuple

from thinwire.errors import ChecksumMismatch, ThinwireError
from thinwire.relay.files import LruFolder
from thinwire.relay.upstream import Upstream
from thinwire.relay.workers import Flights, Workers, done, failed
from thinwire.store.clock import Clock, SystemClock
from thinwire.stream.blocks import ObjectRecord, check_block, digest_of

_LOG = logging.getLogger("thinwire")
# Asked for at once: what arrives is passed on in no larger pieces.
SPAN_BYTES = 2 << 20
MEMORY_BYTES = 64 << 20
_DISK_THREADS = 2
# Where so much waits already, nothing is fetched that nobody waits for yet.
_MOST_WAITING = 32
# A block that was wrong is not fetched again at once.
_WRONG_S = 5.0
_MAX_WRONG = 1_000


class Block(NamedTuple):
    """One block of an object at a key.

    Attributes:
        is_passing: It belongs to more than can be kept: it must not push out what others use.
    """

    key: str
    record: ObjectRecord
    number: int
    is_passing: bool = False

    @property
    def digest(self) -> str:
        """What names it, wherever it lies."""
        return self.record.blocks[self.number]

    @property
    def way(self) -> tuple[str, str]:
        """From where it is fetched, and what it must be."""
        return self.key, self.digest

    @property
    def size_bytes(self) -> int:
        """Its size."""
        start, stop = self.record.span(self.number)
        return stop - start


class BlockShelf:
    """Where blocks of all streams are kept: on disk, and those used last in memory.

    Args:
        files: The folder.
        memory_bytes: What may be kept in memory.
    """

    def __init__(self, files: LruFolder, memory_bytes: int = MEMORY_BYTES) -> None:
        self.files = files
        self.workers = Workers("thinwire-disk", _DISK_THREADS)
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._used_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._memory or digest in self.files

    def quick(self, digest: str) -> bytes | None:
        """A block that is in memory."""
        with self._lock:
            data = self._memory.get(digest)
            if data is not None:
                self._memory.move_to_end(digest)
            return data

    def read(self, block: Block) -> bytes | None:
        """A block that is on disk, if it is still what it was."""
        found = self.files.get(block.digest)
        if found is None:
            return None
        if len(found.data) != block.size_bytes or digest_of(found.data) != block.digest:
            _LOG.warning("a file of the cache was changed, and is fetched again: %s", block.digest)
            self.files.drop(block.digest)
            return None
        self._remember(block.digest, found.data)
        return found.data

    def keep(self, block: Block, data: bytes) -> None:
        """Keep a verified block."""
        self._remember(block.digest, data)
        self.files.put(block.digest, data, is_passing=block.is_passing)

    def _remember(self, digest: str, data: bytes) -> None:
        with self._lock:
            if digest in self._memory or len(data) > self._memory_bytes:
                return
            self._memory[digest] = data
            self._used_bytes += len(data)
            while self._used_bytes > self._memory_bytes:
                self._used_bytes -= len(self._memory.popitem(last=False)[1])


class Blocks:
    """Blocks of one stream's objects.

    Args:
        upstream: The store.
        shelf: Where they are kept.
        clock: Tells the time.

    Attributes:
        asked_bytes: What readers asked for.
        fetched_bytes: What had to be fetched for them, or was fetched ahead.
        wrong_count: Blocks that were not what they must be.
    """

    def __init__(self, upstream: Upstream, shelf: BlockShelf, clock: Clock | None = None) -> None:
        self._upstream = upstream
        self._shelf = shelf
        self._clock = clock or SystemClock()
        self._flights: Flights[tuple[str, str], bytes] = Flights()
        self._wrong: OrderedDict[tuple[str, str], tuple[float, ChecksumMismatch]] = OrderedDict()
        self._lock = threading.Lock()
        self.asked_bytes = self.fetched_bytes = self.wrong_count = 0

    def want(self, block: Block, stop: int) -> Future[bytes]:
        """A block, proved: at once where it is in memory, else when it was read or fetched.

        Args:
            block: Which.
            stop: Blocks of the same object before this one may be fetched along with it.

        Raises (the result):
            ChecksumMismatch: The store has something else.
            NotFound, Unavailable, StoreError: It cannot be fetched.
        """
        self.asked_bytes += block.size_bytes
        data = self._shelf.quick(block.digest)
        if data is not None:
            return done(data)
        error = self._known_wrong(block)
        if error is not None:
            return failed(error)
        flight, is_new = self._flights.join(block.way)
        if not is_new:
            return flight
        if block.digest in self._shelf.files:
            self._shelf.workers.submit(lambda: self._read(block, flight))
        else:
            self._start(block, flight, stop)
        return flight

    def hasten(self, block: Block, stop: int) -> Future[bytes] | None:
        """Have a block fetched that will be wanted; None: it is held, or others come first."""
        if block.digest in self._shelf or self._known_wrong(block) is not None:
            return None
        if self._upstream.workers.backlog > _MOST_WAITING:
            return None
        flight, is_new = self._flights.join(block.way)
        if is_new:
            self._start(block, flight, stop)
        return flight

    def known_wrong(
        self, key: str, record: ObjectRecord, numbers: range
    ) -> ChecksumMismatch | None:
        """What is known to be wrong with some blocks of an object."""
        if not self._wrong:
            return None
        for number in numbers:
            error = self._known_wrong(Block(key, record, number))
            if error is not None:
                return error
        return None

    def fail_all(self, error: ThinwireError) -> None:
        """The store went away: nobody is to wait for what is under way."""
        for way, flight in self._flights.take_all():
            self._flights.fail(way, flight, error)

    def _start(self, first: Block, flight: Future[bytes], stop: int) -> None:
        """Fetch a block that is missing, and the missing ones that follow it."""
        span = [(first, flight)]
        size_bytes = first.size_bytes
        for number in range(first.number + 1, stop):
            block = first._replace(number=number)
            size_bytes += block.size_bytes
            if size_bytes > SPAN_BYTES or block.digest in self._shelf:
                break
            following, is_new = self._flights.join(block.way)
            if not is_new:
                break
            span.append((block, following))
        with self._lock:
            self.fetched_bytes += sum(block.size_bytes for block, _ in span)
        self._upstream.workers.submit(lambda: self._fetch(span))

    def _read(self, block: Block, flight: Future[bytes]) -> None:
        """From the disk, or else from the store."""
        try:
            data = self._shelf.read(block)
        except Exception as error:
            # Whatever it was, somebody waits.
            self._flights.fail(block.way, flight, error)
            raise
        if data is None:
            self._start(block, flight, block.number + 1)
            return
        self._flights.land(flight, data)
        self._flights.forget(block.way, flight)

    def _fetch(self, span: list[tuple[Block, Future[bytes]]]) -> None:
        first, last = span[0][0], span[-1][0]
        start, stop = first.record.span(first.number)[0], last.record.span(last.number)[1]
        try:
            with self._upstream.taking(stop - start):
                data = self._upstream.call(lambda s: s.get_range(first.key, start, stop))
                self._take(span, start, data)
        except Exception as error:
            for block, flight in span:
                self._flights.fail(block.way, flight, error)

    def _take(self, span: list[tuple[Block, Future[bytes]]], start: int, data: bytes) -> None:
        view = memoryview(data)
        for block, flight in span:
            low, high = block.record.span(block.number)
            piece = bytes(view[low - start : high - start])
            try:
                what = f"{self._upstream.url}/{block.key}"
                check_block(block.record, block.number, piece, what)
            except ChecksumMismatch as error:
                self._note_wrong(block, error)
                self._flights.fail(block.way, flight, error)
                continue
            # Those who wait get it before the disk does.
            self._flights.land(flight, piece)
            self._shelf.keep(block, piece)
            self._flights.forget(block.way, flight)

    def _known_wrong(self, block: Block) -> ChecksumMismatch | None:
        found = self._wrong.get(block.way)
        if found is None or self._clock.now() - found[0] > _WRONG_S:
            return None
        return found[1]

    def _note_wrong(self, block: Block, error: ChecksumMismatch) -> None:
        _LOG.warning("%s", error.message)
        with self._lock:
            self.wrong_count += 1
            self._wrong[block.way] = (self._clock.now(), error)
            if len(self._wrong) > _MAX_WRONG:
                self._wrong.popitem(last=False)
