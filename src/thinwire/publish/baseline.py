"""What a rank remembers of the last committed version: what it compares with, and codes against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.codec.digest import tensor_digest, xxh3_64
from thinwire.errors import TensorMismatch
from thinwire.publish.staging import Found
from thinwire.publish.units import Plan, Source, Unit

# Arrays begin at multiples of this: the kernels read words, and caches lines.
_ALIGN_BYTES = 64
# Makes room for so many bytes.
Allocate = Callable[[int], np.ndarray]


class Region(NamedTuple):
    """What a rank captures of one unit.

    Attributes:
        unit: The unit.
        source: The rank's own source of it.
        baseline: Its bytes at the last committed version; writable.
    """

    unit: Unit
    source: Source
    baseline: np.ndarray


class Changes(NamedTuple):
    """What differs in a unit, from all its sources: rising positions in it, and new words."""

    positions: np.ndarray
    words: np.ndarray


def check_same(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise unless a checkpoint has every tensor that is published.

    Raises:
        TensorMismatch: It lacks a tensor, or has it in another dtype or shape.
    """
    for spread in plan.spreads:
        found = checkpoint.tensors.get(spread.name)
        if found is None:
            raise _mismatch(spread.name, "is not in the stream")
        facts = (found.dtype, tuple(found.shape))
        if facts != (spread.dtype, spread.shape):
            raise _mismatch(
                spread.name,
                f"is published as {spread.dtype} {list(spread.shape)}, the stream has "
                f"{found.dtype} {list(found.shape)}",
            )


def in_memory(size_bytes: int) -> np.ndarray:
    """Ordinary memory."""
    return np.empty(size_bytes, np.uint8)


