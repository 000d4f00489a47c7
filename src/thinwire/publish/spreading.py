"""How tensors are spread over ranks, from what every rank says that it holds.

A model of a trillion weights may have 70,000 tensors on 1,000 ranks: 70 million holdings. So a rank
names each kind of part once, ranks that say the same are told apart only by their parts, and
tensors that are spread in the same way are looked at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from thinwire.errors import TensorMismatch
from thinwire.publish.held import Held, Runs
from thinwire.publish.units import Layout, Spread

_ABSENT = np.uint32(0xFFFF_FFFF)


class Holding(NamedTuple):
    """A tensor as one rank says that it holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[Runs, ...]


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What tensors of one kind are on one rank."""

    dtype: str
    shape: tuple[int, ...]
    dims: tuple[Runs, ...]


class Inventory(msgspec.Struct, array_like=True):
    """All that one rank holds.

    Attributes:
        names: The tensors' names, as msgpack: many ranks say the same bytes.
        numbers: Of each tensor the number of its part: uint32, little-endian.
        parts: The parts, each once.
    """

    names: bytes
    numbers: bytes
    parts: list[Part]


def inventory_of(holdings: Iterable[Holding]) -> Inventory:
    """What a rank tells the others of what it holds."""
    parts: dict[Part, int] = {}
    names, numbers = [], []
    for one in holdings:
        names.append(one.name)
        part = Part(one.dtype, one.shape, one.dims)
        numbers.append(parts.setdefault(part, len(parts)))
    packed = np.array(numbers, "<u4").tobytes()
    return Inventory(msgspec.msgpack.encode(names), packed, list(parts))


class _Alike(NamedTuple):
    """Ranks that say the same names and numbers, each with its own parts."""

    tensors: np.ndarray
    numbers: np.ndarray
    ranks: list[tuple[int, list[Part]]]


def spread_over(said: Iterable[Inventory]) -> list[Spread]:
    """How the tensors that each rank holds are spread; in the order of the first that has them.

    Raises:
        TensorMismatch: Ranks disagree on a tensor's dtype or shape.
    """
    order: dict[str, int] = {}
    groups: dict[tuple[bytes, bytes], _Alike] = {}
    for rank, one in enumerate(said):
        key = (one.names, one.numbers)
        if key not in groups:
            names = msgspec.msgpack.decode(one.names, type=list[str])
            tensors = np.array([order.setdefault(name, len(order)) for name in names], np.int64)
            groups[key] = _Alike(tensors, np.frombuffer(one.numbers, "<u4"), [])
        groups[key].ranks.append((rank, one.parts))
    alike = list(groups.values())
    # A row for each tensor: what tensors with equal rows are on any rank is the same.
    rows = np.full((len(order), len(alike)), _ABSENT, np.uint32)
    for column, group in enumerate(alike):
        rows[group.tensors, column] = group.numbers
    known: dict[bytes, tuple[str, Layout]] = {}
    layouts: dict[Layout, Layout] = {}
    spreads = []
    for name, row in zip(order, rows, strict=True):
        key_of_row = row.tobytes()
        if key_of_row not in known:
            dtype, layout = _laid_out(name, row, alike)
            known[key_of_row] = (dtype, layouts.setdefault(layout, layout))
        dtype, layout = known[key_of_row]
        spreads.append(Spread(name, dtype, layout.shape, layout))
    return spreads


def _laid_out(name: str, row: np.ndarray, alike: Sequence[_Alike]) -> tuple[str, Layout]:
    """The dtype of a tensor and which rank holds what of it."""
    held = sorted(
        (
            (rank, parts[number])
            for group, number in zip(alike, row.tolist(), strict=True)
            if number != _ABSENT
            for rank, parts in group.ranks
        ),
        key=lambda item: item[0],
    )
    first = held[0][1]
    ranks_of: dict[Held, list[int]] = {}
    for rank, part in held:
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise TensorMismatch(
                f"tensor {name!r} is {part.dtype} {list(part.shape)} on rank {rank} and "
                f"{first.dtype} {list(first.shape)} on another",
                hint="Every rank must publish the same model",
                tensor=name,
            )
        ranks_of.setdefault(Held(part.shape, part.dims), []).append(rank)
    return first.dtype, _layout(first.shape, ranks_of)


def _layout(shape: tuple[int, ...], parts: Mapping[Held, list[int]]) -> Layout:
    filled = {part: ranks for part, ranks in parts.items() if part.size} or dict(parts)
    ordered = sorted(filled.items(), key=lambda item: (item[0].dims, item[1]))
    holders = tuple(tuple(sorted(ranks)) for _, ranks in ordered)
    return Layout(shape, tuple(part for part, _ in ordered), holders)
