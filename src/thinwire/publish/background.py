"""Anchors and merged deltas beside a publisher: on a thread that gives way to every publish."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.follow import Stream
from thinwire.maintain import Maintainer
from thinwire.stream.events import Observers, Refused

# Even where nothing is published, there is something to prune or collect.
_EVERY_S = 600.0
_NICENESS = 10


class _Closing(Exception):
    pass


class Background:
    """Runs a maintainer when the publisher is idle.

    Args:
        stream: The stream.
        work_dir: Where the maintainer keeps its copies of the model.
        observers: Told of events and failures; these never reach the publisher.
        base: Where a copy of the model is that the stream begins with by reference.
        is_on: False: do nothing at all.
    """

    def __init__(
        self,
        stream: Stream,
        work_dir: Path,
        observers: Observers,
        *,
        base: str | os.PathLike[str] | None,
        is_on: bool,
    ) -> None:
        self._stream = stream
        self._work_dir = work_dir
        self._observers = observers
        self.base = base
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._has_work = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if is_on:
            self._thread = threading.Thread(target=self._run, name="thinwire-maintain", daemon=True)
            self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the thread at its next piece of work meanwhile."""
        self._is_idle.clear()
        try:
            yield
        finally:
            self._is_idle.set()

    def wake(self) -> None:
        """There is a new version."""
        self._has_work.set()

    def close(self) -> None:
        """End the thread; what it was making is dropped, and made again by the next maintainer."""
        self._is_closing = True
        self._has_work.set()
        self._is_idle.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # On Linux a thread has a niceness of its own.
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        with suppress(_Closing):
            while True:
                self._has_work.wait(_EVERY_S)
                self._has_work.clear()
                self._give_way()
                self._maintain()

    def _maintain(self) -> None:
        try:
            with Maintainer(
                self._stream,
                self._work_dir,
                base=self.base,
                is_background=True,
                give_way=self._give_way,
                observer=self._observers,
            ) as maintainer:
                maintainer.run_once()
        except _Closing:
            raise
        except Exception as error:
            # Whatever it is, the publisher must not suffer, and the next round may do better.
            code = error.code if isinstance(error, ThinwireError) else "bug"
            self._observers.on_event(
                Refused(
                    url=self._stream.url,
                    lineage="",
                    version=0,
                    code=code,
                    reason=f"maintenance: {error or type(error).__name__}",
                )
            )

    def _give_way(self) -> None:
        """Wait while a publish runs; end the thread where the publisher is closed."""
        self._is_idle.wait()
        if self._is_closing:
            raise _Closing
