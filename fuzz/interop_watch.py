"""What a reader must never do, seen by Python itself: run, load, or touch what is not the input's.

Payloads among the seeds and mutations of the pickle-bearing targets ask for :func:`executed` and
for worse; the audit hook here sees either before it happens.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

from fuzz.target import Finding, require

# Importing one inside of a reader's run is no deed of the input's.
_LOADED_LATE = ("blake3", "xxhash", "bz2", "encodings.latin_1", "numpy.ma")

_FORBIDDEN = (
    "compile",
    "ctypes.",
    "exec",
    "import",
    "marshal.",
    "os.",
    "pickle.",
    "pty.",
    "shutil.",
    "socket.",
    "subprocess.",
    "webbrowser.",
)
_HARMLESS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk"}
_SHOWN_CHARS = 300


class _Watch:
    """What the hook knows; one per process, as hooks cannot be taken away again."""

    def __init__(self) -> None:
        self.rooms: tuple[str, ...] | None = None
        self.thread = 0
        self.seen: list[str] = []
        self.is_hooked = False


_watch = _Watch()


def executed(*args: object) -> str:
    """The function that planted payloads ask for."""
    _watch.seen.append(f"executed{args!r}"[:_SHOWN_CHARS])
    return "executed"


@contextmanager
def watched(room: Path, spool: Path) -> Iterator[None]:
    """Make a finding of everything inside that runs something or opens a file elsewhere.

    Args:
        room: The only folder in which files may be opened,
        spool: except for this one, which temporary files are made in.
    """
    if not _watch.is_hooked:
        for name in _LOADED_LATE:
            __import__(name)
        sys.addaudithook(_audit)
        _watch.is_hooked = True
    temporary, tempfile.tempdir = tempfile.tempdir, str(spool)
    _watch.seen.clear()
    _watch.thread = get_ident()
    _watch.rooms = (str(room), str(spool))
    try:
        yield
    finally:
        _watch.rooms = None
        tempfile.tempdir = temporary
    require(not _watch.seen, f"a reader did what no input may ask for: {_watch.seen[:3]}")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    rooms = _watch.rooms
    # What other threads of this process do is no deed of a reader's.
    if rooms is None or get_ident() != _watch.thread:
        return
    if event == "open":
        path = args[0]
        if isinstance(path, int) or any(_is_inside(os.fsdecode(path), room) for room in rooms):
            return
    elif event == "os.remove":
        # Where the system has no unnamed files, a temporary one loses its name at once.
        if _is_inside(os.fsdecode(args[0]), rooms[1]):
            return
    elif event in _HARMLESS or not event.startswith(_FORBIDDEN):
        return
    what = f"{event}{args!r}"[:_SHOWN_CHARS]
    _watch.seen.append(what)
    raise Finding(what)


def _is_inside(path: str, room: str) -> bool:
    """Whether a path lies in the room; also where dots lead out of it and back."""
    return os.path.normpath(path).startswith(room + os.sep) or path == room
