"""Looking for versions again and again: how often, who may say when, and what is waited out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from thinwire.errors import NotFound, StoreError
from thinwire.follow.wakes import Wakes
from thinwire.stream.polling import Cadence
from thinwire.stream.version import Version

# A stream that was set back, or is not there any more, shows no newer version: so look for our own
# now and then.
_DOUBT_EVERY_S = 120.0


class Looks:
    """Looks at a stream until it is stopped. One thread looks; all else may be called from any.

    Args:
        look: Looks once; gives the version that is held then.
        doubt: Has the next look make sure that what is held is still in the stream.
        is_empty: Whether nothing is held yet.
        on_failure: Told of failures that are waited out.

    Attributes:
        wakes: Has it look now, or more seldom.
        is_stopped: Whether it is to end.
    """

    def __init__(
        self,
        look: Callable[[], Version],
        doubt: Callable[[], None],
        is_empty: Callable[[], bool],
        on_failure: Callable[[StoreError], None],
    ) -> None:
        self._look = look
        self._doubt = doubt
        self._is_empty = is_empty
        self._on_failure = on_failure
        self._is_told = False  # that there is nothing yet
        self.wakes = Wakes()
        self.is_stopped = False
        # When something was yielded last, over all looks: some are closer than idle moments.
        self._yielded_s = 0.0

    def stop(self) -> None:
        """End after the look that runs. Also from a signal handler."""
        self.is_stopped = True
        self.wakes.wake()

    def updates(
        self, poll_s: float, deadline_s: float, idle_s: float | None = None
    ) -> Iterator[Version | None]:
        """Yield each version that a look found, and None every ``idle_s`` in between, if given.

        Args:
            poll_s: The shortest time between two looks.
            deadline_s: When to end, by the monotonic clock.
            idle_s: As said.
        """
        self._yielded_s = time.monotonic()
        at: Version | None = None
        cadence = Cadence()
        doubted_s = time.monotonic()
        while not self.is_stopped:
            if time.monotonic() - doubted_s >= _DOUBT_EVERY_S:
                self._doubt()
                doubted_s = time.monotonic()
            found = self._try()
            now_s = time.monotonic()
            if found is not None and (at is None or found.manifest != at.manifest):
                cadence.note(found.created_ms / 1000, now_s, found.version - (at or found).version)
                at = found
                yield found
                self._yielded_s = time.monotonic()
            else:
                yield from self._rest(cadence, now_s, poll_s, deadline_s, idle_s)
            if time.monotonic() >= deadline_s:
                return

    def _try(self) -> Version | None:
        """Look once; None where nothing is there yet, or the store failed and may mend."""
        try:
            return self._look()
        except StoreError as error:
            is_early = isinstance(error, NotFound) and self._is_empty()
            if not (error.retryable or is_early):
                raise
            if not is_early or not self._is_told:
                self._on_failure(error)
            self._is_told = is_early
            return None

    def _rest(
        self,
        cadence: Cadence,
        looked_s: float,
        poll_s: float,
        deadline_s: float,
        idle_s: float | None,
    ) -> Iterator[None]:
        """Sleep until it is time for the next look."""
        jitter = random.random()
        while not self.is_stopped:
            # Whether somebody calls may change in between.
            is_called = self.wakes.are_expected
            wait_s = cadence.wait_s(looked_s, poll_s, jitter, is_called=is_called)
            now_s = time.monotonic()
            left_s = min(looked_s + wait_s, deadline_s) - now_s
            if left_s <= 0:
                return
            # However often somebody changes whether they call: what is asked in an idle moment is
            # asked of an engine.
            idle_at_s = float("inf") if idle_s is None else self._yielded_s + idle_s
            if self.wakes.sleep(max(0.0, min(left_s, idle_at_s - now_s))):
                return
            if time.monotonic() >= idle_at_s:
                self._yielded_s = time.monotonic()
                yield None
