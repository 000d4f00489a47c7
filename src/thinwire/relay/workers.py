"""Threads that work may hang in, and single flight: many ask, one fetches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_LOG = logging.getLogger("thinwire")
# Threads that hang in a call are given up, but not without end.
_MOST_GIVEN_UP = 64


class Workers:
    """A bounded number of threads, which do not keep the process from ending.

    Args:
        name: For the threads' names.
        count: How many.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given_up: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Do it on one of the threads. ``work`` sees to its own errors; others are logged."""
        with self._lock:
            if not self._threads and not self._is_closed:
                self._start()
            self._queue.put(work)

    @property
    def backlog(self) -> int:
        """What waits for a thread, about."""
        return self._queue.qsize()

    def renew(self) -> None:
        """Go on with new threads: those that there are may hang for long."""
        with self._lock:
            self._given_up = [thread for thread in self._given_up if thread.is_alive()]
            if self._is_closed or len(self._given_up) + len(self._threads) > _MOST_GIVEN_UP:
                return
            before, self._queue = self._queue, SimpleQueue()
            self._given_up += self._threads
            self._start()
            while not before.empty():
                self._queue.put(before.get())
            self._end(before, self._count)

    def close(self) -> None:
        """End once what was submitted is done; nothing waits for it."""
        with self._lock:
            self._is_closed = True
            self._end(self._queue, self._count)

    def _start(self) -> None:
        self._threads = [
            threading.Thread(
                target=_work, args=(self._queue,), name=f"{self._name}-{number}", daemon=True
            )
            for number in range(self._count)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _end(queue: SimpleQueue[Callable[[], None] | None], count: int) -> None:
        for _ in range(count):
            queue.put(None)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        try:
            work()
        except Exception:
            # Nothing would start the thread again.
            _LOG.exception("work of a relay failed")


class Room:
    """So many bytes may be on their way at once."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._is_retired = False
        self._condition = threading.Condition()

    def take(self, size_bytes: int) -> bool:
        """Wait until there is room; one alone always has it. False: go to the room after this."""
        with self._condition:
            while (
                not self._is_retired
                and self._used_bytes
                and self._used_bytes + size_bytes > self._limit_bytes
            ):
                self._condition.wait()
            if self._is_retired:
                return False
            self._used_bytes += size_bytes
            return True

    def give(self, size_bytes: int) -> None:
        """Give back what was taken."""
        with self._condition:
            self._used_bytes -= size_bytes
            self._condition.notify_all()

    def retire(self) -> None:
        """What is taken may never come back: send away whoever waits for it."""
        with self._condition:
            self._is_retired = True
            self._condition.notify_all()


class Flights(Generic[K, V]):
    """What is under way, by key. Whoever asks meanwhile waits for the same result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[K, Future[V]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, key: K) -> tuple[Future[V], bool]:
        """The flight of a key, and whether it is new: then the caller must make it end."""
        with self._lock:
            found = self._flights.get(key)
            if found is not None:
                return found, False
            flight: Future[V] = Future()
            # So that one who gives up waiting cannot cancel it for the others.
            flight.set_running_or_notify_cancel()
            self._flights[key] = flight
            return flight, True

    def land(self, flight: Future[V], result: V) -> None:
        """It ended well; :meth:`forget` it once the result is to be found elsewhere."""
        with self._lock:
            if not flight.done():
                flight.set_result(result)

    def fail(self, key: K, flight: Future[V], error: BaseException) -> None:
        """It failed, and the next who asks begins anew."""
        with self._lock:
            if not flight.done():
                flight.set_exception(error)
        self.forget(key, flight)

    def forget(self, key: K, flight: Future[V]) -> None:
        """The result is elsewhere by now."""
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]

    def take_all(self) -> list[tuple[K, Future[V]]]:
        """Give up all that is under way; the caller makes them end."""
        with self._lock:
            flights, self._flights = self._flights, {}
        return list(flights.items())


def done(result: V) -> Future[V]:
    """A flight that has landed already."""
    flight: Future[V] = Future()
    flight.set_result(result)
    return flight


def failed(error: BaseException) -> Future[Any]:
    """A flight that failed already."""
    flight: Future[Any] = Future()
    flight.set_exception(error)
    return flight
