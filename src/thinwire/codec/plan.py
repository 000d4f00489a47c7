"""What a delta will hold, decided before anything is coded: kinds, chunks, groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thinwire.codec.container import MAX_NAME_BYTES, Kind
from thinwire.codec.digest import CHUNK_WORDS
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.errors import InvalidArgument, TensorMismatch

# Tensors below this share a chunk: on its own, each would pay for the end of a range coder.
SMALL_WORDS = 1 << 16
GROUP_WORDS = 1 << 18


class Pair(NamedTuple):
    """One tensor of base and new checkpoint: contiguous uint8 arrays, None where it is absent.

    With both, dtype and shape hold for both. Without a base the tensor is carried in full, without
    a new one it is recorded as removed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    base: np.ndarray | None
    new: np.ndarray | None


class Unit(NamedTuple):
    """What one task codes: a chunk of a large tensor, or a group of small ones."""

    pairs: Sequence[Pair]
    start: int  # bytes, in a large tensor
    end: int


def check_pairs(pairs: Sequence[Pair]) -> None:
    """Raise unless names are unique and arrays fit dtype and shape."""
    names: set[str] = set()
    for pair in pairs:
        if pair.name in names:
            raise InvalidArgument(f"two tensors are named {pair.name!r}")
        names.add(pair.name)
        if len(pair.name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
            raise InvalidArgument(f"a tensor's name is longer than {MAX_NAME_BYTES} bytes")
        if any("\ud800" <= character <= "\udfff" for character in pair.name):
            raise InvalidArgument(f"the tensor name {pair.name!r} is not Unicode text")
        expected = byte_count(pair.dtype, pair.shape)
        for side, array in (("base", pair.base), ("new", pair.new)):
            if array is not None and (array.dtype != np.uint8 or array.size != expected):
                raise TensorMismatch(
                    f"tensor {pair.name!r}: {side} has {array.size} bytes where {pair.dtype} of "
                    f"shape {list(pair.shape)} takes {expected}",
                    tensor=pair.name,
                )
        if pair.base is None and pair.new is None:
            raise InvalidArgument(f"tensor {pair.name!r} has neither base nor new")


def kind_of(pair: Pair) -> Kind:
    """What becomes of a tensor; equal ones are found out later."""
    if pair.new is None:
        return "removed"
    return "full" if pair.base is None else "delta"


def word_count(pair: Pair) -> int:
    """Words of a tensor."""
    return byte_count(pair.dtype, pair.shape) // dtype_named(pair.dtype).word_bytes


def coded_dtypes(pairs: Sequence[Pair]) -> list[str]:
    """The dtypes that need rate tables, in order of appearance."""
    return list(dict.fromkeys(p.dtype for p in pairs if kind_of(p) == "delta"))


def plan_units(pairs: Sequence[Pair]) -> tuple[list[Unit], list[list[Pair]]]:
    """The chunks of tensors that stand alone, and the groups of small ones."""
    single: list[Unit] = []
    groups: list[list[Pair]] = []
    open_groups: dict[str, tuple[list[Pair], int]] = {}
    for pair in pairs:
        if pair.new is None:
            continue
        words = word_count(pair)
        if pair.base is not None and words < SMALL_WORDS:
            members, total = open_groups.get(pair.dtype, ([], 0))
            if not members:
                groups.append(members)
            members.append(pair)
            total += words
            open_groups[pair.dtype] = ([], 0) if total >= GROUP_WORDS else (members, total)
            continue
        chunk_bytes = CHUNK_WORDS * dtype_named(pair.dtype).word_bytes
        for start in range(0, pair.new.size, chunk_bytes):
            single.append(Unit([pair], start, min(start + chunk_bytes, pair.new.size)))
    return single, groups


def unit_bytes(unit: Unit) -> int:
    """Raw bytes of a unit of work."""
    if unit.end:
        return unit.end - unit.start
    return sum(pair.new.size for pair in unit.pairs if pair.new is not None)
