"""One chunk of words to bytes and back: the class coder, or what is smaller.

The first byte of a chunk names its method: the number of a rate table (class coded), or
``PLANES`` (XOR with the base, byte planes, zstd) or ``RAW`` (the new bytes). No bytes at all say
that nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from thinwire.codec import _native, zstd
from thinwire.codec.digest import xxh3_64
from thinwire.codec.dtypes import DType
from thinwire.errors import Corrupt, Unsupported

TABLE_BYTES = 66
MAX_TABLES = 128
PLANES = 0xFE
RAW = 0xFF
# A class-coded chunk below this share of its raw bytes is kept without trying the general methods:
# in 441 such chunks (MiniLM steps, 14 steps merged, bit flips with no regard to class) the smallest
# of them took at least 1.24 times as many bytes.
_CLASS_WINS_BELOW = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the caller asks of the encoder; what was stored is read from the container.

    Attributes:
        zstd_level: Level of the general method and of carried files, 1 to 19.
        instructions: "avx512", "avx2" or "scalar"; empty: the best this processor runs. The bytes
            are the same for all of them.
    """

    zstd_level: int = 3
    instructions: str = ""


class EncodedChunk(NamedTuple):
    """A chunk's bytes and what was learnt on the way."""

    data: bytes
    changed_count: int
    base_digest: int
    new_digest: int
    steps: tuple[Sequence[int], Sequence[int]]  # changes down and up by octave of their size


@lru_cache(maxsize=64)
def native_codec(dtype: DType, tables: bytes, instructions: str = "") -> _native.Codec:
    """The kernels for one dtype with packed rate tables (``TABLE_BYTES`` each)."""
    return _native.Codec(
        dtype.word_bytes,
        dtype.field_shift,
        dtype.field_mask,
        dtype.ordered,
        np.frombuffer(tables, np.uint8),
        instructions,
    )


def encode_chunk(
    dtype: DType, tables: bytes, base: np.ndarray, new: np.ndarray, spec: Spec
) -> EncodedChunk:
    """Code ``new`` given ``base``: equally long uint8 arrays of at most 2**20 words."""
    base, new = aligned(dtype, base), aligned(dtype, new)
    codec = native_codec(dtype, tables, spec.instructions)
    data, changed, base_digest, new_digest, down, up = codec.encode(base, new, new.size)
    if data is None or len(data) > new.size * _CLASS_WINS_BELOW:
        candidates = [] if data is None else [data]
        candidates += _general(dtype, base, new, spec)
        data = min(candidates, key=len)
    return EncodedChunk(data, changed, base_digest, new_digest, (down, up))


def encode_full_chunk(dtype: DType, new: np.ndarray, spec: Spec) -> tuple[bytes, int]:
    """Code ``new`` without a base; returns the bytes and the digest of ``new``."""
    return min(_general(dtype, None, new, spec), key=len), xxh3_64(new)


def decode_chunk(
    dtype: DType, tables: bytes, base: np.ndarray | None, data: np.ndarray, out: np.ndarray
) -> int | None:
    """Write the new words into ``out`` and return their digest; None where no encoder wrote this.

    ``out`` may be ``base`` itself. Without a base only the general methods can be decoded. After a
    None or an error the content of ``out`` is undefined.

    Raises:
        Corrupt: A general chunk does not unpack to the right size.
        Unsupported: The method is not known.
    """
    if is_class_coded(data):
        if base is None:
            raise Corrupt("a tensor carried in full holds a chunk that needs a base")
        target = aligned(dtype, out)
        decoded = native_codec(dtype, tables).decode(aligned(dtype, base), target, data)
        if target is not out:
            out[:] = target
        return None if decoded is None else int(decoded[0])
    out[:] = _decode_general(dtype, base, data, out.size)
    return xxh3_64(out)


def decode_changes(
    dtype: DType, tables: bytes, base: np.ndarray, data: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Positions (uint32, rising), new words (uint8, ``word_bytes`` each), digest of the result."""
    if is_class_coded(data):
        ok, known, where, words = native_codec(dtype, tables).changes(aligned(dtype, base), data)
        if not ok:
            return None
        return np.frombuffer(where, "<u4"), np.frombuffer(words, np.uint8), int(known)
    new = np.empty_like(base)
    new[:] = _decode_general(dtype, base, data, base.size)
    old_words, new_words = (a.reshape(-1, dtype.word_bytes) for a in (base, new))
    positions = np.flatnonzero((old_words != new_words).any(axis=1)).astype("<u4")
    return positions, new_words[positions].reshape(-1), xxh3_64(new)


def aligned(dtype: DType, words: np.ndarray) -> np.ndarray:
    """The same array, or a copy where its words do not lie at multiples of their size.

    The kernels read words, and a tensor in a file may begin at any byte.
    """
    return words.copy() if words.ctypes.data % dtype.word_bytes else words


def is_class_coded(data: np.ndarray) -> bool:
    """Whether the chunk uses a rate table; an empty one (no change) counts.

    Raises:
        Unsupported: The first byte names no method of this release.
    """
    if data.size == 0 or data[0] < MAX_TABLES:
        return True
    if data[0] not in (PLANES, RAW):
        raise Unsupported(
            f"a chunk is coded by method {int(data[0])}, which this release does not know",
            hint="Upgrade thinwire",
        )
    return False


def method_name(first_byte: int) -> str:
    """The name of a chunk's method: "class", "planes", "raw", or "unknown"."""
    if first_byte < MAX_TABLES:
        return "class"
    return {PLANES: "planes", RAW: "raw"}.get(first_byte, "unknown")


def _general(dtype: DType, base: np.ndarray | None, new: np.ndarray, spec: Spec) -> list[bytes]:
    mixed = new if base is None else new ^ base
    planes = np.ascontiguousarray(mixed.reshape(-1, dtype.word_bytes).T)
    return [
        bytes([PLANES]) + zstd.compress(planes.reshape(-1).data, spec.zstd_level),
        bytes([RAW]) + new.tobytes(),
    ]


def _decode_general(
    dtype: DType, base: np.ndarray | None, data: np.ndarray, size: int
) -> np.ndarray:
    if data[0] == RAW:
        if data.size - 1 != size:
            raise Corrupt(f"a raw chunk holds {data.size - 1} bytes where {size} belong")
        return data[1:]
    plain = np.frombuffer(zstd.decompress(data[1:].data, size, "a chunk"), np.uint8)
    mixed = np.ascontiguousarray(plain.reshape(dtype.word_bytes, -1).T).reshape(-1)
    return mixed if base is None else mixed ^ base
