"""A thread that looks at one stream, often enough, and tells what it found."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Executor
from typing import Any, Protocol

from thinwire.errors import NotFound, ThinwireError
from thinwire.follow import Stream
from thinwire.hub.looking import Look, Looker, versions_before
from thinwire.hub.versions import note_of
from thinwire.report.messages import VersionNote
from thinwire.stream.records import Manifest

# A hundred signals in a moment make one look.
_MIN_GAP_S = 0.05
_MIN_GAP_FAILED_S = 0.5
_MAX_BACKOFF_S = 30.0
# While somebody said that there is more to come.
_CLOSE_POLL_S = 0.1
# How often to make sure that it still is the same stream.
_DOUBT_EVERY_S = 30.0
_FILL_AGAIN_S = 10.0
_MAX_FILL_AGAIN_S = 600.0


class Told(Protocol):
    """Whom a watcher tells; from its thread, or the one that reads the history."""

    def take(self, notes: list[VersionNote], *, model: str, is_other: bool) -> None:
        """The bucket was read: new versions, oldest first. ``is_other``: all before are void."""

    def fill(self, note: VersionNote) -> bool:
        """An older version; whether still older ones are wanted."""

    def fail(self, error: ThinwireError) -> None:
        """The bucket could not be read, or is not what it should be."""


class Watcher:
    """Looks at a stream.

    Args:
        stream: The stream.
        told: Whom to tell.
        pool: What reads the history.
        poll_s: The time between two looks.
        logger: A structlog logger, or None.
    """

    def __init__(
        self, stream: Stream, told: Told, pool: Executor, *, poll_s: float, logger: Any = None
    ) -> None:
        self._stream = stream
        self._looker = Looker(stream)
        self._told = told
        self._pool = pool
        self._poll_s = poll_s
        self._logger = logger
        self._woken = threading.Event()
        self._is_stopped = False
        self._close_until_s = 0.0
        self._fault_code = ""
        self._filling: threading.Thread | None = None
        self._fill_number = 0
        self._unfilled: Manifest | None = None  # before which the history has a hole
        self._fill_at_s = 0.0
        self._fill_pause_s = _FILL_AGAIN_S
        self._fill_fault = ""
        self._fill_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="thinwire-hub-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def wake(self, close_s: float = 0.0) -> None:
        """Look now, and often for so long or until there is something new. From any thread."""
        self._close_until_s = max(self._close_until_s, time.monotonic() + close_s)
        self._woken.set()

    def stop(self) -> None:
        """Look no more after the look that runs."""
        self._is_stopped = True
        self._woken.set()

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait until the look that runs has ended, for so long."""
        for thread in (self._thread, self._filling):
            if thread is not None and thread.ident is not None:
                thread.join(timeout_s)

    def _run(self) -> None:
        failure_count, is_missing, doubt_s = 0, False, 0.0
        while not self._is_stopped:
            self._woken.clear()
            began_s = time.monotonic()
            try:
                self._look(began_s >= doubt_s)
            except ThinwireError as error:
                failure_count, is_missing = failure_count + 1, isinstance(error, NotFound)
                self._fail(error)
            except Exception as error:
                # A bug must not end the looking: it is told, and may be of one moment.
                failure_count, is_missing = failure_count + 1, False
                self._fail(ThinwireError(f"looking at {self._stream.url} failed: {error!r}"))
            else:
                failure_count = 0
                doubt_s = began_s + _DOUBT_EVERY_S if began_s >= doubt_s else doubt_s
            # A stream that is yet to be made is no failure of the store.
            self._pause(began_s, min(failure_count, 1) if is_missing else failure_count)

    def _pause(self, began_s: float, failure_count: int) -> None:
        gap_s, wait_s = _MIN_GAP_S, self._poll_s * random.uniform(0.9, 1.1)
        if failure_count:
            gap_s = _MIN_GAP_FAILED_S
            wait_s = max(gap_s, self._poll_s) * 2 ** min(failure_count - 1, 10)
            wait_s = max(self._poll_s, min(_MAX_BACKOFF_S, wait_s))
            wait_s *= random.uniform(0.8, 1.2)
        elif time.monotonic() < self._close_until_s:
            wait_s = min(wait_s, _CLOSE_POLL_S)
        self._woken.wait(wait_s)
        left_s = began_s + gap_s - time.monotonic()
        if left_s > 0 and not self._is_stopped:
            time.sleep(left_s)

    def _look(self, doubts: bool) -> None:
        look = self._looker.look(doubts=doubts)
        try:
            self._succeed(look)
        except Exception:
            self._looker.repeat(look)
            raise

    def _succeed(self, look: Look) -> None:
        if self._fault_code and self._logger is not None:
            self._logger.info("the stream can be read again", url=self._stream.url)
        self._fault_code = ""
        if look.is_other and self._logger is not None:
            self._logger.warning("the stream was replaced, or set back", url=self._stream.url)
        is_broken = look.is_jump or look.is_other
        if is_broken:
            with self._fill_lock:
                self._fill_number += 1
        notes = [note_of(manifest) for manifest in look.found]
        self._told.take(notes, model=self._looker.model, is_other=look.is_other)
        if look.found:
            self._close_until_s = 0.0
        if is_broken:
            self._unfilled = look.found[-1] if look.found else None
            self._fill_at_s, self._fill_pause_s = 0.0, _FILL_AGAIN_S
        if self._unfilled is not None and time.monotonic() >= self._fill_at_s:
            self._fill_at_s = time.monotonic() + self._fill_pause_s
            self._fill_pause_s = min(2 * self._fill_pause_s, _MAX_FILL_AGAIN_S)
            head, self._unfilled = self._unfilled, None
            self._fill(head, self._fill_number)

    def _fail(self, error: ThinwireError) -> None:
        if self._logger is not None and error.code != self._fault_code:
            self._logger.warning(
                "the stream cannot be read", url=self._stream.url, code=error.code, error=str(error)
            )
        self._fault_code = error.code
        self._told.fail(error)

    def _fill(self, head: Manifest, number: int) -> None:
        """Read the versions before one, in a thread of its own, while no other fill began."""
        self._filling = threading.Thread(
            target=self._read_before, args=(head, number), name="thinwire-hub-history", daemon=True
        )
        self._filling.start()

    def _read_before(self, head: Manifest, number: int) -> None:
        def wants() -> bool:
            return self._fill_number == number and not self._is_stopped

        at = head
        try:
            for found in versions_before(self._stream, head, self._pool, wants):
                with self._fill_lock:
                    if not wants() or not self._told.fill(note_of(found)):
                        return
                at = found
        except Exception as error:
            # The head is known, and that is what counts; older ones are read later, from here on,
            # and more and more seldom: what is missing or malformed may stay so.
            with self._fill_lock:
                if wants():
                    self._unfilled = at
            is_told, self._fill_fault = self._fill_fault == str(error), str(error)
            if self._logger is not None and wants() and not is_told:
                self._logger.warning(
                    "the history cannot be read", url=self._stream.url, error=str(error)
                )
