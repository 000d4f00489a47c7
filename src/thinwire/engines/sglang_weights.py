"""What SGLang shows of its weights, against a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.checkpoint.safetensors_file import StoredTensor

_TENSORS = 16
# SGLang makes the whole tensor a list of Python's, in its scheduler, before it cuts that short.
_MOST_VALUES = 1 << 18
_FLAT_VALUES = 64

Show = Callable[[str, int], Any]
Floats = npt.NDArray[np.float32]


def compare_shown(tensors: Mapping[str, StoredTensor], show: Show) -> bool | None:
    """Compare the beginnings of some tensors with what an engine shows of them.

    The first row is what every layout keeps in place: fused, or split over ranks by rows, rank 0
    has it first. An engine that computes in the other half type holds rounded values; that is
    accepted if it is so for every tensor.

    Args:
        tensors: A checkpoint's, by name.
        show: Asked for a tensor's first rows (of a flat one: values) by name; as nested lists, or
            anything else where it cannot be shown.

    Returns:
        Whether all that were shown are equal; None: none was.
    """
    shown: list[tuple[Floats, Floats]] = []
    for name in _spread(tensors):
        stored = tensors[name]
        expected = _first_values(stored)
        rows = 1 if len(stored.shape) > 1 else expected.size
        for values in _flat_answers(show(name, rows), len(stored.shape)):
            if values.size == expected.size:
                shown.append((expected, values))
    if not shown:
        return None
    return any(
        all(_equal(rounded(expected), values) for expected, values in shown)
        for rounded in (_as_is, _to_f16, _to_bf16)
    )


def _spread(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Names of up to some tensors, evenly over all that can be compared; first and last too."""
    names = [
        name
        for name, stored in tensors.items()
        if stored.dtype in {"BF16", "F16", "F32"}
        and stored.shape
        and 0 < math.prod(stored.shape) <= _MOST_VALUES
    ]
    if len(names) <= _TENSORS:
        return names
    steps = np.linspace(0, len(names) - 1, _TENSORS).round().astype(int)
    return [names[step] for step in steps]


def _first_values(stored: StoredTensor) -> Floats:
    """A matrix's first row, or a flat tensor's first values, as the engine shows them."""
    shape = stored.shape
    count = math.prod(shape[1:]) if len(shape) > 1 else min(shape[0], _FLAT_VALUES)
    if stored.dtype == "BF16":
        words = stored.data[: 2 * count].view("<u2").astype(np.uint32) << np.uint32(16)
        return words.view(np.float32)
    dtype = "<f2" if stored.dtype == "F16" else "<f4"
    return stored.data[: count * np.dtype(dtype).itemsize].view(dtype).astype(np.float32)


def _flat_answers(answer: Any, dimensions: int) -> Iterator[Floats]:
    """The shown values, one array per data-parallel rank."""
    try:
        array = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError):
        return
    if array.size and array.ndim == dimensions:
        yield array.reshape(-1).astype(np.float32)
    elif array.size and array.ndim == dimensions + 1:
        for one in array:
            yield one.reshape(-1).astype(np.float32)


def _equal(expected: Floats, values: Floats) -> bool:
    return bool(np.array_equal(expected, values, equal_nan=True))


def _as_is(values: Floats) -> Floats:
    return values


def _to_f16(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _to_bf16(values: Floats) -> Floats:
    """Round to the nearest BF16, ties to even; NaN stays what it is."""
    words = values.view(np.uint32)
    rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isnan(values), values, rounded.view(np.float32))
