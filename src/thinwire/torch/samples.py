"""Whether a parameter still lies as its loader lays it out: samples of words, and digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.codec.digest import xxh3_64
from thinwire.torch.index_map import IndexMap
from thinwire.torch.live import Parameter, converted, torch_dtype

Words = np.ndarray[Any, Any]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

_SAMPLES = 256
_ENOUGH_SAMPLES = 16
# What counts as about the same value: all words of an FP32 tensor change with every version.
_NEAR = 1 / 8


def digest_of(parameter: Parameter) -> int:
    """A digest of a parameter's bits."""
    return int(xxh3_64(parameter.words().view(np.uint8)))


class Sample:
    """Some words of a parameter as they were."""

    def __init__(self, parameter: Parameter) -> None:
        self._at = np.unique(
            np.linspace(0, parameter.count - 1, min(_SAMPLES, parameter.count)).astype(np.int64)
        )
        self._dtype = parameter.dtype
        self._words = parameter.read(self._at)

    def is_replaced(self, parameter: Parameter) -> bool:
        """Whether most of them are different now."""
        return _are_others(_near(self._words, parameter.read(self._at), self._dtype))

    def is_moved(
        self,
        index_map: IndexMap,
        number: int,
        copy: Checkpoint,
        words_of: Callable[[Checkpoint, str], Words],
    ) -> bool:
        """Whether most of them are not where the map says, or most of those of a tensor."""
        tensors, elements = index_map.sources(number, self._at)
        near = np.zeros(self._at.size, bool)
        for tensor in np.unique(tensors[tensors >= 0]).tolist():
            chosen = np.flatnonzero(tensors == tensor)
            name = index_map.tensor_name(tensor)
            words = words_of(copy, name)[elements[chosen]]
            wanted = converted(words, copy.tensors[name].dtype, self._dtype)
            near[chosen] = _near(self._words[chosen], wanted, self._dtype)
            if _are_others(near[chosen]):
                return True
        return _are_others(near[tensors >= 0])


def moved_parameters(
    samples: Mapping[str, Sample],
    index_map: IndexMap,
    copy: Checkpoint,
    words_of: Callable[[Checkpoint, str], Words],
) -> list[str]:
    """The parameters that were not laid out as the map says."""
    return [
        name
        for number, name in enumerate(index_map.parameters)
        if name not in index_map.refused
        and samples[name].is_moved(index_map, number, copy, words_of)
    ]


def _are_others(near: Flags) -> bool:
    return near.size >= _ENOUGH_SAMPLES and 2 * int(near.sum()) < near.size


def _near(a: Words, b: Words, dtype: str) -> Flags:
    """Which words are of about one value: between versions of one model, most are."""
    first, second = (
        torch.from_numpy(words.copy().view(np.uint8)).view(torch_dtype(dtype)).double()
        for words in (a, b)
    )
    near: Flags = torch.isclose(first, second, rtol=_NEAR, atol=0, equal_nan=True).numpy()
    return near
