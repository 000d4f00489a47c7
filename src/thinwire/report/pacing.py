"""When to say something to a hub, and when to try again: decisions only."""

from __future__ import annotations

# Two heartbeats are this far apart at least ...
MIN_GAP_S = 0.5
# ... a change waits for those that come with it ...
_SETTLE_S = 0.05
_SETTLE_SPREAD_S = 0.4
# ... and how far something is is worth no more than this.
_PROGRESS_S = 2.0
# What a hub may ask for.
_MIN_INTERVAL_S = 1.0
_MAX_INTERVAL_S = 60.0
DEFAULT_INTERVAL_S = 5.0

_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 10.0


def retry_s(failure_count: int, jitter: float) -> float:
    """How long to wait after so many failures in a row; ``jitter`` is from 0 to 1.

    The first retry of many clients is spread, too: a hub that comes back meets all of them.
    """
    doubled = _FIRST_RETRY_S * 2.0 ** min(failure_count - 1, 16)
    return min(doubled, _MAX_RETRY_S) * (0.5 + jitter)


class Pace:
    """When the next heartbeat is due. All times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._interval_s = DEFAULT_INTERVAL_S
        self._sent_s: float | None = None
        self._changed_s: float | None = None
        self._progressed_s: float | None = None
        self._failure_count = 0

    def changed(self, now_s: float) -> None:
        """Something is new that others wait for."""
        if self._changed_s is None:
            self._changed_s = now_s

    def progressed(self, now_s: float) -> None:
        """Something is further than it was."""
        if self._progressed_s is None:
            self._progressed_s = now_s

    def sending(self, now_s: float) -> None:
        """A heartbeat is on its way; what changes from now on is for the next."""
        self._sent_s = now_s
        self._changed_s = self._progressed_s = None

    def arrived(self, interval_s: float) -> None:
        """It arrived; the hub wants the next one after so long."""
        self._failure_count = 0
        self._interval_s = min(max(interval_s, _MIN_INTERVAL_S), _MAX_INTERVAL_S)

    def failed(self) -> None:
        """It did not arrive."""
        self._failure_count += 1

    def returned(self, now_s: float) -> None:
        """The hub is there, again or for the first time; it may know nothing of us."""
        if self._failure_count:
            self._failure_count = 0
            self._sent_s = None
        self.changed(now_s)

    def due_s(self, jitter: float) -> float:
        """When the next one is due; ``jitter`` from 0 to 1 spreads those of many replicas."""
        if self._sent_s is None:
            return 0.0
        if self._failure_count:
            return self._sent_s + retry_s(self._failure_count, jitter)
        due_s = self._sent_s + self._interval_s * (0.9 + 0.2 * jitter)
        if self._changed_s is not None:
            due_s = min(due_s, self._changed_s + _SETTLE_S + _SETTLE_SPREAD_S * jitter)
        if self._progressed_s is not None:
            due_s = min(due_s, self._sent_s + _PROGRESS_S)
        return max(due_s, self._sent_s + MIN_GAP_S)
