"""The coder of one chunk once more, slow and plain: byte for byte what the kernels write and read.

A chunk holds up to 2**20 words of one dtype. The receiver has the *base* words; the chunk says
which of them changed, and to what. Read from top to bottom:

1. **Range coder.** Choices with known probabilities become one long binary fraction.
2. **Rates and costs.** The exponent of a base word, its *class*, says how likely it is to change. A
   table holds one rate a class; a chunk moves all of them by one shift.
3. **Positions.** In blocks of 128 words. "Which word is the first to change, if any?" is one
   choice, priced by the words' costs added up; after each change it is asked of the rest.
4. **Values.** How many representable values up or down? Direction, "is it one?", then an
   Elias-gamma-like tail, all with bits that adapt.
5. **The chunk**: table number, shift, range coder's bytes.

What both sides agree on (2, 3, and the bits of 4) is in ``reference_model``. How an encoder finds
its tables, which no decoder needs to know, is in ``reference_fit``.

Integers only wherever a bit of the result depends on it: the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.codec.dtypes import DType
from thinwire.codec.reference_fit import best_shift, class_bits, fit, sample
from thinwire.codec.reference_model import (
    BLOCK_WORDS,
    TOP_BITS,
    AdaptiveBit,
    Table,
    ValueModel,
    blocks_of,
    class_costs,
    classes_of,
    count_classes,
    fields_of,
    from_order,
    to_order,
    unpack_tables,
    words_of,
)
from thinwire.errors import Corrupt

__all__ = ["decode_chunk", "encode_chunk", "encode_with", "fit", "sample"]

SAMPLED_BLOCKS = 128
SHIFT_BIAS = 128  # the second byte of a chunk is its shift + 128
SHIFT_MAX = 64
MASK_64 = (1 << 64) - 1

# ---------------------------------------------------------------- range coder


class RangeEncoder:
    """Narrows the interval [low, low + range) with every choice; any number in the last will do.

    Both are 64-bit windows on a longer number: once the range falls below 2**32, the upper 32 bits
    of ``low`` are settled but for a carry, and move to the output.
    """

    def __init__(self) -> None:
        self.low = 0
        self.range = MASK_64
        self.out = bytearray()

    def bit(self, value: int, p_one: int) -> None:
        """A bit that is 1 with probability ``p_one`` / 2**16; 1 is the lower part."""
        bound = (self.range >> 16) * p_one
        if value:
            self._narrow(0, bound)
        else:
            self._narrow(bound, self.range - bound)

    def symbol(self, low: int, high: int) -> None:
        """The choice that owns the weights [low, high) of 2**24."""
        unit = self.range >> 24
        self._narrow(unit * low, unit * (high - low))

    def last_symbol(self, low: int) -> None:
        """The choice that owns all weights from ``low`` on, and what the cut of the range left."""
        start = (self.range >> 24) * low
        self._narrow(start, self.range - start)

    def direct(self, value: int, bits: int) -> None:
        """Bits of even odds, at most 16 at once, the highest first."""
        while bits > 0:
            now = min(bits, 16)
            bits -= now
            unit = self.range >> now
            self._narrow(unit * (value >> bits & (1 << now) - 1), unit)

    def finish(self) -> bytes:
        """The fewest bytes that name a number in the interval; zeros follow for a reader."""
        count = 0
        while True:
            step = 1 << 64 - 8 * count
            value = -(-self.low // step) * step
            if value < self.low + self.range:
                break
            count += 1
        self._carry(value >> 64)
        return bytes(self.out) + (value & MASK_64).to_bytes(8, "big")[:count]

    def _narrow(self, start: int, width: int) -> None:
        self.low += start
        self.range = width
        self._carry(self.low >> 64)
        self.low &= MASK_64
        if self.range < 1 << 32:
            self.out += (self.low >> 32).to_bytes(4, "big")
            self.low = self.low << 32 & MASK_64
            self.range <<= 32

    def _carry(self, carry: int) -> None:
        at = len(self.out)
        while carry:
            at -= 1
            self.out[at] = (self.out[at] + 1) & 0xFF
            carry = self.out[at] == 0


class RangeDecoder:
    """Finds the choices again: ``code`` is the number less ``low``, in the same window."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.range = MASK_64
        self.code = 0
        for _ in range(2):
            self.code = self.code << 32 | self._next_32()

    def bit(self, p_one: int) -> int:
        """A bit that is 1 with probability ``p_one`` / 2**16."""
        bound = (self.range >> 16) * p_one
        if self.code < bound:
            self._narrow(0, bound)
            return 1
        self._narrow(bound, self.range - bound)
        return 0

    def is_last_symbol(self, low: int) -> bool:
        """Whether the choice owns all weights from ``low`` on; if so, it is accepted."""
        start = (self.range >> 24) * low
        if self.code < start:
            return False
        self._narrow(start, self.range - start)
        return True

    def place(self) -> int:
        """A weight of 2**24 that the choice owns."""
        return self.code // (self.range >> 24)

    def take(self, low: int, high: int) -> None:
        """Accept the choice that owns the weights [low, high)."""
        unit = self.range >> 24
        self._narrow(unit * low, unit * (high - low))

    def direct(self, bits: int) -> int:
        """Bits of even odds, at most 16 at once, the highest first."""
        value = 0
        while bits > 0:
            now = min(bits, 16)
            bits -= now
            unit = self.range >> now
            part = min(self.code // unit, (1 << now) - 1)
            self._narrow(unit * part, unit)
            value = value << now | part
        return value

    def is_sound(self) -> bool:
        """Whether an encoder could have written this: its number in the interval, not cut short."""
        return self.position <= len(self.data) + 8 and self.code < self.range

    def _narrow(self, start: int, width: int) -> None:
        self.code -= start
        self.range = width
        if self.range < 1 << 32:
            self.code = (self.code << 32 | self._next_32()) & MASK_64
            self.range <<= 32

    def _next_32(self) -> int:
        word = self.data[self.position : self.position + 4].ljust(4, b"\0")
        self.position += 4
        return int.from_bytes(word, "big")


# ---------------------------------------------------------------- values


def encode_value(
    coder: RangeEncoder, model: ValueModel, dtype: DType, cls: int, base: int, new: int
) -> None:
    """Code the step from ``base`` to ``new``, which differ."""

    def put(bit: AdaptiveBit, value: int) -> None:
        coder.bit(value, bit.p)
        bit.learn(value)

    bits = 8 * dtype.word_bytes
    step = (to_order(new, dtype) - to_order(base, dtype)) % (1 << bits)
    up = step < 1 << bits - 1
    size = step if up else (1 << bits) - step
    put(model.direction, up)
    last = size.bit_length() - 1
    for octave in range(min(last + 1, bits - 1)):  # the last octave needs no "stop"
        put(model.stop(cls, octave), octave == last)
    rest = max(last - TOP_BITS, 0)  # bits that are not worth learning
    node = 1
    for at in range(last - 1, rest - 1, -1):
        value = size >> at & 1
        put(model.top[last][node], value)
        node = 2 * node + value
    coder.direct(size & (1 << rest) - 1, rest)


def decode_value(coder: RangeDecoder, model: ValueModel, dtype: DType, cls: int, base: int) -> int:
    """The new word."""

    def get(bit: AdaptiveBit) -> int:
        value = coder.bit(bit.p)
        bit.learn(value)
        return value

    bits = 8 * dtype.word_bytes
    up = get(model.direction)
    octave = 0
    while octave < bits - 1 and not get(model.stop(cls, octave)):
        octave += 1
    rest = max(octave - TOP_BITS, 0)
    size = 1
    for _ in range(octave - rest):
        size = 2 * size + get(model.top[octave][size])
    size = size << rest | coder.direct(rest)
    order = to_order(base, dtype) + (size if up else -size)
    return from_order(order % (1 << bits), dtype)


# ---------------------------------------------------------------- chunks


def encode_chunk(dtype: DType, tables: bytes, base: np.ndarray, new: np.ndarray) -> bytes:
    """Code ``new`` given ``base`` (uint8 arrays of whole words); empty where nothing changed."""
    number, shift = choose_table(dtype, unpack_tables(tables), base, new)
    return encode_with(dtype, tables, number, shift, base, new)


def choose_table(
    dtype: DType, tables: Sequence[Table], base: np.ndarray, new: np.ndarray
) -> tuple[int, int]:
    """The table and the shift of the fewest bits; the unchanged are counted in some blocks."""
    old_words, new_words = words_of(base, dtype), words_of(new, dtype)
    block_number = np.arange(old_words.size) // BLOCK_WORDS
    block_count = -(-old_words.size // BLOCK_WORDS)
    sampled = block_number % max(1, block_count // SAMPLED_BLOCKS) == 0
    fields = fields_of(old_words, dtype)
    changed_fields, sampled_fields = fields[old_words != new_words], fields[sampled]
    best = (0, 0)
    best_bits: int | None = None
    for number, table in enumerate(tables):
        changed = count_classes(changed_fields, table.top)
        seen = [
            max(changes, words * old_words.size // max(1, sampled_fields.size))
            for changes, words in zip(
                changed, count_classes(sampled_fields, table.top), strict=True
            )
        ]
        shift = best_shift(table.rate, seen, changed)
        bits = class_bits(table.rate, seen, changed, shift)
        if best_bits is None or bits < best_bits:
            best_bits, best = bits, (number, shift)
    return best


def encode_with(
    dtype: DType, tables: bytes, number: int, shift: int, base: np.ndarray, new: np.ndarray
) -> bytes:
    """Code a chunk with a table and a shift that someone chose."""
    old_words, new_words = words_of(base, dtype), words_of(new, dtype)
    positions = np.flatnonzero(old_words != new_words).tolist()
    if not positions:
        return b""
    table = unpack_tables(tables)[number]
    classes = classes_of(fields_of(old_words, dtype), table.top).tolist()
    costs = class_costs(table, shift)
    coder, model = RangeEncoder(), ValueModel(table)
    changes = iter([*positions, old_words.size])  # the end of the list lies beyond every block
    next_change = next(changes)
    for number_of_block, block in enumerate(blocks_of([costs[cls] for cls in classes])):
        start = number_of_block * BLOCK_WORDS
        first = 0
        while first < block.count:
            at = next_change - start
            if at >= block.count:
                coder.last_symbol(block.weight(first, block.count))
                break
            coder.symbol(block.weight(first, at), block.weight(first, at + 1))
            old, new_word = int(old_words[next_change]), int(new_words[next_change])
            encode_value(coder, model, dtype, classes[next_change], old, new_word)
            next_change = next(changes)
            first = at + 1
    return bytes([number, shift + SHIFT_BIAS]) + coder.finish()


def decode_chunk(
    dtype: DType, tables: bytes, base: np.ndarray, data: bytes | np.ndarray
) -> np.ndarray:
    """The new words, as a uint8 array.

    Raises:
        Corrupt: No encoder could have written ``data``.
    """
    data = bytes(data)
    words = words_of(base, dtype).copy()
    if not data:
        return words.view(np.uint8)
    known = unpack_tables(tables)
    if len(data) < 2 or data[0] >= len(known) or abs(data[1] - SHIFT_BIAS) > SHIFT_MAX:
        raise Corrupt("a chunk names a table or a shift that does not exist")
    table = known[data[0]]
    classes = classes_of(fields_of(words, dtype), table.top).tolist()
    costs = class_costs(table, data[1] - SHIFT_BIAS)
    coder, model = RangeDecoder(data[2:]), ValueModel(table)
    for number, block in enumerate(blocks_of([costs[cls] for cls in classes])):
        start = number * BLOCK_WORDS
        first = 0
        while first < block.count:
            if coder.is_last_symbol(block.weight(first, block.count)):
                break
            at = block.owner(first, coder.place())
            coder.take(block.weight(first, at), block.weight(first, at + 1))
            where = start + at
            words[where] = decode_value(coder, model, dtype, classes[where], int(words[where]))
            first = at + 1
    if not coder.is_sound():
        raise Corrupt("a chunk does not end where an encoder would have ended it")
    return words.view(np.uint8)
