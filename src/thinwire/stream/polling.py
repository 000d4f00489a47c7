"""When to look for the next version."""

from __future__ import annotations

# Wait this share of the usual interval before the first look, so that looks are few.
_QUIET_SHARE = 0.8
_LOOKS_PER_INTERVAL = 16
MAX_WAIT_S = 30.0


def next_wait_s(idle_s: float, interval_s: float | None, poll_s: float, jitter: float) -> float:
    """Seconds until the next look.

    Args:
        idle_s: Since the last version was found.
        interval_s: The usual time between versions; None: not known yet.
        poll_s: The shortest time between two looks.
        jitter: From 0 to 1: spreads the looks of many followers.
    """
    if interval_s is None:
        wait_s = poll_s
    elif idle_s < _QUIET_SHARE * interval_s:
        wait_s = _QUIET_SHARE * interval_s - idle_s
    else:
        wait_s = interval_s / _LOOKS_PER_INTERVAL
    return max(poll_s, min(wait_s, MAX_WAIT_S) * (0.8 + 0.4 * jitter))


def smoothed_interval_s(interval_s: float | None, newest_s: float) -> float:
    """The usual interval, once another one was seen."""
    return newest_s if interval_s is None else 0.75 * interval_s + 0.25 * newest_s
