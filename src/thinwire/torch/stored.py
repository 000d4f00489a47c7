"""Tensors of a mapped file as torch's and as words, borrowed: for reading only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.dtypes import dtype_named
from thinwire.torch.dtypes import torch_dtype

Words = np.ndarray[Any, Any]


def words_of(tensor: StoredTensor) -> Words:
    """Its elements as their bits; a copy only where the file has them at odd bytes."""
    size = dtype_named(tensor.dtype).word_bytes
    data = tensor.data
    if data.ctypes.data % size:
        data = data.copy()
    return data.view(f"u{size}")


def values_of(name: str, tensor: StoredTensor) -> torch.Tensor:
    """A stored tensor as torch's, one dimension, in the same memory: only to be read.

    Raises:
        TensorMismatch: torch has no such dtype.
    """
    dtype = torch_dtype(tensor.dtype, name)
    data = tensor.data
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    if not data.size:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.asarray(_Alias(data))).view(dtype)


class _Alias:
    """Read-only memory that says it is not: torch knows no read-only tensors, and warns."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.__array_interface__: dict[str, Any] = {
            "data": (data.ctypes.data, False),
            "shape": data.shape,
            "typestr": "|u1",
            "version": 3,
        }
