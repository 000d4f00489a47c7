"""Closes what nobody closed before the process ends."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet


class Unclosed(Protocol):
    """What has something to finish."""

    def _at_exit(self) -> None: ...


# What was not closed yet.
_OPEN: WeakSet[Unclosed] = WeakSet()


def close_at_exit(unclosed: Unclosed) -> None:
    """Have something closed at the end, if nobody did so before or let go of it."""
    _OPEN.add(unclosed)


def forget(closed: Unclosed) -> None:
    """It was closed."""
    _OPEN.discard(closed)


def _close_open() -> None:
    for unclosed in list(_OPEN):
        unclosed._at_exit()


# Not by atexit: that is after pools of threads refuse new work, which publishing needs.
threading._register_atexit(_close_open)  # type: ignore[attr-defined]
