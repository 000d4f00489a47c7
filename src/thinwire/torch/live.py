"""Parameters of a running model as flat words in the order of their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from thinwire.errors import Unsupported
from thinwire.torch.dtypes import torch_dtype

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Dtypes of parameters that can be placed.
_PLACED = "BF16 F16 F32 F64 F8_E4M3 F8_E5M2 BOOL I8 U8 I16 I32 I64"
_NAMES = {torch_dtype(name): name for name in _PLACED.split()}


class Parameter:
    """One parameter's storage, seen flat.

    Attributes:
        dtype: safetensors' name of its dtype.
        count: Elements.
        flat: The same memory as one dimension of plain integers.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """See a tensor flat.

        Raises:
            Unsupported: Its elements do not fill their memory: it is a view with gaps, or expanded.
        """
        if tensor.dtype not in _NAMES:
            raise Unsupported(f"parameters of {tensor.dtype} are not known")
        if not _is_dense(tensor):
            raise Unsupported("its elements do not fill their memory")
        self.dtype = _NAMES[tensor.dtype]
        self.count = tensor.numel()
        data = tensor.detach()
        flat = torch.as_strided(data, (data.numel(),), (1,), data.storage_offset())
        self.flat = flat.view(_WORDS[data.element_size()])

    @property
    def byte_count(self) -> int:
        """Bytes."""
        return self.count * self.flat.element_size()

    @property
    def is_on_cpu(self) -> bool:
        """Whether its memory can be seen from here."""
        return self.flat.device.type == "cpu"

    def read(self, at: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
        """The bits of some elements."""
        words = self.flat[torch.from_numpy(at).to(self.flat.device)].cpu().numpy()
        return words.view(_UNSIGNED[words.dtype.itemsize])

    def words(self) -> np.ndarray[Any, Any]:
        """Its bits: a view on the CPU, a copy of what is on a device."""
        words = self.flat.cpu().numpy()
        return words.view(_UNSIGNED[words.dtype.itemsize])


def parameters_of(
    named: Iterable[tuple[str, torch.Tensor]],
) -> tuple[dict[str, Parameter], dict[str, str]]:
    """Every memory once, by the first name it goes by; and what cannot be seen flat, with why.

    What lies within another parameter is seen there. What it shares with another only in part is
    left out: words exchanged twice would not be exchanged.
    """
    found: dict[str, Parameter] = {}
    refused: dict[str, str] = {}
    seen: dict[str, tuple[str, int, int]] = {}
    for name, tensor in named:
        if not tensor.numel():
            continue
        try:
            found[name] = Parameter(tensor)
        except Unsupported as error:
            refused[name] = error.message
        else:
            start = tensor.data_ptr()
            seen[name] = (str(tensor.device), start, start + found[name].byte_count)
    # By place; of those that begin together, the longest first, and the first of equal ones.
    end = ("", 0, 0)
    for name, span in sorted(seen.items(), key=lambda item: (*item[1][:2], -item[1][2])):
        device, start, stop = span
        if device == end[0] and start < end[2]:
            del found[name]
            if stop > end[2]:
                refused[name] = "it shares a part of its memory with another parameter"
        else:
            end = span
    return found, refused


def converted(words: np.ndarray[Any, Any], source: str, target: str) -> np.ndarray[Any, Any]:
    """Words of one dtype as a loader's ``copy_`` makes them words of another."""
    if source == target:
        return words
    # Of what cannot be written torch makes no tensor without a warning.
    words = words if words.flags.writeable else words.copy()
    value = torch.from_numpy(words.view(np.uint8)).view(torch_dtype(source))
    bits = value.to(torch_dtype(target)).view(_WORDS[torch_dtype(target).itemsize]).numpy()
    return bits.view(_UNSIGNED[bits.dtype.itemsize])


def named_tensors(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """A module's parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def lie_alike(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors of the same names are seen in the same memory."""

    def places(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
        return {
            name: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for name, t in tensors.items()
        }

    return places(a) == places(b)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether some order of its dimensions makes it contiguous."""
    expected = 1
    dims = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    for stride, extent in sorted(dims):
        if stride != expected:
            return False
        expected *= extent
    return True
