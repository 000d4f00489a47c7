"""Tensors that begin at any byte, as in a mapped file, are coded like any other."""

from __future__ import annotations

import io

import numpy as np
import pytest

from thinwire.codec.delta import Delta
from thinwire.codec.dtypes import DTYPES
from thinwire.codec.write import Pair, write_delta


def misaligned(data: np.ndarray, offset: int) -> np.ndarray:
    """The same bytes, ``offset`` bytes after a multiple of 64."""
    room = np.zeros(data.size + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + data.size] = data
    return room[start : start + data.size]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64"])
@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("word_count", [1000, 70_000])
def test_any_offset(dtype: str, offset: int, word_count: int) -> None:
    word_bytes = DTYPES[dtype].word_bytes
    rng = np.random.default_rng(offset)
    base = rng.integers(0, 256, word_count * word_bytes).astype(np.uint8)
    new = base.copy()
    new[:: 97 * word_bytes] ^= 1
    out = io.BytesIO()
    write_delta(out, [Pair("t", dtype, (word_count,), base, new)])
    payload = out.getvalue()
    shifted = [misaligned(array, offset) for array in (base, new)]
    again = io.BytesIO()
    write_delta(again, [Pair("t", dtype, (word_count,), *shifted)])
    assert again.getvalue() == payload
    with Delta.open(payload) as delta:
        target = misaligned(np.zeros_like(base), offset)
        delta.apply({"t": shifted[0]}, lambda _: target)
        assert np.array_equal(target, new)
        found = list(delta.changes({"t": shifted[0]}))
        assert sum(change.positions.size for change in found) == -(-word_count // 97)
        delta.apply_in_place({"t": shifted[0]})
        assert np.array_equal(shifted[0], new)
