"""Words, chunks and tables for the tests of the codec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from thinwire.codec import _native
from thinwire.codec.dtypes import DTYPES, DType

INSTRUCTION_SETS = _native.instruction_sets()
# Around the words of a cost group, a block and a piece of the kernels.
EDGE_COUNTS = [0, 1, 2, 7, 8, 9, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049]
CLASSES = 32


class Chunk(NamedTuple):
    """Base and new words of one dtype, as uint8."""

    dtype: DType
    base: np.ndarray
    new: np.ndarray


def native(dtype: DType, tables: bytes, instructions: str = "") -> _native.Codec:
    """The kernels."""
    return _native.Codec(
        dtype.word_bytes,
        dtype.field_shift,
        dtype.field_mask,
        dtype.ordered,
        np.frombuffer(tables, np.uint8),
        instructions,
    )


def words(data: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes as words."""
    return data.view(f"<u{dtype.word_bytes}")


def random_words(
    rng: np.random.Generator, dtype: DType, count: int, field_count: int | None = None
) -> np.ndarray:
    """Words of any bits, or with fields close to each other, as trained weights have."""
    data = rng.integers(0, 256, count * dtype.word_bytes, dtype=np.uint8)
    if field_count is not None and dtype.field_mask:
        own = words(data, dtype)
        low = int(rng.integers(0, dtype.field_mask + 1))
        fields = (low + rng.integers(0, field_count, count)) & dtype.field_mask
        kind = own.dtype.type
        own &= ~kind(dtype.field_mask << dtype.field_shift)
        own |= fields.astype(own.dtype) << kind(dtype.field_shift)
    return data


def change_words(
    rng: np.random.Generator, dtype: DType, base: np.ndarray, share: float, reach_bits: int
) -> np.ndarray:
    """New words: a share of them moved by up to 2**reach_bits - 1 either way, never by nothing."""
    new = base.copy()
    own = words(new, dtype)
    chosen = rng.random(own.size) < share
    most = (1 << min(reach_bits, 8 * dtype.word_bytes)) - 1
    steps = rng.integers(1, most, own.size, dtype=np.uint64, endpoint=True).astype(own.dtype)
    steps = np.where(rng.random(own.size) < 0.5, steps, ~steps + own.dtype.type(1))
    own[chosen] += steps[chosen]
    return new


@st.composite
def chunks(draw: st.DrawFn, dtypes: list[str] | None = None) -> Chunk:
    """A chunk of any kind: no word, an odd tail, nothing changed, a few, all."""
    dtype = DTYPES[draw(st.sampled_from(dtypes or sorted(DTYPES)))]
    count = draw(st.one_of(st.sampled_from(EDGE_COUNTS), st.integers(0, 3000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = random_words(rng, dtype, count, draw(st.sampled_from([None, 1, 3, 12, 40])))
    share = draw(st.sampled_from([0.0, 0.0005, 0.004, 0.05, 0.4, 1.0]))
    return Chunk(dtype, base, change_words(rng, dtype, base, share, draw(st.integers(1, 64))))


def table(top: int, rates: bytes, ones: bytes) -> bytes:
    """A packed table."""
    return top.to_bytes(2, "little") + rates + ones


@st.composite
def tables_for(draw: st.DrawFn, dtype: DType) -> bytes:
    """One to three tables, none of which a fit would give."""
    row = st.one_of(
        st.binary(min_size=CLASSES, max_size=CLASSES),
        st.sampled_from([bytes(CLASSES), b"\xff" * CLASSES, b"\x00\xff" * (CLASSES // 2)]),
        st.integers(40, 200).map(lambda rate: bytes([rate]) * CLASSES),
    )
    one_table = st.builds(table, st.integers(0, dtype.field_mask), row, row)
    return b"".join(draw(st.lists(one_table, min_size=1, max_size=3)))


def sampled(*chunk: Chunk) -> np.ndarray:
    """Counts to fit tables to: one source a chunk."""
    dtype = chunk[0].dtype
    counts = np.zeros((len(chunk), 3, dtype.field_mask + 1), np.uint64)
    for source, (_, base, new) in enumerate(chunk):
        native(dtype, b"").sample(base, new, 0, 1, counts[source])
    return counts


def fitted(*chunk: Chunk) -> bytes:
    """Tables that suit the chunks."""
    count = sum(c.base.size for c in chunk) // chunk[0].dtype.word_bytes
    return bytes(_native.fit(sampled(*chunk), count))


def flipped_bits(data: bytes) -> Iterator[bytes]:
    """Every copy of ``data`` with one bit changed."""
    for at, bit in itertools.product(range(len(data)), range(8)):
        yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
