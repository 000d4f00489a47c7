"""Many readers or one update: the lock that keeps forward passes and updates apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thinwire.errors import Deadline, InvalidArgument


class UpdateLock:
    """A lock for many readers or one writer. A waiting writer comes before new readers.

    So a constant load of readers cannot hold an update off: those that read finish, those that come
    later wait for the update. A thread that reads may read again inside, also while a writer waits.
    Counted by thread: do not hand a reading over to another thread, nor hold one across an
    ``await``.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reader_count = 0
        self._waiting_count = 0
        self._writer: int | None = None
        self._own = threading.local()

    @contextmanager
    def reading(self, timeout_s: float | None = None) -> Iterator[None]:
        """Read for as long as the block lasts.

        Raises:
            Deadline: An update was under way, or waited, for longer than ``timeout_s``.
        """
        depth = self._depth()
        me = threading.get_ident()
        with self._changed:
            # The thread that writes may read: it would wait for itself.
            if not depth and self._writer != me:
                self._wait(lambda: self._writer is None and not self._waiting_count, timeout_s)
            self._reader_count += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            with self._changed:
                self._reader_count -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self, timeout_s: float | None = None) -> Iterator[None]:
        """Be alone for as long as the block lasts.

        Raises:
            Deadline: Somebody read, or wrote, for longer than ``timeout_s``; readers go on.
            InvalidArgument: This thread reads: it would wait for itself.
        """
        me = threading.get_ident()
        if self._depth() or self._writer == me:
            raise InvalidArgument(
                "an update inside reading() would wait for itself",
                hint="Leave the block before you catch up",
            )
        with self._changed:
            self._waiting_count += 1
            try:
                self._wait(lambda: self._writer is None and not self._reader_count, timeout_s)
                self._writer = me
            finally:
                self._waiting_count -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()

    @property
    def is_wanted(self) -> bool:
        """Whether a writer waits or writes: a long reading may take it as a sign to end."""
        return bool(self._waiting_count) or self._writer is not None

    def _depth(self) -> int:
        return int(getattr(self._own, "depth", 0))

    def _wait(self, is_free: Callable[[], bool], timeout_s: float | None) -> None:
        start_s = time.monotonic()
        if not self._changed.wait_for(is_free, timeout_s):
            held = "an update" if self._writer is not None else f"{self._reader_count} reader(s)"
            raise Deadline(
                f"the model was not free within {time.monotonic() - start_s:.3g} s: {held} had it",
                hint="Read for a shorter time, or allow more (timeout_s, update_timeout_s)",
            )
