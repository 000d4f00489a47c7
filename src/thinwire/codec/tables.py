"""Rate tables fitted to a sample of what is to be coded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.codec import _native
from thinwire.codec.chunk import TABLE_BYTES, aligned, native_codec
from thinwire.codec.digest import CHUNK_WORDS
from thinwire.codec.dtypes import dtype_named
from thinwire.codec.plan import SMALL_WORDS, Pair, word_count

# Words looked at to fit the rate tables of a dtype, spread evenly over all tensors.
SAMPLE_WORDS = 1 << 20
SAMPLE_SOURCES = 64
_RUN_WORDS = 1 << 10


def fit_tables(dtype: str, pairs: Sequence[Pair]) -> list[bytes]:
    """Packed rate tables of one dtype, fitted to an even sample of about ``SAMPLE_WORDS`` words.

    The counts are kept apart for up to ``SAMPLE_SOURCES`` runs of neighbouring chunks, which may
    differ in scale.
    """
    row = dtype_named(dtype)
    both = [p for p in pairs if p.dtype == dtype and p.base is not None and p.new is not None]
    chunks = _sample_chunks(both, CHUNK_WORDS * row.word_bytes)
    total_words = sum(base.size for base, _ in chunks) // row.word_bytes
    stride = max(1, total_words // SAMPLE_WORDS)
    source_count = min(SAMPLE_SOURCES, len(chunks))
    counts = np.zeros((source_count, 3, row.field_mask + 1), np.uint64)
    codec = native_codec(row, b"")
    runs_before = 0
    for number, (base, new) in enumerate(chunks):
        source = number * source_count // len(chunks)
        first = -runs_before % stride
        codec.sample(aligned(row, base), aligned(row, new), first, stride, counts[source])
        runs_before += -(-base.size // (_RUN_WORDS * row.word_bytes))
    packed = bytes(_native.fit(counts, total_words))
    return [packed[at : at + TABLE_BYTES] for at in range(0, len(packed), TABLE_BYTES)]


def _sample_chunks(pairs: Sequence[Pair], chunk_bytes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Base and new of the chunks to sample: large tensors first, then all small ones."""
    ordered = sorted(pairs, key=lambda pair: word_count(pair) < SMALL_WORDS)
    chunks = []
    for pair in ordered:
        assert pair.base is not None
        assert pair.new is not None
        for start in range(0, pair.base.size, chunk_bytes):
            end = start + chunk_bytes
            chunks.append((pair.base[start:end], pair.new[start:end]))
    return chunks
