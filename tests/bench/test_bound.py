"""The bound against a count in plain Python."""

from __future__ import annotations

from collections import Counter
from math import log2

import numpy as np
import pytest

from thinwire.bench import Checkpoint, Tensor, as_tensor, class_bound
from thinwire.bench.bound import bound_of_tensor, ordered_bits

Pair = tuple[Checkpoint, Checkpoint]


def entropy_bits(counts: Counter[object]) -> float:
    total = sum(counts.values())
    return sum(-count * log2(count / total) for count in counts.values())


def order(word: int) -> int:
    return word ^ 0xFFFF if word & 0x8000 else word ^ 0x8000


def brute_force(base: Tensor, new: Tensor) -> tuple[float, float, float]:
    """Positions, direction and size in bits, one BF16 element at a time."""
    changed_of: dict[int, Counter[object]] = {}
    size_of: dict[int, Counter[object]] = {}
    direction: Counter[object] = Counter()
    for old_word, new_word in zip(base.words.tolist(), new.words.tolist(), strict=True):
        exponent = old_word >> 7 & 0xFF
        changed_of.setdefault(exponent, Counter())[old_word != new_word] += 1
        if old_word != new_word:
            step = (order(new_word) - order(old_word)) % 65536
            step = step - 65536 if step >= 32768 else step
            direction[step > 0] += 1
            size_of.setdefault(exponent, Counter())[abs(step)] += 1
    return (
        sum(map(entropy_bits, changed_of.values())),
        entropy_bits(direction),
        sum(map(entropy_bits, size_of.values())),
    )


@pytest.mark.parametrize("low_bits", [2, 5, 16])
def test_against_brute_force(low_bits: int) -> None:
    rng = np.random.default_rng(low_bits)
    words = (rng.normal(0, 0.02, 600).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    flips = rng.integers(0, 1 << low_bits, 600).astype(np.uint16) * (rng.random(600) < 0.3)
    base = as_tensor("BF16", (600,), words)
    new = as_tensor("BF16", (600,), words ^ flips.astype(np.uint16))
    bound = bound_of_tensor(base, new)
    got = (bound.positions_bits, bound.direction_bits, bound.size_bits)
    assert got == pytest.approx(brute_force(base, new), abs=1e-6)
    assert bound.total_bits == pytest.approx(sum(got))


def test_half_way_round_counts_as_down() -> None:
    base = as_tensor("BF16", (2,), np.array([0x8000, 0x8000], np.uint16))
    new = as_tensor("BF16", (2,), np.array([0xFFFF, 0x0000], np.uint16))
    assert ordered_bits(new.words, "BF16").tolist() == [0, 0x8000]
    bound = bound_of_tensor(base, new)
    assert (bound.direction_bits, bound.size_bits) == pytest.approx((2.0, 2.0))


def test_nothing_changed_costs_nothing(sparse_pair: Pair) -> None:
    base, _ = sparse_pair
    bound = class_bound(base, base)
    assert (bound.total_bits, bound.payload_bytes) == (0.0, 0)


def test_every_pair_has_a_bound(pair: Pair) -> None:
    bound = class_bound(*pair)
    assert 0 <= bound.total_bits < 40 * bound.raw_bytes
    assert bound.percent(bound.total_bits) >= bound.percent(bound.size_bits)


def test_order_of_bits_is_order_of_values() -> None:
    values = np.array([-np.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.5, np.inf], np.float32)
    ordered = ordered_bits(values.view(np.uint32), "F32")
    assert np.all(np.diff(ordered.astype(np.int64)) > 0)
