"""Coded sections that wait for the container they are put into."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from thinwire.checkpoint.disk import os_errors
from thinwire.codec.write import Facts
from thinwire.publish.messages import SentUnit
from thinwire.publish.staging import nameless


class Kept(NamedTuple):
    """A coded unit of a container to be assembled here; its section lies in the spool."""

    start: int
    size: int
    facts: Facts
    steps: tuple[list[int], list[int]]


class Spool:
    """Sections that wait for their container, in a file without a name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        with os_errors("cannot write", self._folder):
            self._file = nameless(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, sent: SentUnit) -> Kept:
        """Put a unit's section aside."""
        assert self._file is not None
        facts = Facts(sent.changed_count, sent.base_digest, sent.new_digest)
        with os_errors("cannot write", self._folder):
            start = self._file.seek(0, 2)
            self._file.write(sent.section)
        return Kept(start, len(sent.section), facts, sent.steps)

    def section(self, kept: Kept) -> bytes:
        """A section that was put aside."""
        assert self._file is not None
        with os_errors("cannot read", self._folder):
            self._file.seek(kept.start)
            return self._file.read(kept.size)
