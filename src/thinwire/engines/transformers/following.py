"""The thread that follows the stream, and what it knows of versions."""

from __future__ import annotations

import threading
import time
from typing import Any

from thinwire.errors import BaseMismatch, Deadline, NotFound, ThinwireError
from thinwire.follow import Follower
from thinwire.follow.wakes import Wakes
from thinwire.stream.events import Applied, Event, Observer, Observers
from thinwire.stream.polling import MAX_WAIT_S
from thinwire.stream.version import Version
from thinwire.torch import TorchSink

# After what does not pass by itself, such as a new lineage: somebody has to do something.
_SLOW_POLL_S = 10.0


class Newest:
    """The newest version that is known here, and since when it is not served. An observer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = 0
        self._served = 0
        self._behind_since_s: float | None = None

    def on_event(self, event: Event) -> None:
        """Take note of a version."""
        with self._lock:
            if isinstance(event, Applied):
                # Backwards, too, where the stream was set back.
                is_served = event.version >= self._known or event.version < self._served
                self._served = event.version
                if is_served:
                    self._known = event.version
                    self._behind_since_s = None
            elif event.version > self._known:
                self._known = event.version
                if self._behind_since_s is None:
                    self._behind_since_s = time.monotonic()

    def behind(self, version: int) -> tuple[int, float]:
        """How many versions, and for how many seconds, one is behind the newest."""
        with self._lock:
            count = max(0, self._known - version)
            if not count:
                return 0, 0.0
            since_s = self._behind_since_s
            return count, 0.0 if since_s is None else time.monotonic() - since_s


class Following:
    """Keeps the model at the newest version.

    Failures that may pass are tried again, all others too, more slowly: meanwhile the version that
    is here is served, and its staleness says so.

    Args:
        follower: Used by this thread only.
        sink: What it writes into.
        newest: Observes it.
        poll_s: The time between two looks.
        proves: Whether the weights are compared with their digests after each update.
        logger: structlog's.
        observer: Told of each failure.
    """

    def __init__(
        self,
        follower: Follower,
        sink: TorchSink,
        newest: Newest,
        *,
        poll_s: float,
        proves: bool,
        logger: Any,
        observer: Observer | None = None,
    ) -> None:
        self._observers = Observers(observer)
        self._follower = follower
        self._newest = newest
        self._poll_s = poll_s
        self._sink = sink
        self._proves = proves
        self._logger = logger
        self._is_over = False
        self._wakes = Wakes()
        self._checked_s = time.monotonic()
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="thinwire-following", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End after the step that runs."""
        self._is_over = True
        self._wakes.wake()
        if self._thread.is_alive():
            self._thread.join(60)

    def version(self) -> Version | None:
        """The version that is held; before :meth:`start`."""
        return self._follower.version()

    @property
    def is_ready(self) -> bool:
        """Whether the model holds one whole version, and may be used. From any thread."""
        return self._sink.version is not None

    @property
    def relayed_bytes(self) -> int:
        """See :class:`thinwire.Follower`."""
        return getattr(self._follower, "relayed_bytes", 0)

    def wake(self) -> None:
        """Look now. From any thread."""
        self._wakes.wake()

    def expect_wakes(self, is_expected: bool) -> None:
        """As :meth:`thinwire.Follower.expect_wakes`. From any thread."""
        self._wakes.expect(is_expected)

    def staleness(self, version: Version) -> dict[str, Any]:
        """How old a version is."""
        count, behind_s = self._newest.behind(version.version)
        return {
            "versions": count,
            "seconds": round(behind_s, 3),
            "age_s": round(max(0.0, time.time() - version.created_ms / 1000), 3),
            "checked_s": round(time.monotonic() - self._checked_s, 3),
        }

    def _run(self) -> None:
        held: Version | None = None
        while not self._is_over:
            wait_s = self._poll_s
            try:
                found = self._follower.catch_up()
                if self._proves and found != held and self._sink.prove() is False:
                    self._logger.error("wrong weights", version=found.version)
                    reason = "its weights were found to be wrong"
                    self._sink.distrust(reason)
                    self._refuse(BaseMismatch(f"version {found.version}: {reason}"))
                    found = self._follower.catch_up()
                held = found
                self._checked_s = time.monotonic()
                self.failure = ""
            except Exception as error:
                passes = isinstance(error, ThinwireError) and error.retryable
                if not passes and not isinstance(error, NotFound):
                    wait_s = max(wait_s, min(_SLOW_POLL_S, 20 * wait_s))
                if str(error) != self.failure:
                    is_late = isinstance(error, Deadline)
                    is_bug = not isinstance(error, ThinwireError)
                    self._logger.warning(
                        "not updated", reason=str(error), is_late=is_late, exc_info=is_bug
                    )
                self.failure = str(error)
                known = error if isinstance(error, ThinwireError) else ThinwireError(repr(error))
                self._refuse(known)
            self._sleep(wait_s)

    def _refuse(self, error: ThinwireError) -> None:
        self._observers.refuse(self._follower.stream.url, "", 0, error)

    def _sleep(self, wait_s: float) -> None:
        """Sleep until it is time for a look, or somebody asks for one."""
        start_s = time.monotonic()
        is_woken = False
        while not is_woken:
            # Whether somebody calls may change in between.
            rest_s = max(wait_s, MAX_WAIT_S) if self._wakes.are_expected else wait_s
            left_s = start_s + rest_s - time.monotonic()
            if left_s <= 0:
                return
            is_woken = self._wakes.sleep(left_s)
