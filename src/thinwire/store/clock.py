"""Time as something to pass in, so that waiting can be tested without waiting."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from some moment on, and a way to wait."""

    def now(self) -> float:
        """Seconds since a fixed moment; never goes back."""

    def sleep_until(self, moment: float) -> None:
        """Return when ``now()`` is at least ``moment``."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since some moment before the process started."""
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        """Sleep until ``moment``."""
        left_s = moment - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class VirtualClock:
    """A clock that stands still until someone sleeps, and then jumps.

    Exact for one thread. With several it is exact where they wait for a shared link, and counts
    waits that would have overlapped at least once.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds slept so far."""
        with self._lock:
            return self._now

    def sleep_until(self, moment: float) -> None:
        """Jump to ``moment``, unless it has passed."""
        with self._lock:
            self._now = max(self._now, moment)
