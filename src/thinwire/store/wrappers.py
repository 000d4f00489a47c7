"""Stores around a store: retries, counting, and create for stores that cannot."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from thinwire.errors import AlreadyExists, NotFound, StoreError
from thinwire.store.clock import Clock, SystemClock
from thinwire.store.outage import Outage
from thinwire.store.store import Entry, Store

T = TypeVar("T")

# A wait ends so soon once it is to end.
_NOTICE_S = 0.5

# A listing is answered in pages of so many entries, a bulk delete in requests of so many keys.
PAGE = 1_000


class StoreWrapper:
    """Does nothing but pass on; wrappers override what they change."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The wrapped store's address."""
        return self._store.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def end_waits(self) -> None:
        """Have calls that are being tried again fail now. From any thread, or a signal handler."""
        end_waits(self._store)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        return self._store.get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        return self._store.get_range(key, start, stop)

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        self._store.put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``."""
        self._store.put_file(key, path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``."""
        self._store.put_if_absent(key, data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``."""
        return self._store.list(prefix, after=after)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        self._store.delete(keys)


def end_waits(store: Store) -> None:
    """Have calls to a store that are being tried again fail now: whoever made them is to stop."""
    if isinstance(store, StoreWrapper):
        store.end_waits()


class RetryingStore(StoreWrapper):
    """Tries again what failed with a retryable error.

    Waits are random between zero and a bound that doubles (full jitter), so that many followers do
    not come back at once. ``deadline_s`` counts from a call's first failure: an attempt that hung
    until its own timeout still gets another one.

    A write whose answer was lost is made again. So ``put_if_absent`` may answer ``AlreadyExists``
    although its own first attempt created the object: the caller compares the bytes.

    What lasts is one outage, however many calls fail in it.

    Args:
        store: The store.
        deadline_s: As said.
        first_wait_s: The bound of the first wait.
        longest_wait_s: The longest bound.
        clock: Tells the time.
        randomness: Chooses the waits.
        stand_in: Who answers in the store's place just now; empty: nobody.
    """

    def __init__(
        self,
        store: Store,
        deadline_s: float = 60.0,
        *,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 10.0,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        stand_in: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(store)
        self._deadline_s = deadline_s
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._clock = clock or SystemClock()
        self._random = randomness or random.Random()
        self._stand_in = stand_in
        self._outage = Outage(store.url, self._clock)
        self._ended_s = -math.inf

    def end_waits(self) -> None:
        """See ``StoreWrapper.end_waits``; calls that begin later are tried again as ever."""
        self._ended_s = self._clock.now()
        super().end_waits()

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        return self._retrying(lambda: self._store.get(key, limit_bytes=limit_bytes))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        return self._retrying(lambda: self._store.get_range(key, start, stop))

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        self._retrying(lambda: self._store.put(key, data))

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``."""
        self._retrying(lambda: self._store.put_file(key, path))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent`` and the class."""
        self._retrying(lambda: self._store.put_if_absent(key, data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``; after a failure it goes on behind the last entry given out."""
        pause = self._pause()
        while True:
            try:
                for entry in self._store.list(prefix, after=after):
                    after = entry.key
                    yield entry
            except StoreError as error:
                pause(error)
            else:
                self._outage.note_answer(self._stand_in())
                return

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        all_keys = list(keys)
        self._retrying(lambda: self._store.delete(all_keys))

    def _retrying(self, call: Callable[[], T]) -> T:
        pause = self._pause()
        while True:
            try:
                found = call()
            except StoreError as error:
                pause(error)
            else:
                self._outage.note_answer(self._stand_in())
                return found

    def _pause(self) -> Callable[[StoreError], None]:
        """What to call, once per failure of one operation: it waits, or raises the failure."""
        tries = 0
        give_up_s = 0.0
        begun_s = self._clock.now()

        def pause(error: StoreError) -> None:
            nonlocal tries, give_up_s
            now_s = self._clock.now()
            if tries == 0:
                give_up_s = now_s + self._deadline_s
            bound_s = min(self._longest_wait_s, self._first_wait_s * 2.0 ** min(tries, 40))
            tries += 1
            until_s = now_s + self._random.uniform(0, bound_s)
            error.context["tries"] = tries
            if not error.retryable:
                self._outage.note_answer(self._stand_in())
                raise error
            if until_s > give_up_s or self._ended_s > begun_s:
                raise error
            # Whoever waits for the store must see that it is the store.
            self._outage.note_failure(error, give_up_s - now_s)
            while now_s < until_s:
                self._clock.sleep_until(min(until_s, now_s + _NOTICE_S))
                if self._ended_s > begun_s:
                    raise error
                now_s = self._clock.now()

        return pause


@dataclass(frozen=True)
class Counts:
    """What went through a store: calls by method name (a listing counts its pages), and bytes."""

    requests: dict[str, int] = field(default_factory=dict)
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0


class CountingStore(StoreWrapper):
    """Counts requests, also failed ones, and the bytes of those that succeeded."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._uploaded_bytes = 0
        self._downloaded_bytes = 0

    def counts(self) -> Counts:
        """What was counted so far."""
        with self._lock:
            return Counts(dict(self._requests), self._uploaded_bytes, self._downloaded_bytes)

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._requests.clear()
            self._uploaded_bytes = self._downloaded_bytes = 0

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        self._request("get")
        return self._downloaded(self._store.get(key, limit_bytes=limit_bytes))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        self._request("get_range")
        return self._downloaded(self._store.get_range(key, start, stop))

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        self._request("put")
        self._store.put(key, data)
        self._uploaded(len(data))

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``."""
        self._request("put_file")
        self._store.put_file(key, path)
        self._uploaded(path.stat().st_size)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``."""
        self._request("put_if_absent")
        self._store.put_if_absent(key, data)
        self._uploaded(len(data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``."""
        self._request("list")
        for index, entry in enumerate(self._store.list(prefix, after=after)):
            if index and index % PAGE == 0:
                self._request("list")
            yield entry

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        all_keys = list(keys)
        if all_keys:  # else nothing is sent
            self._request("delete", -(-len(all_keys) // PAGE))
        self._store.delete(all_keys)

    def _request(self, operation: str, count: int = 1) -> None:
        with self._lock:
            self._requests[operation] += count

    def _uploaded(self, size_bytes: int) -> None:
        with self._lock:
            self._uploaded_bytes += size_bytes

    def _downloaded(self, data: bytes) -> bytes:
        with self._lock:
            self._downloaded_bytes += len(data)
        return data


class SingleWriterStore(StoreWrapper):
    """Looks, then writes, where a store has no put-if-absent: safe for one publisher only."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object unless it is there; two callers at once may both succeed."""
        try:
            self._store.get_range(key, 0, 0)
        except NotFound:
            self._store.put(key, data)
            return
        raise AlreadyExists(
            f"cannot create {key} in {self.url}: it exists already", key=key, url=self.url
        )
