"""Sleeping between two looks, and being woken: from other threads and signal handlers."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Wakes:
    """What wakes somebody who sleeps. One thread sleeps; all else may be called from any.

    Attributes:
        are_expected: Whether somebody wakes whenever there is something new.
    """

    def __init__(self) -> None:
        # True: wake up; False: think again about how long to sleep. Unlike an event, it may be put
        # to from a signal handler while this thread waits.
        self._queue: SimpleQueue[bool] = SimpleQueue()
        self.are_expected = False

    def wake(self) -> None:
        """Wake whoever sleeps, or sleeps next. Also from a signal handler."""
        self._queue.put(True)

    def expect(self, are_expected: bool) -> None:
        """Say whether somebody will wake; whoever sleeps thinks again about how long."""
        if are_expected != self.are_expected:
            self.are_expected = are_expected
            self._queue.put(False)

    def sleep(self, wait_s: float) -> bool:
        """Sleep so long at most; returns whether to wake up: else think again."""
        is_woken = False
        with suppress(Empty):
            is_woken |= self._queue.get(timeout=wait_s)
            while True:
                is_woken |= self._queue.get_nowait()
        return is_woken
