"""What the bench measures: tensors as flat arrays of unsigned words, never as floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from thinwire.errors import InvalidArgument

Words: TypeAlias = npt.NDArray[Any]
"""1-D array of uint8, uint16, uint32 or uint64: one word per element, its bits as stored."""

_WORD_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("F64", "U64", "I64", "C64"), 8),
}
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Tensor(NamedTuple):
    """One tensor of a checkpoint.

    ``dtype`` is the safetensors name. ``words`` has one entry per element; types under eight bits
    are packed, so there it has one entry per byte.
    """

    dtype: str
    shape: tuple[int, ...]
    words: Words


Checkpoint: TypeAlias = Mapping[str, Tensor]
"""All tensors of one checkpoint, by name, in file order."""

LoadFn: TypeAlias = Callable[[Path], Mapping[str, tuple[str, tuple[int, ...], npt.NDArray[Any]]]]
"""Reads one checkpoint. The array may hold raw bytes or elements of any dtype of that width."""


def as_tensor(dtype: str, shape: tuple[int, ...], array: npt.NDArray[Any]) -> Tensor:
    """View ``array`` as words.

    No copy is made when ``array`` is contiguous. Raises ValueError for an unknown dtype or when
    the array does not hold exactly ``shape`` elements.
    """
    element_count = int(np.prod(shape, dtype=np.int64))
    if dtype in _PACKED_BITS:
        word_bytes = 1
        word_count = element_count * _PACKED_BITS[dtype] // 8
    elif dtype in _WORD_BYTES:
        word_bytes = _WORD_BYTES[dtype]
        word_count = element_count
    else:
        raise ValueError(f"dtype {dtype!r} is not one that safetensors has")
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.nbytes != word_count * word_bytes:
        raise ValueError(
            f"{dtype} of shape {shape} needs {word_count * word_bytes} bytes, got {flat.nbytes}"
        )
    word_dtype = np.dtype(f"u{word_bytes}")
    # A view of an empty array to a wider word fails in numpy, and there is nothing to view.
    words = flat.view(word_dtype) if flat.size else np.empty(0, word_dtype)
    return Tensor(dtype, tuple(shape), words)


def as_checkpoint(
    loaded: Mapping[str, tuple[str, tuple[int, ...], npt.NDArray[Any]]],
) -> dict[str, Tensor]:
    """Bring what a load function returned into words; the error names the tensor."""
    checkpoint = {}
    for name, (dtype, shape, array) in loaded.items():
        try:
            checkpoint[name] = as_tensor(dtype, shape, array)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
    return checkpoint


def raw_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors of a checkpoint, without any header."""
    return sum(tensor.words.nbytes for tensor in checkpoint.values())


def changed_count(base: Checkpoint, new: Checkpoint) -> int:
    """Number of elements whose bits differ."""
    return sum(
        int(np.count_nonzero(base[name].words != tensor.words)) for name, tensor in new.items()
    )


def require_same_layout(base: Checkpoint, new: Checkpoint) -> None:
    """Raise InvalidArgument unless both have the same names, dtypes and shapes.

    No other delta format here can carry a tensor that appears, vanishes or changes its shape, so
    such a pair cannot be compared.
    """
    unpaired = sorted(set(base) ^ set(new))
    if unpaired:
        raise InvalidArgument(
            f"tensor {unpaired[0]!r} is on one side only ({len(unpaired)} such tensors); "
            "compare checkpoints of one model"
        )
    for name, tensor in new.items():
        if base[name][:2] != tensor[:2]:
            raise InvalidArgument(
                f"tensor {name!r}: base is {base[name].dtype} {base[name].shape}, "
                f"new is {tensor.dtype} {tensor.shape}"
            )
