"""The container's digests: XXH3-64, and its two-level form for tensors.

They find accidents, not attackers: whoever can write the file can make them match. Authenticity is
the business of signed manifests.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from thinwire.codec import _native
from thinwire.codec.dtypes import dtype_named

CHUNK_WORDS = 1 << 20
DIGEST_RUN_BYTES = 1 << 20

Buffer = bytes | bytearray | memoryview


def as_bytes_array(data: Buffer | np.ndarray) -> np.ndarray:
    """A one-dimensional uint8 view of contiguous memory."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def xxh3_64(data: Buffer | np.ndarray) -> int:
    """XXH3-64, seed 0, of contiguous bytes."""
    return int(_native.xxh3_64(as_bytes_array(data)))


def combine(chunk_digests: Iterable[int]) -> int:
    """The digest of a tensor from those of its chunks: XXH3-64 over them as little-endian words."""
    return xxh3_64(np.fromiter(chunk_digests, np.dtype("<u8")))


EMPTY_DIGEST = combine(())


def tensor_digest(dtype: str, data: np.ndarray) -> int:
    """The digest of a whole tensor: of the digests of its runs of 2**20 words."""
    chunk_bytes = CHUNK_WORDS * dtype_named(dtype).word_bytes
    words = as_bytes_array(data)
    starts = range(0, words.size, chunk_bytes)
    return combine(xxh3_64(words[start : start + chunk_bytes]) for start in starts)


def file_digest(data: Buffer | np.ndarray) -> int:
    """The digest that ends a container: of the digests of its runs of 2**20 bytes."""
    array = as_bytes_array(data)
    starts = range(0, array.size, DIGEST_RUN_BYTES)
    return combine(xxh3_64(array[start : start + DIGEST_RUN_BYTES]) for start in starts)
