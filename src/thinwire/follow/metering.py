"""How far something is, told to observers seldom enough to cost nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from thinwire.stream.events import Observers, Progressed

_EVERY_S = 0.25


class ProgressMeter:
    """Tells of a phase as it begins, and then a few times a second. Safe from several threads.

    Args:
        observers: Told of it.
        beginning: What they are told first.
    """

    def __init__(self, observers: Observers, beginning: Progressed) -> None:
        self._observers = observers
        self._beginning = beginning
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._next_s = time.monotonic() + _EVERY_S
        if not observers.is_nobody:
            observers.on_event(beginning)

    def count(self, byte_count: int) -> None:
        """Take note of bytes that are done."""
        if self._observers.is_nobody:
            return
        with self._lock:
            self._done_bytes += byte_count
            now_s = time.monotonic()
            if now_s < self._next_s:
                return
            self._next_s = now_s + _EVERY_S
            done_bytes = self._done_bytes
        self._observers.on_event(replace(self._beginning, done_bytes=done_bytes))

    def beside(self, on_bytes: Callable[[int], None] | None) -> Callable[[int], None]:
        """A callback that counts and calls ``on_bytes`` as well."""
        if on_bytes is None:
            return self.count

        def both(byte_count: int) -> None:
            self.count(byte_count)
            on_bytes(byte_count)

        return both
