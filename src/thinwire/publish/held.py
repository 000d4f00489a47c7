"""Which part of a tensor a rank holds, as indices of each dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Runs = tuple[tuple[int, int], ...]


class Held(NamedTuple):
    """A part of a tensor: of each dimension some half-open runs of indices, rising.

    Every sharding in use is of this form: rows over ranks (FSDP2), rows or columns over ranks
    (tensor parallel), both, with parts of unequal size or none at all. In memory the part is a
    contiguous tensor of its own, whose elements lie in the order of the whole one's: the element of
    the part that comes next also comes later in the whole. So whatever range of the whole is
    asked for, what the part holds of it is one range of the part.

    Attributes:
        shape: The whole tensor's shape.
        dims: The runs of each dimension.
    """

    shape: tuple[int, ...]
    dims: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Held:
        """All of a tensor."""
        return cls(tuple(shape), tuple(((0, n),) for n in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.dims)

    @property
    def whole_count(self) -> int:
        """How many elements the whole tensor has."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """How many elements the part has."""
        return math.prod(self.local_shape)

    @property
    def is_inside(self) -> bool:
        """Whether the runs of each dimension rise, and lie in the tensor."""
        return len(self.dims) == len(self.shape) and all(
            runs[0][0] >= 0
            and runs[-1][1] <= size
            and all(start <= stop for start, stop in runs)
            and all(stop <= start for (_, stop), (start, _) in pairwise(runs))
            for runs, size in zip(self.dims, self.shape, strict=True)
        )

    def before(self, elements: np.ndarray) -> np.ndarray:
        """How many elements of the part come before each place in the whole tensor (int64)."""
        found = np.zeros(elements.shape, np.int64)
        if self.size == 0:
            return found
        is_held = np.ones(elements.shape, bool)
        left = elements
        rest, local_rest = self.whole_count, self.size
        for size, runs, local_size in zip(self.shape, self.dims, self.local_shape, strict=True):
            rest //= size
            local_rest //= local_size
            index, left = np.divmod(left, rest)
            place, is_here = _places(runs, index)
            found += np.where(is_held, place * local_rest, 0)
            is_held &= is_here
        return np.where(elements >= self.whole_count, self.size, found)

    def to_whole(self, elements: np.ndarray) -> np.ndarray:
        """Where elements of the part (int64, by their place in it) lie in the whole tensor."""
        if self.size in (0, self.whole_count):
            return elements
        found = np.zeros(elements.shape, np.int64)
        left = elements
        rest, local_rest = self.whole_count, self.size
        for size, runs, local_size in zip(self.shape, self.dims, self.local_shape, strict=True):
            rest //= size
            local_rest //= local_size
            index, left = np.divmod(left, local_rest)
            found += _indices(runs, index) * rest
        return found


def runs_of(indices: Sequence[int]) -> Runs:
    """Rising indices as runs; none at all are one empty run."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return tuple(runs) or ((0, 0),)


def _places(runs: Runs, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many held indices come before each, and whether it is held itself."""
    starts = np.array([start for start, _ in runs], np.int64)
    sizes = np.array([stop - start for start, stop in runs], np.int64)
    before = np.concatenate([[0], np.cumsum(sizes)])
    number = np.maximum(np.searchsorted(starts, indices, side="right") - 1, 0)
    offset = indices - starts[number]
    is_held = (offset >= 0) & (offset < sizes[number])
    return before[number] + np.clip(offset, 0, sizes[number]), is_held


def _indices(runs: Runs, places: np.ndarray) -> np.ndarray:
    """The indices at places among the held ones."""
    if len(runs) == 1:
        return places + runs[0][0]
    starts = np.array([start for start, _ in runs], np.int64)
    sizes = np.array([stop - start for start, stop in runs], np.int64)
    ends = np.cumsum(sizes)
    number = np.searchsorted(ends, places, side="right")
    found: np.ndarray = starts[number] + places - (ends - sizes)[number]
    return found
