"""How an encoder finds rate tables: the slow twin of ``fit.cpp``. No decoder needs it.

Tensors differ in scale more than in shape: the learning rate's effect on a class is much the same
everywhere, but one tensor changes a hundred times as often as another. So a table holds the shape,
and every chunk moves it by one shift. Counts of a sample of the words come from *sources* (a
tensor, or some neighbours), and shape and shifts are fitted in turn, as in k-means. Two tables are
made where they save more than the second one costs, and then the members of each are fitted too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from thinwire.codec.dtypes import DType
from thinwire.codec.reference_model import (
    CLASSES,
    COST_CHANGE,
    COST_NONE,
    classes_of,
    fields_of,
    words_of,
)

SHIFT_MAX = 64
SAMPLE_WORDS = 1024
ROUNDS = 2  # of shape and shifts
SPLIT_ROUNDS = 4  # of members and shapes
RATE_REACH = 12  # how far a rate moves in one round
TABLE_BITS = 640  # about what a second table costs

_NONE, _CHANGE = np.array(COST_NONE), np.array(COST_CHANGE)


def class_bits(
    rates: Sequence[int], seen: Sequence[int], changed: Sequence[int], shift: int
) -> int:
    """Bits (of 2**-24) to say which words changed, where all rates are moved by ``shift``."""
    total = 0
    for rate, words, changes in zip(rates, seen, changed, strict=True):
        if words == 0:
            continue
        own = min(max(rate + shift, 0), 255)
        total += changes * COST_CHANGE[own] + (words - changes) * COST_NONE[own]
    return total


def best_shift(rates: Sequence[int], seen: Sequence[int], changed: Sequence[int]) -> int:
    """The shift of the fewest bits, looked for coarsely, then finely: there is one valley.

    Of equal ones the first looked at, and no shift before all others.
    """

    def bits(shift: int) -> int:
        return class_bits(rates, seen, changed, shift)

    centre = min((0, *range(-SHIFT_MAX, SHIFT_MAX + 1, 8)), key=bits)
    low, high = max(-SHIFT_MAX, centre - 7), min(SHIFT_MAX, centre + 7)
    best: int = min((centre, *range(low, high + 1)), key=bits)
    return best


def sample(dtype: DType, base: np.ndarray, new: np.ndarray, first: int, stride: int) -> np.ndarray:
    """Three rows of counts by class field: words, changed ones, those changed by one step.

    Looks at every ``stride``-th run of 1024 words from run ``first`` on.
    """
    old_words, new_words = words_of(base, dtype), words_of(new, dtype)
    run_number = np.arange(old_words.size) // SAMPLE_WORDS
    chosen = (run_number >= first) & ((run_number - first) % stride == 0)
    old, changed = _ordered(old_words[chosen], dtype), _ordered(new_words[chosen], dtype)
    word = old.dtype.type
    fields = fields_of(old_words[chosen], dtype)
    steps = changed - old  # modulo the word
    by_one = (steps == word(1)) | (steps == ~word(0))
    kinds = (fields, fields[steps != 0], fields[by_one])
    rows = [np.bincount(kind, minlength=dtype.field_mask + 1) for kind in kinds]
    return np.array(rows).astype(np.uint64)


def fit(counts: np.ndarray, total_words: int) -> list[bytes]:
    """One or two packed tables for chunks like those of the sources in ``counts``.

    ``counts``: what :func:`sample` gives, for each source; they stand for ``total_words`` in all.
    """
    seen_fields = np.flatnonzero(counts[:, 0].any(axis=0))
    top = int(seen_fields[-1]) if seen_fields.size else 0
    sources = [_Source(rows, top) for rows in counts]
    one = _Cluster(sources, _pooled_rates(sources))
    one.fit_shifts()
    for _ in range(ROUNDS):
        one.fit_round()
    if len(sources) < 2:
        return [one.pack(top)]
    one_bits, one_table = one.bits, one.pack(top)

    median = sorted(source.shift for source in sources)[len(sources) // 2]
    members = (
        [source for source in sources if source.shift < median],
        [source for source in sources if source.shift >= median],
    )
    first, second = (_Cluster(side, list(one.rates)) for side in members)
    for split_round in range(SPLIT_ROUNDS):
        if split_round > 0:
            _choose_members(sources, first, second)
        first.fit_round()
        second.fit_round()
    saved = max(0, one_bits - first.bits - second.bits) >> 24
    sampled = int(counts[:, 0].sum())
    # What the whole would save, not the sample.
    if sampled == 0 or saved * (total_words // sampled + 1) <= TABLE_BITS:
        return [one_table]
    return [first.pack(top), second.pack(top)]


def _ordered(words: np.ndarray, dtype: DType) -> np.ndarray:
    """Numbers that grow with the value, of the words' own width."""
    if not dtype.ordered:
        return words
    sign = words.dtype.type(1 << 8 * dtype.word_bytes - 1)
    return np.where(words & sign != 0, ~words, words | sign)


