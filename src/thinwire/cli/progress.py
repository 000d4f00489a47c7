"""Progress bars on stderr: for work over about a second, and only where someone looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY_S = 1.0


@contextmanager
def byte_progress(label: str, total_bytes: int | None) -> Iterator[Callable[[int], None] | None]:
    """A callback for ``on_bytes``, or None where stderr is no terminal.

    Without a total the bar only shows that something moves. It appears with the first bytes
    reported after ``DELAY_S`` and is gone at the end.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(label, total=total_bytes)
    start_s = time.monotonic()

    def on_bytes(byte_count: int) -> None:
        bar.advance(task, byte_count)
        if not bar.live.is_started and time.monotonic() - start_s >= DELAY_S:
            bar.start()

    try:
        yield on_bytes
    finally:
        bar.stop()


@contextmanager
def step_progress(total: int) -> Iterator[Callable[[str], None]]:
    """A callback that names the piece of work, of ``total``, that begins; silent off a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        # A thread that redraws would be counted in the CPU seconds that the bench measures.
        auto_refresh=False,
    )
    task = bar.add_task("", total=total)
    start_s = time.monotonic()
    begun_count = 0

    def begin(label: str) -> None:
        nonlocal begun_count
        bar.update(task, description=label, completed=begun_count)
        begun_count += 1
        if bar.live.is_started:
            bar.refresh()
        elif time.monotonic() - start_s >= DELAY_S:
            bar.start()

    try:
        yield begin
    finally:
        bar.stop()
