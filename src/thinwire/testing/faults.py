"""A store that fails in all the ways real ones do, by the dice of a seeded random source."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from thinwire.errors import StoreError, Unavailable
from thinwire.store.store import Entry, Store, too_short
from thinwire.store.wrappers import StoreWrapper

T = TypeVar("T")

OPERATIONS = ("get", "get_range", "put", "put_file", "put_if_absent", "list", "delete")

Hook = Callable[[str, str, str], None]


@dataclass(frozen=True)
class Rates:
    """How often, from 0 to 1, each fault strikes one operation.

    Attributes:
        fail_before: ``Unavailable``, and nothing was done.
        fail_after: It was done, whether it succeeded or not, and ``Unavailable`` says otherwise.
        delay: The hook is called with "delay" between the decision and the deed.
        drop: A listing leaves out an entry (rolled for each one).
        duplicate: A listing has an entry twice (rolled for each one).
        truncate: ``get`` gives only a beginning; ``get_range`` is ``Truncated``.
    """

    fail_before: float = 0.0
    fail_after: float = 0.0
    delay: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    truncate: float = 0.0


NO_FAULTS = Rates()


def _no_hook(when: str, operation: str, key: str) -> None:
    pass


class FaultStore(StoreWrapper):
    """Passes on to ``store``, with faults.

    The same seed and the same calls in the same order give the same faults. ``hook(when, operation,
    key)`` is called "before" and "after" every operation, to count, to let another thread run, or
    to raise what stands for the death of the process; and at a "delay".
    """

    def __init__(
        self,
        store: Store,
        randomness: random.Random,
        *,
        rates: Rates | Mapping[str, Rates] = NO_FAULTS,
        hook: Hook = _no_hook,
    ) -> None:
        super().__init__(store)
        self._random = randomness
        self._lock = threading.Lock()
        self._injected: Counter[str] = Counter()
        self._rates: dict[str, Rates] = {}
        self.hook = hook
        self.set_rates(rates)

    def set_rates(self, rates: Rates | Mapping[str, Rates]) -> None:
        """Replace the rates: one for every operation, or by operation (none for those left out)."""
        if isinstance(rates, Rates):
            rates = dict.fromkeys(OPERATIONS, rates)
        unknown = set(rates) - set(OPERATIONS)
        if unknown:
            raise ValueError(f"not an operation of a store: {sorted(unknown)}")
        with self._lock:
            self._rates = dict(rates)

    def injected(self) -> dict[str, int]:
        """How many faults struck so far, by "operation.fault"."""
        with self._lock:
            return dict(self._injected)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        data = self._run("get", key, lambda: self._store.get(key, limit_bytes=limit_bytes))
        if data and self._strikes("get", "truncate"):
            with self._lock:
                return data[: self._random.randrange(len(data))]
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        data = self._run("get_range", key, lambda: self._store.get_range(key, start, stop))
        if data and self._strikes("get_range", "truncate"):
            raise too_short(self.url, key, start, stop)
        return data

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        self._run("put", key, lambda: self._store.put(key, data))

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``."""
        self._run("put_file", key, lambda: self._store.put_file(key, path))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``."""
        self._run("put_if_absent", key, lambda: self._store.put_if_absent(key, data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``; entries may be missing or come twice."""
        entries = self._run("list", prefix, lambda: [*self._store.list(prefix, after=after)])
        for entry in entries:
            if self._strikes("list", "drop"):
                continue
            yield entry
            if self._strikes("list", "duplicate"):
                yield entry

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        all_keys = [*keys]
        first = all_keys[0] if all_keys else ""
        self._run("delete", first, lambda: self._delete(all_keys))

    def _delete(self, all_keys: Iterable[str]) -> None:
        # Key by key, so that the hook's "before" of each can be the last thing that happens.
        for index, key in enumerate(all_keys):
            if index:
                self.hook("before", "delete", key)
            self._store.delete([key])

    def _run(self, operation: str, key: str, call: Callable[[], T]) -> T:
        self.hook("before", operation, key)
        if self._strikes(operation, "delay"):
            self.hook("delay", operation, key)
        if self._strikes(operation, "fail_before"):
            raise self._failure(operation, key)
        lost = self._strikes(operation, "fail_after")
        try:
            result = call()
        except StoreError:
            if lost:
                raise self._failure(operation, key) from None
            raise
        self.hook("after", operation, key)
        if lost:
            raise self._failure(operation, key)
        return result

    def _failure(self, operation: str, key: str) -> Unavailable:
        return Unavailable(
            f"cannot {operation} {key} in {self.url}: an injected fault",
            hint="Try again later",
            operation=operation,
            key=key,
            url=self.url,
        )

    def _strikes(self, operation: str, fault: str) -> bool:
        with self._lock:
            # Rolled even at rate 0, so that changing one rate does not reshuffle the others.
            roll = self._random.random()
            struck = roll < getattr(self._rates.get(operation, NO_FAULTS), fault)
            if struck:
                self._injected[f"{operation}.{fault}"] += 1
            return bool(struck)
