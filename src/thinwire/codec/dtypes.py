"""The dtypes of safetensors, and how the codec reads their bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.errors import FormatError, LimitExceeded, Unsupported

MAX_RANK = 32
MAX_TENSOR_BYTES = 1 << 48


class DType(NamedTuple):
    """One safetensors dtype.

    A tensor is coded as words of ``word_bytes``. The class of a word is taken from its field,
    ``(word >> field_shift) & field_mask``: the exponent of a float, the top four bits of a packed
    or unsigned 8-bit float, nothing (mask 0) for integers. ``ordered`` words are sign and
    magnitude.
    """

    name: str
    bits: int
    word_bytes: int
    field_shift: int
    field_mask: int
    ordered: bool


def _table() -> dict[str, DType]:
    rows = [
        DType("BF16", 16, 2, 7, 0xFF, True),
        DType("F16", 16, 2, 10, 0x1F, True),
        DType("F32", 32, 4, 23, 0xFF, True),
        DType("F64", 64, 8, 52, 0x7FF, True),
        DType("C64", 64, 4, 23, 0xFF, True),  # pairs of F32
        DType("F8_E4M3", 8, 1, 3, 0xF, True),
        DType("F8_E5M2", 8, 1, 2, 0x1F, True),
        DType("F8_E4M3FNUZ", 8, 1, 3, 0xF, True),
        DType("F8_E5M2FNUZ", 8, 1, 2, 0x1F, True),
        DType("F8_E8M0", 8, 1, 4, 0xF, False),
        DType("F6_E2M3", 6, 1, 4, 0xF, False),
        DType("F6_E3M2", 6, 1, 4, 0xF, False),
        DType("F4", 4, 1, 4, 0xF, False),
        DType("BOOL", 8, 1, 0, 0, False),
    ]
    for width in (8, 16, 32, 64):
        rows += [DType(f"{sign}{width}", width, width // 8, 0, 0, False) for sign in "IU"]
    return {row.name: row for row in rows}


DTYPES = _table()


def dtype_named(name: str) -> DType:
    """The dtype called ``name``.

    Raises:
        Unsupported: safetensors has no such dtype.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise Unsupported(
            f"dtype {name[:40]!r} is not known",
            hint=f"Known are {', '.join(sorted(DTYPES))}",
            dtype=name[:40],
        ) from None


def byte_count(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor.

    Raises:
        Unsupported: The dtype is not known.
        LimitExceeded: More than ``MAX_RANK`` dimensions or ``MAX_TENSOR_BYTES``.
        FormatError: A negative dimension, or packed elements that do not fill whole bytes.
    """
    row = dtype_named(dtype)
    if len(shape) > MAX_RANK:
        raise LimitExceeded(f"a tensor has {len(shape)} dimensions; the limit is {MAX_RANK}")
    if any(extent < 0 for extent in shape):
        raise FormatError(f"the shape {list(shape)} has a negative dimension")
    # Dimension by dimension, so that hostile shapes never grow a huge integer.
    count = 0 if 0 in shape else 1
    for extent in shape:
        count *= extent
        if count * row.bits > MAX_TENSOR_BYTES * 8:
            raise LimitExceeded(
                f"a tensor of shape {list(shape)} is beyond {MAX_TENSOR_BYTES} bytes"
            )
    if count * row.bits % 8:
        raise FormatError(f"{count} elements of {dtype} do not fill whole bytes")
    return count * row.bits // 8
