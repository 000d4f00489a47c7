"""Where each element of a checkpoint lives in an engine's parameters: a table of strided runs.

A run says that elements of one checkpoint tensor lie in one parameter at regular distances::

    parameter[start + r * jump + j]  is  tensor[source + r * source_jump + j * source_step]
                                     for r < repeat, j < length

Fused, sharded, padded and transposed parameters are all of that form, a few runs each. Positions
count elements in the order of memory, from the first element of a tensor or a parameter's storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.errors import Corrupt

Int64s = npt.NDArray[np.int64]


class Run(NamedTuple):
    """One run; see the module."""

    tensor: int
    parameter: int
    source: int
    start: int
    length: int
    source_step: int
    repeat: int
    source_jump: int
    jump: int

    @property
    def source_stop(self) -> int:
        """One more than the last element of the tensor that the run may hold."""
        last = self.source + (self.length - 1) * self.source_step
        return last + (self.repeat - 1) * self.source_jump + 1

    @property
    def element_count(self) -> int:
        """Elements that it places."""
        return self.length * self.repeat


_WIDTH = len(Run._fields)


class Places(NamedTuple):
    """Elements of one parameter that hold elements of a tensor, and which of those asked about."""

    parameter: int
    at: Int64s
    asked: Int64s


class IndexMap:
    """The runs of a model, or of one rank's share of it.

    Attributes:
        tensors: The checkpoint's tensors by name, with dtype and element count.
        parameters: The engine's parameters by name, with dtype and element count.
        runs: The table: a row of int64 for each run, sorted by tensor and place in it.
        refused: Why parameters are left out, by name: their elements cannot be placed.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[str, int]],
        parameters: Mapping[str, tuple[str, int]],
        runs: Int64s,
        refused: Mapping[str, str],
    ) -> None:
        """Put a map together from rows in any order.

        Raises:
            Corrupt: A run reaches beyond its tensor or its parameter.
        """
        self.tensors = dict(tensors)
        self.parameters = dict(parameters)
        self.refused = dict(refused)
        self._names = list(self.tensors)
        self._parameter_names = list(self.parameters)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        rows = runs.reshape(-1, _WIDTH)
        self.runs = np.ascontiguousarray(rows[np.lexsort((rows[:, 2], rows[:, 0]))])
        self._check()
        self._first = np.searchsorted(self.runs[:, 0], np.arange(len(self._names) + 1))

    @property
    def table_bytes(self) -> int:
        """What the table takes in memory."""
        return int(self.runs.nbytes)

    def parameter_name(self, number: int) -> str:
        """The name of a parameter by its number."""
        return self._parameter_names[number]

    def tensor_name(self, number: int) -> str:
        """The name of a tensor by its number."""
        return self._names[number]

    def runs_of(self, tensor: str) -> list[Run]:
        """The runs of a tensor; none where the engine, or this rank, does not hold it."""
        number = self._numbers[tensor]
        rows = self.runs[self._first[number] : self._first[number + 1]]
        return [Run(*row) for row in rows.tolist()]

    def held_count(self, tensor: str) -> int:
        """How many of a tensor's elements are held here; those held twice count twice."""
        return sum(run.element_count for run in self.runs_of(tensor))

    def places(self, tensor: str, positions: Int64s) -> Iterator[Places]:
        """Where elements of a tensor lie.

        Args:
            tensor: Its name.
            positions: Rising positions in it.
        """
        for run in self.runs_of(tensor):
            low = int(np.searchsorted(positions, run.source))
            high = int(np.searchsorted(positions, run.source_stop))
            if low < high:
                at, kept = _invert(run, positions[low:high])
                if at.size:
                    yield Places(run.parameter, at, kept + low)

    def sources(self, parameter: int, at: Int64s) -> tuple[Int64s, Int64s]:
        """Which tensors, and which elements of them, a parameter's elements hold; -1: none.

        Args:
            parameter: Its number.
            at: Rising places in it.
        """
        tensors, elements = np.full(at.size, -1, np.int64), np.full(at.size, -1, np.int64)
        for run in map(Run._make, self.runs[self.runs[:, 1] == parameter].tolist()):
            stop = run.start + (run.repeat - 1) * run.jump + run.length
            low, high = np.searchsorted(at, [run.start, stop])
            row, column = np.divmod(at[low:high] - run.start, run.jump if run.repeat > 1 else stop)
            kept = low + np.flatnonzero(column < run.length)
            row, column = row[kept - low], column[kept - low]
            tensors[kept] = run.tensor
            elements[kept] = run.source + row * run.source_jump + column * run.source_step
        return tensors, elements

    def without(self, parameters: Mapping[str, str]) -> IndexMap:
        """The same map without some parameters, which are refused for the reasons given."""
        numbers = [n for n, name in enumerate(self._parameter_names) if name in parameters]
        kept = self.runs[~np.isin(self.runs[:, 1], numbers)]
        return IndexMap(self.tensors, self.parameters, kept, {**self.refused, **parameters})

    def _check(self) -> None:
        """Whoever scatters by the map writes to memory: every run must stay inside."""
        rows = self.runs
        if not len(rows):
            return
        tensor, parameter, source, start, length, step, repeat, source_jump, jump = rows.T
        sizes = np.array([count for _, count in self.tensors.values()], np.int64)
        rooms = np.array([count for _, count in self.parameters.values()], np.int64)
        limit = 1 << 48
        is_sound = bool((rows >= 0).all() and (rows < limit).all())
        is_sound &= bool((tensor < sizes.size).all() and (parameter < rooms.size).all())
        is_sound &= bool((length > 0).all() and (repeat > 0).all() and (step > 0).all())
        if is_sound:
            # As floats first: products of crafted numbers must not wrap around.
            reach = source + (length - 1) * step.astype(float)
            reach += (repeat - 1) * source_jump.astype(float)
            room = start + (length - 1) + (repeat - 1) * jump.astype(float)
            is_sound = bool((reach < sizes[tensor]).all() and (room < rooms[parameter]).all())
            # Rows of a run must be told from each other, in the tensor and in the parameter.
            is_apart = source_jump > (length - 1) * step.astype(float)
            is_apart |= (source_jump > 0) & (step > (repeat - 1) * source_jump.astype(float))
            is_sound &= bool(((repeat == 1) | is_apart & (jump >= length)).all())
        if not is_sound:
            raise Corrupt("an index map has runs outside its tensors or parameters")


