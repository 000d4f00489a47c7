"""What is said of a store that does not answer: at once, then ever more rarely; and its end."""

from __future__ import annotations

import logging
import threading

from thinwire.errors import StoreError
from thinwire.store.clock import Clock

_LOG = logging.getLogger("thinwire")
# What lasts is told again after so long, and then after twice as long each time, up to the longest.
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0


class Outage:
    """Tells of one store's outages, however many calls fail in them. From any thread.

    Args:
        url: The store.
        clock: Tells the time.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._due_s = self._pause_s = 0.0
        self._told_instead = ""

    def note_failure(self, error: StoreError, left_s: float) -> None:
        """A call failed.

        Args:
            error: How.
            left_s: For how long it is tried again.
        """
        with self._lock:
            now_s = self._clock.now()
            if self._since_s is None:
                self._since_s, self._pause_s, self._told_instead = now_s, _FIRST_PAUSE_S, ""
                self._due_s = now_s + _FIRST_PAUSE_S
                _LOG.warning("%s; it is tried again for %.0f s", error.message, left_s)
            else:
                self._tell_still(error.message)

    def note_answer(self, instead: str = "") -> None:
        """A call was answered.

        Args:
            instead: Who answered, where it was not the store itself.
        """
        if self._since_s is None:
            return
        with self._lock:
            if self._since_s is None:
                return
            if not instead:
                lasted_s = self._clock.now() - self._since_s
                _LOG.warning("%s answers again, %.1f s later", self._url, lasted_s)
                self._since_s = None
            elif instead != self._told_instead:
                _LOG.warning("%s does not answer; %s does in its place", self._url, instead)
                self._told_instead = instead
            else:
                self._tell_still(f"{self._url} does not answer; {instead} does in its place")

    def _tell_still(self, what: str) -> None:
        now_s = self._clock.now()
        if self._since_s is None or now_s < self._due_s:
            return
        lasted_s = now_s - self._since_s
        lasted = f"{lasted_s:.0f} s" if lasted_s < 60 else f"{lasted_s / 60:.0f} min"
        _LOG.warning("%s; still so after %s", what, lasted)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._due_s = now_s + self._pause_s
