"""Whether something that failed may be tried again: seldom, and by one alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from thinwire.errors import NotFound, ThinwireError
from thinwire.store import Store
from thinwire.store.clock import Clock
from thinwire.stream import keys
from thinwire.stream.encoding import MAX_SMALL_BYTES

_LOG = logging.getLogger("thinwire")

# An answer of a relay that works but has not got what was asked for.
NOT_HELD = 503
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# Whoever tries and never tells does not keep the others out for longer.
_TRIAL_S = 60.0


class Gate:
    """After each failure closed for a while, and then open to one alone, whose luck decides.

    Args:
        clock: Tells the time.
        longest_pause_s: How long it is closed at most.
    """

    def __init__(self, clock: Clock, longest_pause_s: float = _LONGEST_PAUSE_S) -> None:
        self._clock = clock
        self._longest_pause_s = longest_pause_s
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._closed_until_s = 0.0
        self._tried_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether nothing failed lately."""
        return self._pause_s == 0.0

    def may_try(self) -> bool:
        """Whether the caller may try now; it then tells how it went."""
        with self._lock:
            now_s = self._clock.now()
            if self._pause_s == 0.0:
                return True
            if now_s < max(self._closed_until_s, self._tried_until_s):
                return False
            self._tried_until_s = now_s + _TRIAL_S
            return True

    def open(self) -> None:
        """It works."""
        with self._lock:
            self._pause_s = self._tried_until_s = 0.0

    def pass_on(self) -> None:
        """Whoever tried learned nothing: another one may."""
        with self._lock:
            self._tried_until_s = 0.0

    def close(self) -> float:
        """It failed; returns for how long it is left alone.

        Many that fail at once count once.
        """
        with self._lock:
            if self._pause_s == 0.0 or self._tried_until_s:
                self._pause_s = min(max(_FIRST_PAUSE_S, self._pause_s * 2), self._longest_pause_s)
                self._closed_until_s = self._clock.now() + self._pause_s
                self._tried_until_s = 0.0
            return self._pause_s


class ProbedGate:
    """As a gate, but a thread of its own tries: nobody who wants something done waits for it.

    Args:
        probe: Asks; whether it works.
        clock: Tells the time.
    """

    def __init__(self, probe: Callable[[], bool], clock: Clock) -> None:
        self._gate = Gate(clock)
        self._probe = probe

    @property
    def is_open(self) -> bool:
        """Whether it works, as far as is known."""
        return self._gate.is_open

    def may_try(self) -> bool:
        """Whether it works; where it is time to see whether it does again, that begins."""
        if self._gate.is_open:
            return True
        if self._gate.may_try():
            try:
                threading.Thread(target=self._see, name="thinwire-probe", daemon=True).start()
            except RuntimeError:
                # There can be no more threads just now.
                self._gate.pass_on()
        return False

    def open(self) -> None:
        """It works."""
        self._gate.open()

    def close(self) -> float:
        """It failed; returns for how long it is left alone."""
        return self._gate.close()

    def _see(self) -> None:
        if self._probe():
            self._gate.open()
        else:
            self._gate.close()


def answers(store: Store) -> bool:
    """Whether a store answers, be it that it has not got this."""
    try:
        store.get(keys.HEAD, limit_bytes=MAX_SMALL_BYTES)
    except NotFound:
        return True
    except ThinwireError as error:
        return error.context.get("status") == NOT_HELD
    except Exception:
        _LOG.exception("asking %s failed", store.url)
        return False
    return True