class Baseline:
    """One rank's share of the last committed version.

    It holds what the rank captures, as it lies in the rank's own tensors, and besides whole units
    that it encodes from what several ranks capture. That is the rank's share of the model and some
    chunks besides; at most twice the share, where no rank has a chunk for itself.

    Args:
        plan: Who does what.
        rank: This rank.
        allocate: Makes the memory.
    """

    def __init__(self, plan: Plan, rank: int, allocate: Allocate = in_memory) -> None:
        self.plan = plan
        self.rank = rank
        self.units = {plan.place_of(unit): unit for unit in plan.units_for(rank)}
        sizes: list[tuple[int, bool, int]] = []
        inside: dict[int, tuple[int, int]] = {}
        for place, unit in self.units.items():
            word_bytes = plan.spreads[unit.tensor].word_bytes
            source = self._source(unit)
            is_whole = unit.owner == rank and not unit.is_own
            if is_whole:
                sizes.append((place, False, (unit.stop - unit.start) * word_bytes))
            if source is not None:
                count = source.stop - source.start
                first, last = in_unit(plan, unit, source, np.array([0, count - 1])).tolist()
                if is_whole and last - first == count - 1:
                    # In one piece: what is captured lies in the whole unit.
                    inside[place] = (first * word_bytes, (last + 1) * word_bytes)
                else:
                    sizes.append((place, True, count * word_bytes))
        self.byte_count = sum(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for _, _, size in sizes)
        memory = allocate(self.byte_count)
        self._captured: dict[int, np.ndarray] = {}
        self._whole: dict[int, np.ndarray] = {}
        at = 0
        for place, is_captured, size in sizes:
            (self._captured if is_captured else self._whole)[place] = memory[at : at + size]
            at += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        for place, (start, stop) in inside.items():
            self._captured[place] = self._whole[place][start:stop]
        # Of the units that this rank owns: of small ones the tensor's digest, else the chunk's.
        self.digests: dict[int, int] = {}

    def regions(self) -> Iterator[Region]:
        """What this rank captures, in the order of the tensors."""
        for place, unit in self.units.items():
            source = self._source(unit)
            if source is not None:
                yield Region(unit, source, self._captured[place])

    def owned(self) -> Iterator[tuple[int, Unit]]:
        """The units that this rank encodes, by place."""
        for place, unit in self.units.items():
            if unit.owner == self.rank:
                yield place, unit

    def whole(self, place: int) -> np.ndarray:
        """The bytes of a unit that this rank owns."""
        found = self._whole.get(place)
        return self._captured[place] if found is None else found

    def digest_owned(self) -> None:
        """Compute the digests of all owned units from their bytes."""
        for place, unit in self.owned():
            data = self.whole(place)
            if self.plan.is_small(unit.tensor):
                self.digests[place] = tensor_digest(self.plan.spreads[unit.tensor].dtype, data)
            else:
                self.digests[place] = xxh3_64(data)

    def fill(self, checkpoint: Checkpoint) -> None:
        """Take everything from a checkpoint, which holds the last committed version.

        Raises:
            TensorMismatch: It lacks a tensor, or has it in another dtype or shape.
        """
        check_same(self.plan, checkpoint)
        for place, unit in self.units.items():
            spread = self.plan.spreads[unit.tensor]
            found = checkpoint.tensors[spread.name]
            data = found.data[unit.start * spread.word_bytes : unit.stop * spread.word_bytes]
            if place in self._whole:
                self._whole[place][:] = data
            source = self._source(unit)
            if source is not None:
                self._captured[place][:] = self._part_of(unit, source, data)

    def put(self, place: int, number: int, data: np.ndarray) -> None:
        """Fill a source's part of a unit that this rank owns whole, from the source's raw bytes."""
        whole = self._whole.get(place)
        if whole is not None:
            scatter(self.plan, self.units[place], self.units[place].sources[number], data, whole)

    def merged(self, place: int, found: Mapping[int, list[Found]]) -> Changes:
        """What differs in a unit that this rank owns.

        Args:
            place: The unit's place.
            found: What each source found, by the source's number.
        """
        unit = self.units[place]
        word_bytes = self.plan.spreads[unit.tensor].word_bytes
        positions: list[np.ndarray] = []
        words: list[np.ndarray] = []
        for number, runs in sorted(found.items()):
            for run in runs:
                count = run.words.size // word_bytes
                at = np.arange(count, dtype=np.int64) if run.positions is None else run.positions
                local = at.astype(np.int64) + run.start
                positions.append(in_unit(self.plan, unit, unit.sources[number], local))
                words.append(as_words(run.words, word_bytes))
        if not positions:
            return Changes(np.empty(0, np.int64), np.empty(0, np.uint8))
        all_positions = np.concatenate(positions)
        all_words = np.concatenate(words)
        if len(found) > 1:
            order = np.argsort(all_positions, kind="stable")
            all_positions, all_words = all_positions[order], all_words[order]
        return Changes(all_positions, all_words.view(np.uint8))

    def apply_captured(self, place: int, found: list[Found]) -> None:
        """Move what this rank captures of a unit to the new version."""
        word_bytes = self.plan.spreads[self.units[place].tensor].word_bytes
        words = as_words(self._captured[place], word_bytes)
        for run in found:
            new = as_words(run.words, word_bytes)
            if run.positions is None:
                words[run.start : run.start + len(new)] = new
            else:
                words[run.positions.astype(np.int64) + run.start] = new

    def apply_owned(self, place: int, changes: Changes, digest: int) -> None:
        """Move an owned unit to the new version; one that it captures alone is there already."""
        whole = self._whole.get(place)
        if whole is not None:
            word_bytes = self.plan.spreads[self.units[place].tensor].word_bytes
            scattered = as_words(whole, word_bytes)
            scattered[changes.positions] = as_words(changes.words, word_bytes)
        self.digests[place] = digest

    def captured(self, place: int) -> np.ndarray:
        """What this rank captures of a unit."""
        return self._captured[place]

    def _source(self, unit: Unit) -> Source | None:
        return next((source for source in unit.sources if source.rank == self.rank), None)

    def _part_of(self, unit: Unit, source: Source, data: np.ndarray) -> np.ndarray:
        """What a source holds of a unit, from the unit's bytes."""
        if source.stop - source.start == unit.stop - unit.start:
            return data
        word_bytes = self.plan.spreads[unit.tensor].word_bytes
        local = np.arange(source.stop - source.start, dtype=np.int64)
        places = in_unit(self.plan, unit, source, local)
        part: np.ndarray = as_words(data, word_bytes)[places].view(np.uint8)
        return part


def as_words(data: np.ndarray, word_bytes: int) -> np.ndarray:
    """Bytes as whole numbers, one a word."""
    return data.view(f"<u{word_bytes}")


def in_unit(plan: Plan, unit: Unit, source: Source, local: np.ndarray) -> np.ndarray:
    """Where words of a source's range (int64, from its start on) lie in the unit."""
    if source.stop - source.start == unit.stop - unit.start:
        return local
    spread = plan.spreads[unit.tensor]
    per_element = max(1, spread.word_count // max(1, spread.parts[source.part].whole_count))
    element, rest = np.divmod(local + source.start, per_element)
    return spread.parts[source.part].to_whole(element) * per_element + rest - unit.start


def scatter(plan: Plan, unit: Unit, source: Source, data: np.ndarray, out: np.ndarray) -> None:
    """Put a source's raw bytes of a unit where they belong in the unit's bytes."""
    if data.size == out.size:
        out[:] = data
        return
    word_bytes = plan.spreads[unit.tensor].word_bytes
    words = as_words(data, word_bytes)
    places = in_unit(plan, unit, source, np.arange(len(words), dtype=np.int64))
    as_words(out, word_bytes)[places] = words


def _mismatch(name: str, reason: str) -> TensorMismatch:
    return TensorMismatch(
        f"tensor {name!r} {reason}",
        hint="Publish under the names and in the dtypes that the stream has (rename=, dtype=, "
        "dtypes=), or begin another stream",
        tensor=name,
    )
