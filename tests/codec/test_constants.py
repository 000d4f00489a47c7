"""The constants are far from rounding boundaries, so every correct libm gives the same."""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext

import numpy as np
import pytest

from thinwire.codec import reference, reference_model
from thinwire.codec.dtypes import DTYPES

from .making import CLASSES, INSTRUCTION_SETS, change_words, native, random_words, table

MARGIN = Decimal("1e-6")
PRECISION = 50  # digits


def _power_of_two(exponent: Decimal) -> Decimal:
    return (exponent * Decimal(2).ln()).exp()


def _log2(value: Decimal) -> Decimal:
    return value.ln() / Decimal(2).ln()


def _exp_high(i: int) -> Decimal:
    return _power_of_two(31 - Decimal(i) / 256)


def _exp_low(i: int) -> Decimal:
    return _power_of_two(31 - Decimal(i) / 65536)


def _cost(rate: int) -> Decimal:
    return 2**24 * _log2(1 + _power_of_two(Decimal(56 - rate) / 8))


def _cost_change(rate: int) -> Decimal:
    return 2**24 * _log2(1 + _power_of_two(Decimal(rate - 56) / 8))


def _reciprocal(seen: int) -> Decimal:
    return 65536 / (seen + Decimal("1.5"))


def _log2_high(i: int) -> Decimal:
    return 65536 * _log2(1 + Decimal(i) / 256)


@pytest.mark.parametrize(
    ("exact", "count", "used"),
    [
        (_exp_high, 256, reference_model.EXP_HIGH),
        (_exp_low, 256, reference_model.EXP_LOW),
        (_cost, 256, reference_model.COST_NONE),
        (_cost_change, 256, reference_model.COST_CHANGE),
        (_reciprocal, 256, reference_model.RECIPROCAL),
        (_log2_high, 257, []),  # for hints only: the reference has no use for it
    ],
)
def test_rounding_is_never_close(
    exact: Callable[[int], Decimal], count: int, used: list[int]
) -> None:
    with localcontext(Context(prec=PRECISION)):
        values = [exact(i) for i in range(count)]
        for value in values:
            from_boundary = abs(value % 1 - Decimal("0.5"))
            assert from_boundary >= MARGIN
        rounded = [int(value.quantize(Decimal(1), ROUND_HALF_UP)) for value in values]
    assert used == rounded[: len(used)]


def test_kernels_hold_the_same_costs_and_powers() -> None:
    # A stream of some hundred choices comes apart where one probability differs: all rates, and
    # with random ones sums of costs that use all of both power tables.
    dtype = DTYPES["BF16"]
    rng = np.random.default_rng(3)
    base = random_words(rng, dtype, 1500, CLASSES)
    top = int((base.view("<u2") >> 7 & 255).max())
    rows = [bytes([rate]) * CLASSES for rate in range(256)]
    rows += [rng.integers(30, 130, CLASSES, dtype=np.uint8).tobytes() for _ in range(100)]
    for number, row in enumerate(rows):
        new = change_words(rng, dtype, base, 0.03, 1 + number % 16)
        tables = table(top, row, rng.bytes(CLASSES))
        data = np.frombuffer(reference.encode_with(dtype, tables, 0, 0, base, new), np.uint8)
        for instructions in INSTRUCTION_SETS:
            out = np.empty_like(base)
            assert native(dtype, tables, instructions).decode(base, out, data) is not None
            assert out.tobytes() == new.tobytes()


def test_kernels_hold_the_same_reciprocals() -> None:
    # One class and one kind of change: its bits see more than the 158 that still move their step.
    dtype = DTYPES["U16"]
    tables = table(0, bytes([80]) * CLASSES, bytes([128]) * CLASSES)
    base = np.zeros(2 * 3000, np.uint8)
    rng = np.random.default_rng(9)
    for step in (1, 3, 60_000):
        new = base.copy()
        chosen = rng.random(3000) < 0.5
        new.view("<u2")[chosen] = np.where(rng.random(3000) < 0.8, 1, step)[chosen]
        expected = reference.encode_chunk(dtype, tables, base, new)
        assert native(dtype, tables).encode(base, new, new.size)[0] == expected
