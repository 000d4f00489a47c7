"""A store behind a slow link."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from thinwire.store.clock import Clock, SystemClock
from thinwire.store.store import Entry, Store
from thinwire.store.wrappers import PAGE, StoreWrapper


class _Link:
    """One direction: whoever comes later waits until the earlier ones are through."""

    def __init__(self, bits_per_s: float) -> None:
        self._bits_per_s = bits_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, ready_s: float, size_bytes: int) -> float:
        """The moment at which bytes that are ready at ``ready_s`` have passed."""
        with self._lock:
            if size_bytes == 0:
                return ready_s
            self._free_s = max(self._free_s, ready_s) + size_bytes * 8 / self._bits_per_s
            return self._free_s


class ThrottledStore(StoreWrapper):
    """All calls share one link up and one down; each request also waits ``latency_s`` once.

    Only the objects' own bytes count, not headers or listings. What the wrapped store takes comes
    on top; with a ``VirtualClock`` around a memory store the time is exact.
    """

    def __init__(
        self,
        store: Store,
        *,
        bits_per_s: float,
        latency_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(store)
        self._latency_s = latency_s
        self._clock = clock or SystemClock()
        self._up = _Link(bits_per_s)
        self._down = _Link(bits_per_s)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        self._wait()
        return self._downloaded(self._store.get(key, limit_bytes=limit_bytes))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        self._wait()
        return self._downloaded(self._store.get_range(key, start, stop))

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        self._send(len(data))
        self._store.put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``."""
        self._send(path.stat().st_size if path.is_file() else 0)
        self._store.put_file(key, path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``."""
        self._send(len(data))
        self._store.put_if_absent(key, data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``."""
        self._wait()
        for index, entry in enumerate(self._store.list(prefix, after=after)):
            if index and index % PAGE == 0:
                self._wait()
            yield entry

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        all_keys = list(keys)
        for _ in range(0, len(all_keys), PAGE):
            self._wait()
        self._store.delete(all_keys)

    def _wait(self) -> None:
        self._clock.sleep_until(self._clock.now() + self._latency_s)

    def _send(self, size_bytes: int) -> None:
        ready_s = self._clock.now() + self._latency_s
        self._clock.sleep_until(self._up.take(ready_s, size_bytes))

    def _downloaded(self, data: bytes) -> bytes:
        self._clock.sleep_until(self._down.take(self._clock.now(), len(data)))
        return data
