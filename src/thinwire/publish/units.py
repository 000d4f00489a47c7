"""Who encodes what: tensors cut into units, units given to ranks. Every rank decides the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from thinwire.codec.digest import CHUNK_WORDS
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.codec.plan import GROUP_WORDS, SMALL_WORDS
from thinwire.errors import TensorMismatch
from thinwire.publish.held import Held, Runs

# So many ranks at most assemble and upload: a follower opens each shard.
MAX_CONTAINERS = 64
# A container is no larger than this, raw: followers fetch them side by side.
CONTAINER_RAW_BYTES = 32 << 30


class Layout(NamedTuple):
    """How tensors of one shape are spread over ranks; most tensors of a model share a few of them.

    Attributes:
        shape: The whole shape.
        parts: The different parts that there are: together they are the tensor.
        holders: Of each part, the ranks that hold it, rising.
    """

    shape: tuple[int, ...]
    parts: tuple[Held, ...]
    holders: tuple[tuple[int, ...], ...]


class Spread(NamedTuple):
    """A tensor, and how it is spread over ranks.

    Attributes:
        name: Its published name.
        dtype: Its published dtype, by its safetensors name.
        shape: Its whole shape.
        layout: Which rank holds what.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def parts(self) -> tuple[Held, ...]:
        """The different parts that there are."""
        return self.layout.parts

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Of each part, the ranks that hold it, rising."""
        return self.layout.holders

    @property
    def word_count(self) -> int:
        """Words of the whole tensor."""
        return self.byte_count // self.word_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes of a word."""
        return dtype_named(self.dtype).word_bytes

    @property
    def byte_count(self) -> int:
        """Bytes of the whole tensor."""
        return byte_count(self.dtype, self.shape)


class Source(NamedTuple):
    """Who captures what of a unit.

    Attributes:
        rank: The rank.
        part: The number of the part of the tensor that it holds.
        start: Where the unit begins in that part, in words.
        stop: Where it ends.
    """

    rank: int
    part: int
    start: int
    stop: int


class Unit(NamedTuple):
    """A chunk of a large tensor, or the whole of a small one: what one rank encodes.

    Attributes:
        tensor: The tensor's number.
        number: The unit's number in the tensor.
        start: Its first word.
        stop: The word after its last one.
        owner: The rank that encodes it.
        sources: Whose captures make it up.
    """

    tensor: int
    number: int
    start: int
    stop: int
    owner: int
    sources: tuple[Source, ...]

    @property
    def is_own(self) -> bool:
        """Whether the owner captures all of it, and nobody sends anything."""
        return len(self.sources) == 1 and self.sources[0].rank == self.owner


