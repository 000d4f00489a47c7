"""A stream's records as a relay holds them: each read once, proved, and kept."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from thinwire.errors import (
    Corrupt,
    FormatError,
    NotFound,
    StoreError,
    StreamError,
    ThinwireError,
    Unavailable,
)
from thinwire.follow.proving import limit_of, prove
from thinwire.relay.files import LruFolder
from thinwire.relay.upstream import Upstream
from thinwire.relay.workers import Flights, done
from thinwire.store.clock import Clock, SystemClock
from thinwire.stream import keys
from thinwire.stream.blocks import ObjectRecord, digest_of
from thinwire.stream.encoding import MAX_SMALL_BYTES
from thinwire.stream.places import HINTS, REMADE, Place, objects_of, place_of
from thinwire.stream.records import Anchor, Head, Manifest, Merge, StreamRecord

# How long an answer is good for those who ask after it was read.
HINT_FRESH_S = 0.5
ABSENT_FRESH_S = 0.2
# A maintainer may have made it again.
REMADE_FRESH_S = 60.0
MAX_MEMORY_BYTES = 32 << 20
_MAX_ENTRIES = 100_000
# Keys that nothing lies at; whoever asks for many of those pushes out no record.
_MAX_ABSENT = 10_000
# Lineages that no record names: so many keys of such are asked for in a second.
_UNKNOWN_PER_S = 20
# Versions that were there, and are looked for on the disk when they have gone.
_MOST_FORGOTTEN = 100_000
_ENTRY_BYTES = 512
_DIGEST_LETTERS = 64
_NOTHING: Mapping[str, ObjectRecord] = {}
_IDENTITY = Place("stream", keys.STREAM)


class Held(NamedTuple):
    """A record.

    Attributes:
        data: Its bytes; None: there was none.
        read_s: When it was read, by the clock.
        objects: The objects it names, by key.
        objects_bytes: What they have together.
        age_s: How old it is, where the store could not be asked; None: it is as the store has it.
    """

    data: bytes | None
    read_s: float
    objects: Mapping[str, ObjectRecord] = _NOTHING
    objects_bytes: int = 0
    age_s: float | None = None


class Records:
    """Records of one stream by their place.

    Args:
        upstream: The store.
        files: Where they are kept across restarts.
        trusted_keys: The pinned keys; empty: unsigned records are taken too.
        clock: Tells the time.

    Attributes:
        newest: The newest version seen of each lineage.
    """

    def __init__(
        self,
        upstream: Upstream,
        files: LruFolder,
        trusted_keys: Collection[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self._upstream = upstream
        self._files = files
        self._trusted_keys = frozenset(trusted_keys)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._held_bytes = 0
        self._absent: OrderedDict[str, Held] = OrderedDict()
        self._unknown_s: deque[float] = deque(maxlen=_UNKNOWN_PER_S)
        self._flights: Flights[str, Held] = Flights()
        self._stream = ""
        self.newest: dict[str, int] = {}

    def find(self, place: Place) -> Future[Held]:
        """What lies at a place: at once where that is known, else when it was read.

        The result raises:
            NotFound: Nothing.
            FormatError, SignatureInvalid: Something that cannot be proved.
            Unavailable: The store is away, and it is not held here.
        """
        with self._lock:
            held = self._absent.get(place.key) or self._held.get(place.key)
            if held is not None and held.data is not None:
                self._held.move_to_end(place.key)
        if held is not None and self._is_fresh(place, held):
            return done(held)
        flight, is_new = self._flights.join(place.key)
        if is_new:
            self._upstream.record_workers.submit(lambda: self._fly(place, flight))
        return flight

    def read(self, place: Place, timeout_s: float = 120.0) -> bytes:
        """As :meth:`find`, for a thread that may wait; not one of the workers.

        Raises:
            NotFound: There is nothing.
            ThinwireError: As :meth:`find`.
        """
        held = self.find(place).result(timeout_s)
        if held.data is None:
            raise self.missing(place, held)
        return held.data

    def age_of(self, held: Held) -> float:
        """How long ago a record was read."""
        return self._clock.now() - held.read_s

    def missing(self, place: Place, held: Held) -> NotFound:
        """The error for a record that is not there."""
        return NotFound(
            f"cannot read {place.key} in {self._upstream.url}: there is no such object",
            hint="Check the URL and the key",
            key=place.key,
            age_s=held.age_s,
        )

    def forget(self, place: Place) -> None:
        """Have it read again: what it names has gone."""
        with self._lock:
            self._pop(place.key)
        self._files.drop(self._name(place))

    def look_again(self) -> None:
        """Let nothing count as missing any more: there is news."""
        with self._lock:
            self._absent.clear()

    def is_gone(self, place: Place, timeout_s: float) -> bool:
        """Whether the store says that what is held of a place is not there any more.

        For a thread that may wait; not one of the workers.

        Raises:
            TimeoutError, ThinwireError: It says nothing of use.
        """
        flight: Future[bool] = Future()

        def look() -> None:
            try:
                self._fetch(place)
            except NotFound:
                flight.set_result(True)
            except Exception as error:
                flight.set_exception(error)
            else:
                flight.set_result(False)

        self._upstream.record_workers.submit(look)
        return flight.result(timeout_s)

    def forget_lineage(self, lineage: str) -> None:
        """Have all versions of a lineage read again: some have gone."""
        newest = self.newest.pop(lineage, 0)
        for version in range(newest, max(0, newest - _MOST_FORGOTTEN), -1):
            key = keys.manifest(lineage, version)
            self.forget(Place("manifest", key, lineage, version=version))

    def fail_all(self, error: ThinwireError) -> None:
        """The store went away: answer those who wait with what is held."""
        for key, flight in self._flights.take_all():
            place = place_of(key)
            held = None if place is None else self.held_back(place)
            if held is None:
                self._flights.fail(key, flight, error)
            else:
                self._flights.land(flight, held)

    def recall(self) -> None:
        """Find the newest version that an earlier run held, for when the store is away."""
        place = Place("head", keys.HEAD)
        held = self._kept(place)
        if held is None or held.data is None:
            return
        head: Head = prove(place, held.data, (), url=self._upstream.url)
        version = head.version
        while keys.is_lineage(head.lineage) and 0 < version <= keys.MAX_VERSION:
            if self._kept(Place("manifest", keys.manifest(head.lineage, version), head.lineage,
                                version=version)) is None:  # fmt: skip
                break
            version += 1

    def held_back(self, place: Place) -> Held | None:
        """What is held of a place while the store is away; None: it cannot be told."""
        with self._lock:
            held = self._absent.get(place.key) or self._held.get(place.key)
        if held is None or (held.data is None and place.kind in HINTS):
            held = self._kept(place) or held
        if held is not None:
            return held._replace(age_s=max(0.0, self.age_of(held)))
        # Later versions, and shorter ways to them, are not there as long as nobody can tell.
        newest = self.newest.get(place.lineage, 0)
        is_later = place.kind == "manifest" and 0 < newest < place.version
        if is_later or place.kind in REMADE or place.kind == "catalog":
            return Held(None, self._clock.now(), age_s=self._upstream.away_s or 0.0)
        return None

    def _is_fresh(self, place: Place, held: Held) -> bool:
        age_s = self.age_of(held)
        is_passing = held.data is None or place.kind in HINTS
        if is_passing and self._upstream.away_s is not None:
            # Whoever asks is to know that it may be old.
            return False
        if held.data is None:
            return age_s < ABSENT_FRESH_S
        if place.kind in HINTS:
            return age_s < HINT_FRESH_S
        return place.kind not in REMADE or age_s < REMADE_FRESH_S

    def _fly(self, place: Place, flight: Future[Held]) -> None:
        try:
            held = self._load(place)
        except Exception as error:
            self._flights.fail(place.key, flight, error)
            return
        self._flights.land(flight, held)
        self._flights.forget(place.key, flight)

    def _load(self, place: Place) -> Held:
        if place.kind not in HINTS:
            kept = self._kept(place)
            if kept is not None and self._is_fresh(place, kept):
                return kept
        try:
            self._check_known(place)
            return self._fetch(place)
        except NotFound:
            return self._keep(place, Held(None, self._clock.now()))
        except (FormatError, StreamError):
            if place.kind in ("head", "catalog"):
                # A hint of no use is none.
                return self._keep(place, Held(None, self._clock.now()))
            raise
        except StoreError:
            held = self.held_back(place)
            if held is None or (held.data is None and self._upstream.away_s is None):
                raise
            return held

    def _check_known(self, place: Place) -> None:
        """Let nobody send the relay after any number of lineages that do not exist.

        Raises:
            Unavailable: Too many were asked for in this second.
        """
        if not place.lineage or place.lineage in self.newest:
            return
        with self._lock:
            now_s = self._clock.now()
            is_full = len(self._unknown_s) == _UNKNOWN_PER_S
            if is_full and now_s - self._unknown_s[0] < 1.0:
                raise Unavailable(
                    "too many lineages that nothing names were asked for just now",
                    hint="Try again in a moment",
                )
            self._unknown_s.append(now_s)

    def _fetch(self, place: Place) -> Held:
        def get() -> bytes:
            return self._upstream.call(
                lambda store: store.get(place.key, limit_bytes=limit_of(place)),
                is_small=limit_of(place) <= MAX_SMALL_BYTES,
            )

        data = get()
        try:
            record = self._prove(place, data)
        except FormatError:
            # It came in parts, or another stream has taken this one's place.
            if place != _IDENTITY:
                self._load(_IDENTITY)
            data = get()
            record = self._prove(place, data)
        held = self._keep(place, self._made(record, data, self._clock.now()))
        self._files.put(self._name(place), digest_of(data).encode() + data)
        return held

    def _kept(self, place: Place) -> Held | None:
        """What an earlier run has left of a place, proved again."""
        name = self._name(place)
        found = self._files.get(name)
        if found is None:
            return None
        data = found.data[_DIGEST_LETTERS:]
        try:
            if digest_of(data).encode() != found.data[:_DIGEST_LETTERS]:
                raise Corrupt(f"{name} was changed")
            record = self._prove(place, data, is_held=True)
        except (FormatError, StreamError):
            self._files.drop(name)
            return None
        except ThinwireError:
            # It cannot be proved now: nobody knows what stream it must be of.
            return None
        age_s = max(0.0, time.time() - found.written_s)
        return self._keep(place, self._made(record, data, self._clock.now() - age_s))

    def _prove(self, place: Place, data: bytes, *, is_held: bool = False) -> Any:
        if (
            place.kind not in ("stream", "head")
            and not self._stream
            and not (is_held and self._kept(_IDENTITY) is not None)
        ):
            self._load(_IDENTITY)
        # Another stream may take this one's place, if it proves itself.
        stream = "" if place.kind == "stream" else self._stream
        record = prove(place, data, self._trusted_keys, url=self._upstream.url, stream=stream)
        if isinstance(record, StreamRecord):
            self._stream = record.stream
        if isinstance(record, StreamRecord | Head) and keys.is_lineage(record.lineage):
            # Whatever others ask for, this one is never refused.
            self.newest.setdefault(record.lineage, 0)
        if isinstance(record, Manifest):
            newest = self.newest.get(record.lineage, 0)
            self.newest[record.lineage] = max(newest, record.version)
        return record

    @staticmethod
    def _made(record: Any, data: bytes, read_s: float) -> Held:
        names = isinstance(record, Manifest | Merge | Anchor)
        objects = objects_of(record) if names else _NOTHING
        return Held(data, read_s, objects, sum(found.size for found in objects.values()))

    def _keep(self, place: Place, held: Held) -> Held:
        with self._lock:
            self._pop(place.key)
            if held.data is None:
                self._absent[place.key] = held
                if len(self._absent) > _MAX_ABSENT:
                    self._absent.popitem(last=False)
                return held
            self._held[place.key] = held
            self._held_bytes += _bytes_of(held)
            while len(self._held) > 1 and (
                self._held_bytes > MAX_MEMORY_BYTES or len(self._held) > _MAX_ENTRIES
            ):
                self._pop(next(iter(self._held)))
        return held

    def _pop(self, key: str) -> None:
        self._absent.pop(key, None)
        held = self._held.pop(key, None)
        if held is not None:
            self._held_bytes -= _bytes_of(held)

    def _name(self, place: Place) -> str:
        return digest_of(f"{self._upstream.url}\n{place.key}".encode())


def _bytes_of(held: Held) -> int:
    # The parsed digests take about twice what the record does.
    return _ENTRY_BYTES + 3 * len(held.data or b"")
