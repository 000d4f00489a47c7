"""How long a driver waits before it tries again what failed."""

from __future__ import annotations

import time

from thinwire.errors import EngineUnreachable, ThinwireError

_MAX_WAIT_S = 60.0
_MAX_AWAY_WAIT_S = 3.0


class Patience:
    """Waits longer after each failure that follows another one."""

    def __init__(self) -> None:
        self._failure_count = 0
        self._next_try_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it may be tried."""
        return time.monotonic() >= self._next_try_s

    def succeeded(self) -> None:
        """It worked: after the next failure the wait is short again."""
        self._failure_count = 0

    def failed(self, error: ThinwireError) -> float:
        """It did not; returns how many seconds are waited."""
        self._failure_count += 1
        waited_s = wait_s(self._failure_count)
        if isinstance(error, EngineUnreachable):
            # To ask costs nothing, and one that comes back serves the wrong weights.
            waited_s = min(waited_s, _MAX_AWAY_WAIT_S)
        self._next_try_s = time.monotonic() + waited_s
        return waited_s

    def expect(self, failure_count: int) -> None:
        """Wait as after that many failures, at least."""
        self._failure_count = max(self._failure_count, failure_count)


def wait_s(failure_count: int) -> float:
    """How long to wait after so many failures in a row."""
    return float(min(2.0 ** min(failure_count - 1, 10), _MAX_WAIT_S))
