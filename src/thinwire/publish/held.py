"""Which part of a tensor a rank holds, as indices of each dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def before(self, element: int) -> int:
        """How many elements of the part come before one of the whole tensor, or its end."""
        if element >= self.whole_count:
            return self.size
        found = 0
        local_rest = self.size
        rest = self.whole_count
        for size, runs, local_size in zip(self.shape, self.dims, self.local_shape, strict=True):
            if local_rest == 0:
                return 0
            rest //= size
            local_rest //= local_size
            index, element = divmod(element, rest)
            at, is_held = _place(runs, index)
            found += at * local_rest
            if not is_held:
                return found
        return found

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

    def take(self, whole: np.ndarray) -> np.ndarray:
        """The part of a whole tensor, contiguous; a view where that is possible.

        Args:
            whole: An array of the whole tensor's shape, which may have more dimensions behind.
        """
        for axis, runs in enumerate(self.dims):
            pieces = [whole[(slice(None),) * axis + (slice(*run),)] for run in runs]
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)
        return np.ascontiguousarray(whole).reshape(self.local_shape + whole.shape[len(self.dims) :])


def runs_of(indices: Sequence[int]) -> Runs:
    """Rising indices as runs; none at all are one empty run."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return tuple(runs) or ((0, 0),)


def _place(runs: Runs, index: int) -> tuple[int, bool]:
    """How many held indices come before one, and whether it is held itself."""
    before = 0
    for start, stop in runs:
        if index < start:
            break
        if index < stop:
            return before + index - start, True
        before += stop - start
    return before, False


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
