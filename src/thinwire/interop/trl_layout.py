"""How TRL's deltas lay out positions and values, and what their files are called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from thinwire.errors import Unsupported
from thinwire.interop.sparse import RUN, Positions, Words, positions_of_gaps, to_gaps

SYSTEM = "TRL's delta weight sync"
RAW, GAPS = "raw", "gap_delta"
MAX_POSITION = 2**31 - 1
"""TRL's receivers hold positions in 32 bits with a sign, whatever the encoding."""

VALUE_DTYPE = "BF16"
PATCH = "sparse_weight_patch"
EMPTY_KEY = "__empty_delta__"
"""What a v1 delta without changes holds instead."""

BASE_KEY = "prev_model_version"
"""Metadata of the first drafts of v1, and of ours where the base is not the step before."""

INDEX_DTYPES = {RAW: ("I32",), GAPS: ("U16", "U32")}

_FILE_NAME = re.compile(r"step_([0-9]{6,15})\.safetensors")


class Layout(NamedTuple):
    """How a delta's keys end, and how its positions may be coded; the first is what is written."""

    index_suffix: str
    value_suffix: str
    encodings: tuple[str, ...]


LAYOUTS = {
    "v1": Layout(".indices", ".values", (RAW,)),
    "v2": Layout(".idx", ".val", (GAPS, RAW)),
}


def file_name(step: int) -> str:
    """What the file of a step is called."""
    return f"step_{step:06d}.safetensors"


def step_of(name: str) -> int | None:
    """The step of a file of that name; None: it is none of TRL's."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def encode_index(positions: Positions, encoding: str) -> tuple[str, Words]:
    """The index tensor of rising positions: its dtype, as safetensors calls it, and its elements.

    Raises:
        Unsupported: A position is beyond ``MAX_POSITION``.
    """
    if positions.size and int(positions[-1]) > MAX_POSITION:
        raise Unsupported(
            f"the change at position {int(positions[-1])} is beyond {MAX_POSITION}, the last one"
            f" that {SYSTEM} can name",
            hint="Write full weights for this version, or another format",
        )
    if encoding == RAW:
        return "I32", positions.astype("<i4")
    gaps = to_gaps(positions)
    width = 16 if gaps.size == 0 or int(gaps.max()) <= 0xFFFF else 32
    return f"U{width}", gaps.astype(f"<u{width // 8}")


def decode_index(index: Words, encoding: str) -> Iterator[Positions]:
    """The positions of an index tensor's elements, a run at a time."""
    if encoding == GAPS:
        yield from positions_of_gaps(index)
        return
    for start in range(0, index.size, RUN):
        yield index[start : start + RUN]
