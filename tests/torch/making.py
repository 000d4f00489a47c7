"""Ranks that are threads, tensors cut any way, and folders read without thinwire.

This folder must not become a package: its modules would be those of the real torch.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from thinwire.codec.dtypes import dtype_named
from thinwire.errors import Deadline, Unavailable
from thinwire.publish.held import Held, Runs
from thinwire.publish.ranks import PeerFailed
from thinwire.publish.spreading import Holding, inventory_of, spread_over
from thinwire.publish.units import Spread

T = TypeVar("T")
LIMIT_S = 30.0


class Line:
    """What threads that are ranks have in common."""

    def __init__(self, size: int, limit_s: float = LIMIT_S) -> None:
        self.size = size
        self.limit_s = limit_s
        self.said: dict[str, dict[int, Any]] = {}
        self.changed = threading.Condition()
        self._is_over = False

    def end(self) -> None:
        """A rank's test failed: nobody needs to wait for it."""
        with self.changed:
            self._is_over = True
            self.changed.notify_all()

    def put(self, topic: str, rank: int, data: Any) -> None:
        with self.changed:
            self.said.setdefault(topic, {})[rank] = data
            self.changed.notify_all()

    def wait(self, topic: str, count: int) -> dict[int, Any]:
        def is_there() -> bool:
            return len(self.said.get(topic, ())) >= count

        with self.changed:
            self.changed.wait_for(lambda: is_there() or self._is_over, self.limit_s)
            if not is_there():
                missing = sorted(set(range(self.size)) - self.said.get(topic, {}).keys())
                raise Deadline(f"{topic}: nothing from {missing}", ranks=missing)
            return dict(self.said[topic])


class ThreadRanks:
    """One rank of several in this process, as ``thinwire.publish.ranks.Ranks`` describes it.

    It is as strict as that allows: bulk data from one thread at a time, and nothing more after a
    rank did not come until all ranks take another line.
    """

    def __init__(self, line: Line, rank: int) -> None:
        self.rank = rank
        self.size = line.size
        self.sent_bytes = 0
        self._line = line
        self._is_broken = False
        self._name = ""
        self._counts: dict[str, int] = {}
        self._is_busy = threading.Lock()

    def exchange(self, outgoing: Mapping[int, bytes] | None) -> dict[int, bytes]:
        assert outgoing is None or set(outgoing) <= set(range(self.size))
        said = self._bulk("exchange", outgoing)
        if any(one is None for one in said):
            raise PeerFailed(f"rank {said.index(None)} failed")
        assert outgoing is not None
        self.sent_bytes += sum(len(data) for to, data in outgoing.items() if to != self.rank)
        return {rank: one[self.rank] for rank, one in enumerate(said) if one.get(self.rank)}

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    def use_line(self, name: str) -> None:
        if name != self._name:
            self._name, self._is_broken = name, False
            self._all(f"line {name}", b"")

    def working(self, topic: str) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self, topic: str, data: bytes) -> None:
        assert self.rank == 0
        self._line.put(topic, 0, data)

    def hear(self, topic: str, *, sign_of_life: str = "") -> bytes:
        return bytes(self._line.wait(topic, 1)[0])

    def report(self, topic: str, data: bytes) -> None:
        self._line.put(topic, self.rank, data)

    def collect(self, topic: str, *, sign_of_life: str = "") -> list[bytes]:
        assert self.rank == 0
        said = self._line.wait(topic, self.size)
        return [said[rank] for rank in range(self.size)]

    def forget_before(self, topic: str) -> None:
        assert self.rank == 0

        def is_before(key: str) -> bool:
            number = key.partition("/")[0]
            return number.isdecimal() and int(number) < int(topic)

        with self._line.changed:
            for key in filter(is_before, list(self._line.said)):
                del self._line.said[key]

    def share(self, data: bytes) -> list[bytes]:
        return self._all(self._next("share"), data)

    def close(self) -> None:
        pass

    def _bulk(self, kind: str, data: Any) -> list[Any]:
        if self._is_broken:
            raise Unavailable("the line is broken")
        assert self._is_busy.acquire(blocking=False), "two threads at once"
        try:
            return self._all(self._next(f"{kind} on {self._name}"), data)
        except Deadline:
            self._is_broken = True
            raise
        finally:
            self._is_busy.release()

    def _next(self, kind: str) -> str:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return f"{kind} {number}"

    def _all(self, topic: str, data: Any) -> list[Any]:
        self._line.put(topic, self.rank, data)
        said = self._line.wait(topic, self.size)
        return [said[rank] for rank in range(self.size)]


