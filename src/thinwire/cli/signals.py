"""SIGTERM and Ctrl-C: to end after the running step, or at once with everything tidied up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[threading.Event]:
    """Call ``stop`` once at SIGTERM or Ctrl-C; a second one interrupts whatever still runs.

    Yields an event that is set from then on. ``stop`` runs in a thread of its own: a handler runs
    between two instructions of the main thread, which may hold the very lock that it needs.
    """
    # Its put may interrupt a put: safe in a handler, as an event's set is not.
    signals: SimpleQueue[bool] = SimpleQueue()
    is_stopped = threading.Event()
    is_asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True
        signals.put(True)

    def watch() -> None:
        if signals.get():
            is_stopped.set()
            stop()

    watcher = threading.Thread(target=watch, name="thinwire-signals", daemon=True)
    watcher.start()
    try:
        with _handled(on_signal):
            yield is_stopped
    finally:
        signals.put(False)
        watcher.join()


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that temporary files are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
