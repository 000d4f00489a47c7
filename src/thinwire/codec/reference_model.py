"""What encoder and decoder of the reference agree on: classes, costs, odds, what they learn.

Read ``reference`` first: it says what the parts are for.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import log2
from typing import NamedTuple

import numpy as np

from thinwire.codec.dtypes import DType

# ---------------------------------------------------------------- rates and costs

BLOCK_WORDS = 128
CLASSES = 32
# A rate byte r stands for the odds 2**((56 - r) / 8) of a change: 1/8 octave a step. What a word
# costs that did not change, and what one that did, in units of 2**-24 bits.
COST_NONE = [round(2**24 * log2(1 + 2 ** ((56 - rate) / 8))) for rate in range(256)]
COST_CHANGE = [round(2**24 * log2(1 + 2 ** ((rate - 56) / 8))) for rate in range(256)]
# 2**-x for the upper and the lower eight bits of a 16-bit fraction, as integers of 31 bits.
EXP_HIGH = [round(2 ** (31 - i / 256)) for i in range(256)]
EXP_LOW = [round(2 ** (31 - i / 65536)) for i in range(256)]


class Table(NamedTuple):
    """How often words of each class change; class 0 is the field value ``top`` and above.

    ``one`` gives the odds, before anything was learnt, that a change is by one step.
    """

    top: int
    rate: bytes
    one: bytes


def unpack_tables(packed: bytes) -> list[Table]:
    """Tables as the kernels take them: 66 bytes each."""
    return [Table(*fields) for fields in struct.iter_unpack("<H32s32s", packed)]


def class_costs(table: Table, shift: int) -> list[int]:
    """-log2 P(no change) of each class, in units of 2**-16 bits.

    Rounded so that the dearest class takes no more than 16 bits: the kernels add such numbers.
    """
    fine = [COST_NONE[min(max(rate + shift, 0), 255)] for rate in table.rate]
    cut = 8
    while (max(fine) + (1 << cut - 1)) >> cut > 0xFFFF:
        cut += 1
    return [(cost + (1 << cut - 1)) >> cut << cut - 8 for cost in fine]


def power(cost: int) -> int:
    """2**-cost as an integer of 31 bits; ``cost`` in units of 2**-16 bits."""
    product = EXP_HIGH[cost >> 8 & 255] * EXP_LOW[cost & 255]
    return product >> 31 >> (cost >> 16)


# ---------------------------------------------------------------- words and classes


def words_of(data: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes as little-endian words."""
    words: np.ndarray = data.view(f"<u{dtype.word_bytes}")
    return words


def fields_of(words: np.ndarray, dtype: DType) -> np.ndarray:
    """The class field of each word: the exponent of a float."""
    fields: np.ndarray = (words >> words.dtype.type(dtype.field_shift)).astype(np.int64)
    return fields & np.int64(dtype.field_mask)


def classes_of(fields: np.ndarray, top: int) -> np.ndarray:
    """Class 0 is the field value ``top`` and above, class c is top - c, class 31 the rest."""
    classes: np.ndarray = np.clip(top - fields, 0, CLASSES - 1)
    return classes


def count_classes(fields: np.ndarray, top: int) -> list[int]:
    """How many words each class has."""
    counts: list[int] = np.bincount(classes_of(fields, top), minlength=CLASSES).tolist()
    return counts


# ---------------------------------------------------------------- positions


class Block:
    """Up to 128 words; ``before[i]`` is the sum of the costs of those before word i."""

    def __init__(self, costs: Sequence[int]) -> None:
        self.count = len(costs)
        self.before = list(accumulate(costs, initial=0))

    def weight(self, first: int, until: int) -> int:
        """Weight, of 2**24, of "the first change from ``first`` on lies before ``until``".

        One more for every word, so that each stays possible whatever it costs, and 1/65536 less,
        so that "no change" stays possible. What is left of 2**24 belongs to "no change".
        """
        changed = (1 << 31) - power(self.before[until] - self.before[first]) >> 7
        return changed - (changed >> 16) + until - first

    def owner(self, first: int, place: int) -> int:
        """The word that owns the weight ``place``."""
        ends = range(first + 1, self.count + 1)
        return first + bisect_right(ends, place, key=lambda until: self.weight(first, until))


def blocks_of(costs: Sequence[int]) -> list[Block]:
    """A chunk's words, by 128; the last block may be short."""
    return [Block(costs[at : at + BLOCK_WORDS]) for at in range(0, len(costs), BLOCK_WORDS)]


# ---------------------------------------------------------------- values

TOP_BITS = 2  # below the leading one of a size that are worth learning
RECIPROCAL = [round(65536 / (seen + 1.5)) for seen in range(159)]


class AdaptiveBit:
    """P(bit is 1) of 2**16, moved towards what was seen by 1 / (seen + 1.5), at least 1 / 160."""

    def __init__(self, p: int, seen: int) -> None:
        self.p = p
        self.seen = seen

    def learn(self, value: int) -> None:
        """Move towards 1 or 0, but never within 64 / 2**16 of it."""
        target = 65536 - 64 if value else 64
        self.p += (target - self.p) * RECIPROCAL[self.seen] >> 16
        self.seen = min(self.seen + 1, 158)


class ValueModel:
    """Everything a chunk learns while it is coded.

    A size is an octave (1, 2-3, 4-7, ...), then its place within: ``top`` holds the first two bits
    below the leading one, by octave and the bits before. An update's size does not depend on the
    weight: octave o of a word of class c is the scale of one step of class c - o. That is where
    ``octave`` begins, a guess that is soon overruled.
    """

    def __init__(self, table: Table) -> None:
        self.direction = AdaptiveBit(1 << 15, 30)
        self.one = [AdaptiveBit(256 * one + 128, 14) for one in table.one]
        self.octave = [
            [AdaptiveBit(128 * table.one[max(cls - octave, 0)] + 18064, 2) for octave in range(64)]
            for cls in range(CLASSES)
        ]
        self.top = [[AdaptiveBit(1 << 15, 6) for _ in range(1 << TOP_BITS)] for _ in range(64)]

    def stop(self, cls: int, octave: int) -> AdaptiveBit:
        """The bit that says whether a size of at least this octave ends there."""
        return self.one[cls] if octave == 0 else self.octave[cls][octave]


def to_order(word: int, dtype: DType) -> int:
    """A number that grows with the value: sign and magnitude words are turned into one line."""
    bits = 8 * dtype.word_bytes
    sign = 1 << bits - 1
    if not dtype.ordered:
        return word
    return word ^ (1 << bits) - 1 if word & sign else word | sign


def from_order(order: int, dtype: DType) -> int:
    """The word of a place in that line."""
    bits = 8 * dtype.word_bytes
    sign = 1 << bits - 1
    if not dtype.ordered:
        return order
    return order ^ sign if order & sign else order ^ (1 << bits) - 1