class Plan:
    """Which rank captures, encodes and uploads what.

    Large tensors are cut into the codec's chunks of 2**20 words. A chunk is encoded by the rank
    that holds most of it, or by one of those that hold a part, in turn; the others send it what
    they found. A part that several ranks hold is captured by one of them, tensor by tensor in turn.
    Small tensors are encoded by the rank that assembles their container, since they share chunks.

    Attributes:
        spreads: The tensors, in the order of the stream.
        containers: The numbers of each container's tensors.
        homes: The rank that assembles and uploads each container.
    """

    def __init__(self, spreads: Sequence[Spread], rank_count: int) -> None:
        # Tensors share layouts, which have a thousand parts on a thousand ranks.
        for spread in {id(spread.layout): spread for spread in reversed(spreads)}.values():
            if not _is_covered(spread.layout):
                raise _not_whole(spread)
        self.spreads = tuple(spreads)
        self.containers = _containers(self.spreads, rank_count)
        self.homes = [k * rank_count // len(self.containers) for k in range(len(self.containers))]
        if len(self.containers) > rank_count:
            self.homes = [k % rank_count for k in range(len(self.containers))]
        self._home_of = {
            tensor: home
            for home, tensors in zip(self.homes, self.containers, strict=True)
            for tensor in tensors
        }
        counts = [self.unit_count(tensor) for tensor in range(len(self.spreads))]
        self._first_units = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._cuts: dict[tuple[int, int], np.ndarray] = {}

    def is_small(self, tensor: int) -> bool:
        """Whether a tensor shares a chunk with others."""
        return self.spreads[tensor].word_count < SMALL_WORDS

    def unit_count(self, tensor: int) -> int:
        """Units of a tensor."""
        if self.is_small(tensor):
            return 1
        return -(-self.spreads[tensor].word_count // CHUNK_WORDS)

    @property
    def total_units(self) -> int:
        """Units of all tensors."""
        return int(self._first_units[-1])

    @property
    def total_words(self) -> int:
        """Words of all tensors."""
        return sum(spread.word_count for spread in self.spreads)

    def place_of(self, unit: Unit) -> int:
        """The number of a unit among all of them."""
        return int(self._first_units[unit.tensor]) + unit.number

    def units_of(self, tensor: int) -> Iterator[Unit]:
        """The units of a tensor, in order."""
        for number in range(self.unit_count(tensor)):
            yield self.unit(tensor, number)

    def unit_at(self, place: int) -> Unit:
        """The unit of that number among all of them."""
        tensor = int(np.searchsorted(self._first_units, place, side="right")) - 1
        return self.unit(tensor, place - int(self._first_units[tensor]))

    def home_of(self, tensor: int) -> int:
        """The rank that assembles a tensor's container."""
        return self._home_of[tensor]

    def units_for(self, rank: int) -> Iterator[Unit]:
        """The units that a rank has to do with: it owns them, or captures a part."""
        parts: dict[int, int | None] = {}
        for tensor, spread in enumerate(self.spreads):
            key = id(spread.layout)
            if key not in parts:
                held = (k for k, ranks in enumerate(spread.holders) if rank in ranks)
                parts[key] = next(held, None)
            own = parts[key]
            numbers: Iterable[int] = ()
            if self.is_small(tensor):
                numbers = (0,)
            elif own is not None:
                cuts = self._part_cuts(tensor)[own]
                numbers = np.flatnonzero(cuts[1:] > cuts[:-1]).tolist()
            for number in numbers:
                unit = self.unit(tensor, number)
                if unit.owner == rank or any(source.rank == rank for source in unit.sources):
                    yield unit

    def groups(self, container: int) -> list[list[int]]:
        """The small tensors of a container, as they share chunks."""
        groups: list[list[int]] = []
        open_groups: dict[str, tuple[list[int], int]] = {}
        for tensor in self.containers[container]:
            if not self.is_small(tensor):
                continue
            spread = self.spreads[tensor]
            members, total = open_groups.get(spread.dtype, ([], 0))
            if not members:
                groups.append(members)
            members.append(tensor)
            total += spread.word_count
            open_groups[spread.dtype] = ([], 0) if total >= GROUP_WORDS else (members, total)
        return groups

    def unit(self, tensor: int, number: int) -> Unit:
        """A unit of a tensor."""
        spread = self.spreads[tensor]
        words = spread.word_count
        step = max(1, words) if self.is_small(tensor) else CHUNK_WORDS
        start, stop = number * step, min((number + 1) * step, words)
        cuts = self._part_cuts(tensor)
        sources = []
        for part in np.flatnonzero(cuts[:, number + 1] > cuts[:, number]).tolist():
            holders = spread.holders[part]
            # A part comes from one rank, so that it is weights that one rank had.
            rank = holders[tensor % len(holders)]
            sources.append(Source(rank, part, int(cuts[part, number]), int(cuts[part, number + 1])))
        if self.is_small(tensor) or not sources:
            owner = self.home_of(tensor)
        else:
            largest = max(sources, key=lambda source: source.stop - source.start)
            is_mostly = 2 * (largest.stop - largest.start) > stop - start
            # In turn, where nobody has most of it.
            owner = (largest if is_mostly else sources[(tensor + number) % len(sources)]).rank
        return Unit(tensor, number, start, stop, owner, tuple(sources))

    def _part_cuts(self, tensor: int) -> np.ndarray:
        """Where the units begin in each part, and the end of the last one: a row for each part."""
        spread = self.spreads[tensor]
        words = spread.word_count
        key = (id(spread.layout), words)
        found = self._cuts.get(key)
        if found is None:
            per_element = max(1, words // max(1, math.prod(spread.shape)))
            step = max(1, words) if self.is_small(tensor) else CHUNK_WORDS
            marks = np.array([*range(0, max(1, words), step), words], np.int64) // per_element
            found = np.stack([part.before(marks) * per_element for part in spread.parts])
            self._cuts[key] = found
        return found


def _not_whole(spread: Spread) -> TensorMismatch:
    return TensorMismatch(
        f"tensor {spread.name!r} is not whole: its ranks hold "
        f"{sum(part.size for part in spread.parts)} elements of {math.prod(spread.shape)}, or some "
        "of them twice in different parts",
        hint="Every rank of the model must take part in the publisher's group",
        tensor=spread.name,
    )


def _is_covered(layout: Layout) -> bool:
    """Whether the parts are the tensor, each element once."""
    total = math.prod(layout.shape)
    if not all(part.is_inside for part in layout.parts):
        return False
    dims = [part.dims for part in layout.parts]
    return sum(part.size for part in layout.parts) == total and (total == 0 or _are_disjoint(dims))


def _are_disjoint(parts: Sequence[tuple[Runs, ...]]) -> bool:
    """Whether no two parts share an element: in some dimension their indices differ.

    Parts as shardings make them differ wholly, or not at all, in each dimension: so those that
    are alike in the first one are compared in the others. Only what is crossed in other ways is
    compared pair by pair.
    """
    if len(parts) < 2:
        return True
    if not parts[0]:
        return False
    rests: dict[Runs, list[tuple[Runs, ...]]] = {}
    for first, *rest in parts:
        rests.setdefault(first, []).append(tuple(rest))
    if _runs_are_disjoint(list(rests)):
        return all(_are_disjoint(alike) for alike in rests.values())
    return not any(
        all(map(_overlap, one, other)) for i, one in enumerate(parts) for other in parts[:i]
    )


def _runs_are_disjoint(found: Sequence[Runs]) -> bool:
    runs = sorted((start, stop) for one in found for start, stop in one if start < stop)
    return all(stop <= start for (_, stop), (start, _) in pairwise(runs))


def _overlap(a: Runs, b: Runs) -> bool:
    return any(s < f and e < d for s, d in a for e, f in b)


def _containers(spreads: Sequence[Spread], rank_count: int) -> list[list[int]]:
    """Tensors in containers of about equal raw size, in order."""
    total = sum(spread.byte_count for spread in spreads)
    count = max(min(rank_count, MAX_CONTAINERS), -(-total // CONTAINER_RAW_BYTES))
    count = max(1, min(count, len(spreads)))
    containers: list[list[int]] = [[] for _ in range(count)]
    done = 0
    for tensor, spread in enumerate(spreads):
        middle = done + spread.byte_count / 2
        containers[min(count - 1, int(middle * count / max(1, total)))].append(tensor)
        done += spread.byte_count
    return [tensors for tensors in containers if tensors] or [[]]
