"""When to look for the next version."""

from __future__ import annotations

from collections import deque

# Wait this share of the shortest interval seen lately before the first look, so that looks are few.
_QUIET_SHARE = 0.8
_LOOKS_PER_INTERVAL = 16
_REMEMBERED = 8
# One interval says nothing: the first often holds the upload of an anchor.
_ENOUGH = 3
MAX_WAIT_S = 30.0


class Cadence:
    """How often versions come, told from their times by the publisher's clock.

    That clock may differ from ours by any amount; what counts is when a version was found at the
    earliest after its time, lately.
    """

    def __init__(self) -> None:
        self._created_s: float | None = None
        self._intervals_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._delays_s: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, created_s: float, found_s: float, version_count: int) -> None:
        """A version was found.

        Args:
            created_s: Its time by the publisher's clock.
            found_s: The time by ours.
            version_count: How many versions came since the one before.
        """
        if self._created_s is not None and version_count > 0:
            self._intervals_s.append(max(0.0, created_s - self._created_s) / version_count)
        self._created_s = created_s
        self._delays_s.append(found_s - created_s)

    def wait_s(
        self, now_s: float, poll_s: float, jitter: float, *, is_called: bool = False
    ) -> float:
        """Seconds until the next look.

        Args:
            now_s: The time by our clock.
            poll_s: The shortest time between two looks.
            jitter: From 0 to 1: spreads the looks of many followers.
            is_called: Whether somebody calls when there is a version: a look is only for the case
                that the call does not come.
        """
        wait_s = poll_s
        if is_called:
            wait_s = MAX_WAIT_S
        elif self._created_s is not None and len(self._intervals_s) >= _ENOUGH:
            interval_s = min(self._intervals_s)
            idle_s = now_s - min(self._delays_s) - self._created_s
            quiet_s = _QUIET_SHARE * interval_s - idle_s
            wait_s = quiet_s if quiet_s > 0 else interval_s / _LOOKS_PER_INTERVAL
        return max(poll_s, min(wait_s, MAX_WAIT_S) * (0.8 + 0.4 * jitter))
