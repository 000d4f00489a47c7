"""Whether a parameter still lies as its loader lays it out: samples of words, and digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.codec.digest import xxh3_64
from thinwire.errors import EngineError
from thinwire.torch.copy_loader import CopyLoader
from thinwire.torch.dtypes import torch_dtype
from thinwire.torch.index_map import IndexMap
from thinwire.torch.live import Parameter, converted, lie_alike
from thinwire.torch.stored import Words, words_of

Flags = np.ndarray[Any, np.dtype[np.bool_]]

_SAMPLES = 256
_ENOUGH_SAMPLES = 16
# What counts as about the same value: all words of an FP32 tensor change with every version.
_NEAR = 1 / 8


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
    ) -> bool:
        """Whether most of them are not where the map says, or most of those of a tensor."""
        tensors, elements = index_map.sources(number, self._at)
        near = np.zeros(self._at.size, bool)
        for tensor in np.unique(tensors[tensors >= 0]).tolist():
            chosen = np.flatnonzero(tensors == tensor)
            name = index_map.tensor_name(tensor)
            words = words_of(copy.tensors[name])[elements[chosen]]
            wanted = converted(words, copy.tensors[name].dtype, self._dtype)
            near[chosen] = _near(self._words[chosen], wanted, self._dtype)
            if _are_others(near[chosen]):
                return True
        return _are_others(near[tensors >= 0])


class Layout:
    """How parameters lie as an engine is met, to be compared with what its loader makes of them.

    Args:
        tensors: The model's parameters and buffers by name.
        parameters: What of them can be seen flat.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, Parameter]
    ) -> None:
        self._tensors = tensors
        self._parameters = parameters
        self._samples = {name: Sample(parameter) for name, parameter in parameters.items()}

    def check(
        self,
        copy: Checkpoint,
        loader: CopyLoader,
        index_map: IndexMap | None,
        *,
        may_reload: bool,
    ) -> None:
        """Make sure that what the loader writes is what the engine computes with.

        An engine may arrange or convert weights after loading. Its own reload does what a start
        does; it must leave every parameter as the loader alone has left it. Where there is no
        reload, most of what the engine held when it was met must lie where it lies now.

        Args:
            copy: The host's copy, which was loaded.
            loader: What the engine can do.
            index_map: Where things lie; None: that is not known.
            may_reload: Whether the engine's reload may be called.

        Raises:
            EngineError: It is not.
        """
        if may_reload:
            moved = self._moved_by_reload(copy, loader)
        elif index_map is None:
            moved = self._replaced(self._parameters)
        else:
            moved = self._moved(index_map, copy) + self._replaced(index_map.refused)
        if moved:
            raise EngineError(
                f"{len(moved)} of the engine's parameters, such as {moved[0]!r}, do not hold what "
                "its loader writes there: it arranges or converts weights after loading",
                hint="Only a reload is right then (way reload). Where the engine has none, start "
                "it from a checkpoint of this stream, so that this can be told",
            )

    def _moved_by_reload(self, copy: Checkpoint, loader: CopyLoader) -> list[str]:
        loaded = {name: _digest_of(parameter) for name, parameter in self._parameters.items()}
        loader.reload(copy)
        moved = [name for name, p in self._parameters.items() if _digest_of(p) != loaded[name]]
        now = loader.loader.tensors
        if now is not None and not lie_alike(now(), self._tensors):
            moved.append("a parameter that it replaces")
        return moved

    def _moved(self, index_map: IndexMap, copy: Checkpoint) -> list[str]:
        """The parameters that were not laid out as the map says."""
        return [
            name
            for number, name in enumerate(index_map.parameters)
            if name not in index_map.refused
            and self._samples[name].is_moved(index_map, number, copy)
        ]

    def _replaced(self, names: Iterable[str]) -> list[str]:
        parameters = self._parameters
        return [
            name
            for name in names
            if name in parameters and self._samples[name].is_replaced(parameters[name])
        ]


def _digest_of(parameter: Parameter) -> int:
    """A digest of a parameter's bits."""
    return int(xxh3_64(parameter.words().view(np.uint8)))


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
