"""Arrays of every dtype that numpy and ml_dtypes share with safetensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

NUMPY_DTYPES = {
    **{name: np.dtype(name) for name in ["float16", "float32", "float64", "complex64", "bool"]},
    **{
        f"{sign}int{bits}": np.dtype(f"{sign}int{bits}")
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in [
            "bfloat16",
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        ]
    },
}


def bits(values: np.ndarray) -> bytes:
    """An array's bits in order."""
    return np.ascontiguousarray(values).tobytes()


def random_array(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits, NaNs and all; 0 and 1 for bool."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)
    if dtype == np.dtype(bool):
        raw = raw & np.uint8(1)
    return raw.copy().view(dtype).reshape(shape)


def stepped(base: np.ndarray, share: float = 0.1) -> np.ndarray:
    """Some elements with their lowest bit flipped, at least the last one."""
    raw = np.array(base, order="C", copy=True)
    whole = raw.reshape(-1).view(np.uint8).reshape(-1, max(1, base.dtype.itemsize))
    if whole.size:
        chosen = np.random.default_rng(1).random(len(whole)) < share
        chosen[-1] = True
        whole[chosen, 0] ^= 1
    return raw
