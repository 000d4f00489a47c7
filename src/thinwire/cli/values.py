"""The first values of a tensor, for people."""

from __future__ import annotations

import numpy as np

from thinwire.codec.dtypes import dtype_named

FIRST_COUNT = 8
_NUMPY = {
    **{"F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "BOOL": "?"},
    **{f"{sign}{bits}": f"<{sign.lower()}{bits // 8}" for sign in "IU" for bits in (8, 16, 32, 64)},
}


def first_values(dtype: str, data: np.ndarray) -> list[str]:
    """The first values as text; of dtypes that numpy lacks, the bits in hexadecimal."""
    if dtype == "BF16":
        words = data[: 2 * FIRST_COUNT].view("<u2").astype(np.uint32) << 16
        return [_text(value) for value in words.view(np.float32)]
    if dtype in _NUMPY:
        kind = np.dtype(_NUMPY[dtype])
        return [_text(value) for value in data[: kind.itemsize * FIRST_COUNT].view(kind)]
    # Of packed types, whole bytes.
    width = dtype_named(dtype).word_bytes
    words = data[: width * FIRST_COUNT].view(f"<u{width}")
    return [f"0x{value:0{2 * width}x}" for value in words.tolist()]


def _text(value: np.generic) -> str:
    if isinstance(value, np.floating | np.complexfloating):
        return f"{value.item():.6g}"
    return str(value.item())
