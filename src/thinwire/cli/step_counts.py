"""Step sizes of changes, counted by octave as the container counts them for a whole delta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from thinwire.codec.delta import ChunkChanges
from thinwire.codec.dtypes import DType, dtype_named

OCTAVES = 64


class StepCounts(NamedTuple):
    """Changes down and up whose size in steps is 2**octave to 2**(octave + 1) - 1."""

    down: list[int]
    up: list[int]

    @property
    def total(self) -> int:
        """Changes both ways."""
        return sum(self.down) + sum(self.up)

    def of_octaves(self, first: int, end: int | None = None) -> int:
        """Changes both ways of these octaves."""
        return sum(self.down[first:end]) + sum(self.up[first:end])


def count_steps(
    bases: Mapping[str, np.ndarray], dtypes: Mapping[str, str], changes: Iterable[ChunkChanges]
) -> dict[str, StepCounts]:
    """The steps of each tensor that changes; ``dtypes`` say how to read the uint8 ``bases``."""
    counts: dict[str, np.ndarray] = {}
    for change in changes:
        row = dtype_named(dtypes[change.name])
        positions = change.positions.astype(np.int64) + change.first_word
        old = bases[change.name].reshape(-1, row.word_bytes)[positions].reshape(-1)
        octaves, is_up = _steps(row, old, change.words)
        counted = counts.setdefault(change.name, np.zeros((2, OCTAVES), np.int64))
        for direction in (0, 1):
            counted[direction] += np.bincount(octaves[is_up == direction], minlength=OCTAVES)
    return {name: StepCounts(*map(_trimmed, counted)) for name, counted in counts.items()}


def octave_label(octave: int) -> str:
    """The sizes of an octave: "1", "2-3", "4-7", ..."""
    return "1" if octave == 0 else f"{1 << octave}-{(2 << octave) - 1}"


def _steps(row: DType, old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Octave of the size of each change, and whether it goes up."""
    step = _ordered(row, new) - _ordered(row, old)
    is_up = step >> step.dtype.type(8 * row.word_bytes - 1) == 0
    size = np.where(is_up, step, np.negative(step)).astype(np.uint64)
    octaves = np.zeros(size.size, np.int64)
    # By halves, because a logarithm in floating point is wrong just below large powers of two.
    for shift in (32, 16, 8, 4, 2, 1):
        is_larger = size >> np.uint64(shift) != 0
        octaves[is_larger] += shift
        size[is_larger] >>= np.uint64(shift)
    return octaves, is_up


def _ordered(row: DType, words: np.ndarray) -> np.ndarray:
    """Words whose unsigned order is the order of the values; steps wrap modulo the word."""
    bits = np.ascontiguousarray(words).view(f"<u{row.word_bytes}")
    if not row.ordered:
        return bits
    sign = bits.dtype.type(1 << (8 * row.word_bytes - 1))
    return np.where(bits & sign != 0, ~bits, bits | sign)


def _trimmed(counts: np.ndarray) -> list[int]:
    return [int(count) for count in np.trim_zeros(counts, "b")]