def _invert(run: Run, positions: Int64s) -> tuple[Int64s, Int64s]:
    """Where positions in a tensor lie in the run's parameter, and which of them the run holds."""
    behind = positions - run.source
    if run.repeat == 1:
        column, rest = (behind, None) if run.source_step == 1 else divmod(behind, run.source_step)
        row = np.zeros_like(column)
    elif run.source_jump > (run.length - 1) * run.source_step:
        row, inner = np.divmod(behind, run.source_jump)
        column, rest = (inner, None) if run.source_step == 1 else divmod(inner, run.source_step)
    else:
        column, inner = np.divmod(behind, run.source_step)
        row, rest = (inner, None) if run.source_jump == 1 else divmod(inner, run.source_jump)
    is_held = (column < run.length) & (row < run.repeat)
    if rest is not None:
        is_held &= rest == 0
    kept = np.flatnonzero(is_held)
    return run.start + row[kept] * run.jump + column[kept], kept


def find_runs(ids: Int64s, start: int) -> Int64s:
    """Maximal runs in a piece of a parameter: rows of (start, id, step, length).

    Args:
        ids: Which element lies at each place; negative: none.
        start: The place of the first.
    """
    if not ids.size:
        return np.empty((0, 4), np.int64)
    step = np.diff(ids)
    # A jump between two runs differs from the steps beside it; a step of one is never a jump.
    inside = step == 1
    if step.size > 1:
        same = step[1:] == step[:-1]
        inside[1:] |= same
        inside[:-1] |= same
        # Two runs of different steps back to back: the first step of the second one is the jump.
        inside[1:] &= same | ~inside[:-1]
    inside &= step > 0
    held = ids >= 0
    inside &= held[1:] & held[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~inside]))
    length = np.diff(np.append(first, ids.size))
    steps = np.append(step, 1)[first]
    rows = np.stack([start + first, ids[first], np.where(length > 1, steps, 1), length], axis=1)
    return rows[held[first]]


def join_runs(rows: Int64s) -> Int64s:
    """Join runs of (start, id, step, length) that a cut between two pieces took apart."""
    if len(rows) < 2:
        return rows
    start, ids, step, length = rows.T
    follows = start[1:] == start[:-1] + length[:-1]
    one = length == 1
    joint = np.where(one[:-1], np.where(one[1:], 0, step[1:]), step[:-1])
    follows &= ids[1:] == ids[:-1] + length[:-1] * joint
    follows &= (step[1:] == joint) | one[1:]
    follows &= joint > 0
    # A single element may go on with the run before it or begin the one behind it, not both.
    follows[1:] &= ~(follows[:-1] & (joint[1:] != joint[:-1]))
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    joined = rows[first]
    joined[:, 3] = np.add.reduceat(length, first)
    # The step of a run that begins with a single element is that of what it was joined to.
    steps = np.maximum.reduceat(np.where(one, 1, step), first)
    joined[:, 2] = steps
    return joined


def fold_runs(rows: Int64s) -> Int64s:
    """Fold runs of (start, id, step, length) that repeat at one distance.

    Returns:
        Rows of (id, start, length, step, repeat, id jump, jump).
    """
    if not len(rows):
        return np.empty((0, 7), np.int64)
    start, ids, step, length = rows.T
    jumps = np.stack([np.diff(ids), np.diff(start)], axis=1)
    alike = (step[1:] == step[:-1]) & (length[1:] == length[:-1]) & (jumps > 0).all(axis=1)
    # A row of the fold must be told from the next by the larger of step and jump.
    span = (length[:-1] - 1) * step[:-1]
    alike &= (jumps[:, 0] > span) | (step[:-1] > jumps[:, 0])
    inside = alike.copy()
    if len(jumps) > 1:
        same = (jumps[1:] == jumps[:-1]).all(axis=1) & alike[1:] & alike[:-1]
        inside[:] = False
        inside[1:] |= same
        inside[:-1] |= same
        inside[1:] &= same | ~inside[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~inside]))
    repeat = np.diff(np.append(first, len(rows)))
    is_one = repeat == 1
    padded = np.concatenate([jumps, [[1, 1]]])[first]
    padded[is_one] = 1
    folded = np.stack(
        [ids[first], start[first], length[first], step[first], repeat, padded[:, 0], padded[:, 1]],
        axis=1,
    )
    # Interleaved rows: the last of them must end before the second element of the first.
    crossed = (folded[:, 3] > folded[:, 5]) & ~is_one
    wide = crossed & ((folded[:, 4] - 1) * folded[:, 5] >= folded[:, 3])
    if not wide.any():
        return folded
    kept = [row for row, is_wide in zip(folded, wide, strict=True) if not is_wide]
    for row in folded[wide]:
        kept += list(_unfolded(row))
    return np.array(kept, np.int64).reshape(-1, 7)


def _unfolded(row: Int64s) -> Sequence[Int64s]:
    ids, start, length, step, repeat, id_jump, jump = row.tolist()
    return [
        np.array([ids + r * id_jump, start + r * jump, length, step, 1, 1, 1], np.int64)
        for r in range(repeat)
    ]
