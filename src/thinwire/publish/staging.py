"""What was captured and not committed yet: the changes, kept within a budget of memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from thinwire.checkpoint.disk import os_errors
from thinwire.errors import Truncated


class Found(NamedTuple):
    """Words of a run that differ from the baseline.

    Attributes:
        start: Where the run begins in its unit, as the capturing rank holds it, in words.
        positions: Where they are, from the run's start on: uint32, rising; None: every word of the
            run is here, whether it differs or not.
        words: Their new bits: uint8.
    """

    start: int
    positions: np.ndarray | None
    words: np.ndarray

    @property
    def byte_count(self) -> int:
        """Memory it takes."""
        return self.words.size + (0 if self.positions is None else 4 * self.positions.size)


class _Filed(NamedTuple):
    start: int
    offset: int
    positions_bytes: int | None
    words_bytes: int

    @property
    def byte_count(self) -> int:
        return self.words_bytes + (self.positions_bytes or 0)


class Staging:
    """The changes of one capture by unit; beyond the budget they go to a file without a name.

    Args:
        folder: Where the file is made, should it be needed.
        budget_bytes: What may lie in memory.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._left_bytes = budget_bytes
        self._file: BinaryIO | None = None
        self._units: dict[int, list[Found | _Filed]] = {}
        self.changed_bytes = 0

    def add(self, unit: int, found: Found) -> None:
        """Keep what was found in a run of a unit; the arrays are not copied."""
        self.changed_bytes += found.byte_count
        kept: Found | _Filed = found
        if found.byte_count > self._left_bytes:
            kept = self._to_file(found)
        else:
            self._left_bytes -= found.byte_count
        self._units.setdefault(unit, []).append(kept)

    def of(self, unit: int) -> Iterator[Found]:
        """What was found in a unit, run by run."""
        for kept in self._units.get(unit, ()):
            yield self._from_file(kept) if isinstance(kept, _Filed) else kept

    def bytes_of(self, unit: int) -> int:
        """What was found in a unit, in bytes."""
        return sum(kept.byte_count for kept in self._units.get(unit, ()))

    def another(self) -> Staging:
        """An empty one beside this one, with what is left of its budget."""
        left_bytes, self._left_bytes = self._left_bytes // 2, self._left_bytes // 2
        return Staging(self._folder, left_bytes)

    def units(self) -> list[int]:
        """The units in which something differs."""
        return list(self._units)

    def close(self) -> None:
        """Forget everything."""
        self._units.clear()
        if self._file is not None:
            self._file.close()

    def _to_file(self, found: Found) -> _Filed:
        with os_errors("cannot write", self._folder):
            if self._file is None:
                self._file = nameless(self._folder)
            offset = self._file.seek(0, 2)
            size = None
            if found.positions is not None:
                size = self._file.write(found.positions.astype("<u4", copy=False).data)
            words = self._file.write(found.words.data)
            return _Filed(found.start, offset, size, words)

    def _from_file(self, filed: _Filed) -> Found:
        assert self._file is not None
        size = (filed.positions_bytes or 0) + filed.words_bytes
        # Several threads read at once: none may move the file's position.
        with os_errors("cannot read", self._folder):
            self._file.flush()
            data = os.pread(self._file.fileno(), size, filed.offset)
        if len(data) != size:
            raise Truncated(f"the file of captured changes in {self._folder} lost its end")
        positions = None
        if filed.positions_bytes is not None:
            positions = np.frombuffer(data, "<u4", filed.positions_bytes // 4)
        words = np.frombuffer(data, np.uint8, filed.words_bytes, filed.positions_bytes or 0)
        return Found(filed.start, positions, words)


def nameless(folder: Path) -> BinaryIO:
    """A file that is gone once it is closed."""
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))