def on_ranks(size: int, act: Callable[[ThreadRanks], T], limit_s: float = LIMIT_S) -> list[T]:
    """Run ``act`` on every rank at once; what each returned. The first error is raised."""
    line = Line(size, limit_s)
    failures: list[BaseException] = []

    def run(rank: int) -> T:
        try:
            return act(ThreadRanks(line, rank))
        except BaseException as error:
            failures.append(error)
            line.end()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


# --- tensors in parts ---


def indices_of(runs: Runs) -> list[int]:
    """The indices that runs stand for."""
    return [index for start, stop in runs for index in range(start, stop)]


def taken(held: Held, whole: np.ndarray) -> np.ndarray:
    """The part of a whole tensor, by numpy's own indexing."""
    if not held.shape:
        return whole
    return whole[np.ix_(*[np.array(indices_of(runs), np.int64) for runs in held.dims])]


def runs_by_hand(indices: Sequence[int]) -> Runs:
    """Rising indices as the longest runs."""
    at = sorted(indices)
    cuts = [0, *(i for i in range(1, len(at)) if at[i] != at[i - 1] + 1), len(at)]
    runs = [(at[a], at[b - 1] + 1) for a, b in itertools.pairwise(cuts) if a < b]
    return tuple(runs) or ((0, 0),)


@st.composite
def some_runs(draw: st.DrawFn, size: int) -> Runs:
    """Any indices of a dimension, none and all of them likely enough."""
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return ((0, size),)
    if kind == 1:
        start = draw(st.integers(0, size))
        return runs_by_hand(range(start, draw(st.integers(start, size))))
    chosen = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return runs_by_hand([index for index, is_held in enumerate(chosen) if is_held])


@st.composite
def helds(draw: st.DrawFn) -> Held:
    """Any part of any small tensor."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return Held(shape, tuple(draw(some_runs(size)) for size in shape))


@st.composite
def cut_dimension(draw: st.DrawFn, size: int, parts: int) -> list[Runs]:
    """A dimension in so many parts: in order, in stripes, or any way at all."""
    if parts == 1:
        return [((0, size),)]
    kind = draw(st.sampled_from(["blocks", "stripes", "random"]))
    if kind == "blocks":
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
        owners = [sum(index >= cut for cut in cuts) for index in range(size)]
    elif kind == "stripes":
        width = draw(st.integers(1, max(1, size // parts)))
        owners = [index // width % parts for index in range(size)]
    else:
        number = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, parts, size)
        owners = number.tolist()
    return [
        runs_by_hand([index for index, owner in enumerate(owners) if owner == part])
        for part in range(parts)
    ]


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...], rank_count: int) -> list[Held | None]:
    """What each rank holds of a tensor: a grid of parts, each on one rank or on several."""
    grid = []
    left = rank_count
    for _ in shape:
        grid.append(draw(st.integers(1, left)) if draw(st.booleans()) else 1)
        left //= grid[-1]
    cuts = [draw(cut_dimension(n, parts)) for n, parts in zip(shape, grid, strict=True)]
    parts = [
        Held(shape, tuple(cut[at] for cut, at in zip(cuts, place, strict=True)))
        for place in np.ndindex(*grid)
    ]
    ranks = draw(st.permutations(range(rank_count)))
    found: list[Held | None] = [None] * rank_count
    for number, rank in enumerate(ranks):
        if number < len(parts):
            found[rank] = parts[number]
        elif draw(st.booleans()):
            found[rank] = parts[draw(st.integers(0, len(parts) - 1))]
    return found


def spreads_of(job: Iterable[Iterable[Holding]]) -> list[Spread]:
    """How tensors are spread over ranks that hold these."""
    return spread_over(map(inventory_of, job))


def holding(name: str, dtype: str, held: Held) -> Holding:
    """A part as a rank says that it holds it."""
    return Holding(name, dtype, held.shape, held.dims)


def words_per_element(dtype: str) -> int:
    """Words of an element: two where it is complex."""
    row = dtype_named(dtype)
    return max(1, row.bits // 8 // row.word_bytes)


def word_ids(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A whole tensor that holds the number of each word; complex ones have one more axis."""
    per_element = words_per_element(dtype)
    count = int(np.prod(shape, dtype=np.int64)) * per_element
    ids = np.arange(count, dtype=np.int64)
    return ids.reshape(shape) if per_element == 1 else ids.reshape(*shape, per_element)


# --- what a folder holds ---


def held_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bits of every tensor of a folder, read by the format's description alone."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                assert name not in found
                bits = data[start + low : start + high]
                found[name] = (entry["dtype"], tuple(entry["shape"]), bits)
    return found


def header_metadata(path: Path) -> dict[str, str]:
    """What the header of a weights file says besides the tensors."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found
