"""Every base value with partners of every kind comes back bit for bit; FP8 with every partner.

Twice as many words as change keep the class coder within a chunk's capacity, so that it is the one
that is tried, not the general methods that would win by size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import thinwire
from thinwire.codec import reference
from thinwire.codec.dtypes import DTYPES, DType

from .making import INSTRUCTION_SETS, Chunk, fitted, native

WORDS = np.arange(1 << 16, dtype="<u2")
SIGN = np.uint16(0x8000)

# zero, minus zero, smallest and largest subnormal, smallest normal, one, largest, infinity, NaNs
# that are quiet, that signal, that are full, each with both signs.
CORNERS = {
    "BF16": [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x7FFF],
    "F16": [0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x7FFF],
}
RANDOM_PARTNERS = 10


def _ordered(base: np.ndarray) -> np.ndarray:
    return np.where(base & SIGN, ~base, base | SIGN)


def _moved(base: np.ndarray, steps: int) -> np.ndarray:
    """So many representable values up, around the end of the line too."""
    order = _ordered(base) + np.uint16(steps % (1 << 16))
    return np.where(order & SIGN, order ^ SIGN, ~order)


PARTNERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sign flipped": lambda base: base ^ SIGN,
    "all bits flipped": lambda base: ~base,
    "mantissa flipped": lambda base: base ^ np.uint16(1),
    "exponent flipped": lambda base: base ^ np.uint16(0x0400),
    "bits + 1": lambda base: base + np.uint16(1),
    "half the line away": lambda base: _moved(base, 1 << 15),
    **{f"{steps:+} steps": lambda base, s=steps: _moved(base, s) for steps in (1, -1, 2, -2, 3)},
    **{
        f"{sign}2**{octave} steps": lambda base, s=int(f"{sign}1") << octave: _moved(base, s)
        for octave in range(2, 16)
        for sign in "+-"
    },
}


def assert_round_trip(dtype: DType, base: np.ndarray, new: np.ndarray) -> None:
    """By the class coder on every instruction set, from bits to the same bits."""
    still = np.resize(base, 2 * base.size)
    before, after = np.concatenate([base, still]), np.concatenate([new, still])
    chunk = Chunk(dtype, before.view(np.uint8), after.view(np.uint8))
    tables = fitted(chunk)
    payloads = set()
    for instructions in INSTRUCTION_SETS:
        codec = native(dtype, tables, instructions)
        data = codec.encode(chunk.base, chunk.new, chunk.base.size)[0]
        assert data is not None
        payloads.add(data)
        out = np.empty_like(chunk.base)
        assert codec.decode(chunk.base, out, np.frombuffer(data, np.uint8)) is not None
        assert np.array_equal(out, chunk.new)
    assert len(payloads) == 1


@pytest.mark.parametrize("name", ["BF16", "F16"])
@pytest.mark.parametrize("partner", PARTNERS)
def test_partners_of_every_value(name: str, partner: str) -> None:
    assert_round_trip(DTYPES[name], WORDS, PARTNERS[partner](WORDS))


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_corners_with_every_value(name: str) -> None:
    for corner in CORNERS[name]:
        for word in (corner, corner | 0x8000):
            constant = np.full_like(WORDS, word)
            assert_round_trip(DTYPES[name], WORDS, constant)
            assert_round_trip(DTYPES[name], constant, WORDS)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_random_partners_of_every_value(name: str) -> None:
    rng = np.random.default_rng(2)
    for number in range(RANDOM_PARTNERS):
        new = rng.permutation(WORDS) if number % 2 else rng.integers(0, 1 << 16, 1 << 16, "<u2")
        assert_round_trip(DTYPES[name], WORDS, new)


@pytest.mark.parametrize("partner", PARTNERS)
def test_partners_through_the_whole_library(partner: str) -> None:
    new = PARTNERS[partner](WORDS)
    payload = thinwire.encode(WORDS, new, dtype="BF16")
    assert np.array_equal(thinwire.decode(WORDS, payload), new)


@pytest.mark.parametrize("name", [name for name in DTYPES if name.startswith("F8_")])
def test_every_pair_of_8_bit_floats(name: str) -> None:
    base = np.repeat(np.arange(256, dtype=np.uint8), 256)
    new = np.tile(np.arange(256, dtype=np.uint8), 256)
    assert_round_trip(DTYPES[name], base, new)


def test_every_pair_of_e4m3_as_the_reference_codes_it() -> None:
    dtype = DTYPES["F8_E4M3"]
    base = np.repeat(np.arange(256, dtype=np.uint8), 256)
    new = np.tile(np.arange(256, dtype=np.uint8), 256)
    base, new = np.concatenate([base, base]), np.concatenate([new, base])
    tables = fitted(Chunk(dtype, base, new))
    data = reference.encode_chunk(dtype, tables, base, new)
    assert native(dtype, tables).encode(base, new, base.size)[0] == data
    assert np.array_equal(reference.decode_chunk(dtype, tables, base, data), new)