class _Source:
    """Counts by class, and the shift that suits them now."""

    def __init__(self, rows: np.ndarray, top: int) -> None:
        classes = classes_of(np.arange(rows.shape[1]), top)
        self.seen, self.changed, self.ones = ([0] * CLASSES for _ in range(3))
        for cls, *kinds in zip(classes.tolist(), *rows.tolist(), strict=True):
            for total, count in zip((self.seen, self.changed, self.ones), kinds, strict=True):
                total[cls] += count
        self.shift = 0

    def choose_shift(self, rates: Sequence[int]) -> int:
        """Move the shift to the shape; returns the bits."""
        self.shift = best_shift(rates, self.seen, self.changed)
        return class_bits(rates, self.seen, self.changed, self.shift)


class _Cluster:
    """Sources that share a table."""

    def __init__(self, members: list[_Source], rates: list[int]) -> None:
        self.members = members
        self.rates = rates
        self.bits = 0

    def fit_shifts(self) -> None:
        """Move each member's shift to the shape."""
        self.bits = sum(source.choose_shift(self.rates) for source in self.members)

    def fit_round(self) -> None:
        """The shape to the members' shifts, then the shifts to the shape."""
        for cls, rate in enumerate(self.rates):
            low, high = max(0, rate - RATE_REACH), min(255, rate + RATE_REACH)
            self.rates[cls] = _best_rate(self.members, cls, low, high)
        self.fit_shifts()

    def pack(self, top: int) -> bytes:
        """The table: its top field, a rate a class, and how often a change is by one step."""
        rates, ones = bytearray(), bytearray()
        for cls in range(CLASSES):
            seen = sum(source.seen[cls] for source in self.members)
            if seen == 0 and cls > 0:  # as its neighbour, so that equal runs compress
                rates.append(rates[-1])
                ones.append(ones[-1])
                continue
            changed = sum(source.changed[cls] for source in self.members)
            by_one = sum(source.ones[cls] for source in self.members)
            rates.append(self.rates[cls])
            ones.append(min(255, 256 * (by_one + 3) // (changed + 4)))
        return struct.pack("<H", top) + bytes(rates) + bytes(ones)


def _best_rate(members: Sequence[_Source], cls: int, low: int, high: int) -> int:
    """The rate of one class that suits all members at their shifts.

    Half a change more than seen is charged: a class that the sample shows unchanged may still
    change.
    """
    rates = np.arange(low, high + 1)
    bits = _CHANGE[rates]
    for source in members:
        own = np.clip(rates + source.shift, 0, 255)
        changed, unchanged = source.changed[cls], source.seen[cls] - source.changed[cls]
        bits = bits + 2 * changed * _CHANGE[own] + 2 * unchanged * _NONE[own]
    return low + int(np.argmin(bits))


def _pooled_rates(sources: Sequence[_Source]) -> list[int]:
    """All sources as if they were one: where the rounds begin."""
    return [_best_rate(sources, cls, 0, 255) for cls in range(CLASSES)]


def _choose_members(sources: Sequence[_Source], first: _Cluster, second: _Cluster) -> None:
    first.members, second.members = [], []
    for source in sources:
        first_bits = source.choose_shift(first.rates)
        first_shift = source.shift
        if source.choose_shift(second.rates) < first_bits:
            second.members.append(source)
        else:
            source.shift = first_shift
            first.members.append(source)
