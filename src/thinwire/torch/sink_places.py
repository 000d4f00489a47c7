"""Where the tensors of a stream live in a torch module.

A sink knows a module only through :class:`Places`. :class:`NamedPlaces` looks tensors up by name;
another implementation may place them by an index map, where a module fuses or cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from thinwire.errors import TensorMismatch
from thinwire.torch.dtypes import dtype_name, torch_dtype
from thinwire.torch.state import ModelState, Rename, Selection, Source


class Published(NamedTuple):
    """A tensor of a version: safetensors' name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Content(NamedTuple):
    """What a version says that a sink shall hold.

    Attributes:
        tensors: The published tensors by name.
        aliases: Names that are tied: each to the tensor that was published for it.
        wants: Whether a tensor was asked for: a partial follower also gets small ones that were
            not.
    """

    tensors: Mapping[str, Published]
    aliases: Mapping[str, str]
    wants: Callable[[str], bool]


class Spot(NamedTuple):
    """Where some words of a published tensor live: in ``flat``, at ``start + offsets``.

    Attributes:
        flat: A view of a module's storage, one dimension, in the module's own dtype.
        start: Added to every offset.
        offsets: uint32, of contiguous memory.
        chosen: Which of the words that were asked about these are; None: all, in order.
    """

    flat: torch.Tensor
    start: int
    offsets: np.ndarray
    chosen: np.ndarray | None


class Bound(Protocol):
    """A module's places for the tensors of one version.

    Attributes:
        equal: Tensors that have no place of their own, each with the one whose place it shares: a
            version must hold equal bits in both.
    """

    equal: Mapping[str, str]

    def spots(self, name: str, first: int, offsets: np.ndarray) -> list[Spot]:
        """Where the words ``first + offsets`` of a published tensor live; offsets are uint32."""

    def pairs(self, name: str, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the module, each beside the same elements of ``values``, a flat whole tensor."""

    def targets(self, name: str) -> Sequence[torch.Tensor]:
        """The module's tensors that hold something of a published one."""


class Places(Protocol):
    """Knows where a module holds the tensors of a stream."""

    def bind(self, content: Content) -> Bound:
        """Find a place for every tensor.

        Raises:
            TensorMismatch: One has none, or does not fit; the module lacks what it needs. Names it.
        """


class NamedPlaces:
    """Places by name: a tensor of the stream is the module's tensor of that name.

    Every parameter must be in the stream, and every tensor of the stream in the module; persistent
    buffers may be missing in the stream, and then stay as they are. Names that share memory in the
    module are one; one that is tied in the stream and not in the module is written twice.

    Args:
        module: The module.
        rename: What a name of the module is called in the stream; None: it stays as it is.
        tied: Names of the stream that were not published, each with the one to take instead.
        ignore: Shell patterns of tensors of the stream that the module need not have.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Rename | None = None,
        tied: Mapping[str, str] | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        self._module = module
        self._selection = Selection(dtype=None, buffers=True, rename=rename)
        self._tied = dict(tied or {})
        self._ignore = list(ignore)

    def bind(self, content: Content) -> NamedBound:
        """Find a place for every tensor; see :meth:`Places.bind`."""
        state = ModelState(self._module, self._selection)
        sources = state.sources()
        aliases = {**content.aliases, **self._tied}
        targets: dict[str, list[torch.Tensor]] = {}
        equal: dict[str, str] = {}
        needed = self._needed_names()
        for source in sources:
            names = [source.name, *(a for a, kept in state.tied.items() if kept == source.name)]
            found = [name for name in names if name in content.tensors]
            if not found:
                found = [aliases[n] for n in names if aliases.get(n) in content.tensors][:1]
            if not found:
                if not needed.isdisjoint(names):
                    raise _missing(source.name, content)
                continue
            tensor = _checked(source, found[0], content.tensors[found[0]])
            targets.setdefault(found[0], []).append(tensor)
            for other in found[1:]:
                _checked(source, other, content.tensors[other])
                if content.tensors[other].dtype != content.tensors[found[0]].dtype:
                    raise TensorMismatch(
                        f"{other!r} and {found[0]!r} share memory in the module and differ in "
                        "dtype in the stream",
                        tensor=other,
                    )
                equal[other] = found[0]
        for name in content.tensors:
            if name not in targets and name not in equal and self._is_extra(name, content):
                raise TensorMismatch(
                    f"tensor {name!r} is in the stream, and the module has none of that name",
                    hint="Is it the same model? rename= maps names, ignore= leaves tensors out",
                    tensor=name,
                )
        return NamedBound(targets, equal)

    def _needed_names(self) -> set[str]:
        """Published names of parameters: buffers may be missing."""
        selection = self._selection._replace(buffers=False)
        state = ModelState(self._module, selection)
        return {source.name for source in state.sources()} | set(state.tied)

    def _is_extra(self, name: str, content: Content) -> bool:
        is_ignored = any(fnmatchcase(name, pattern) for pattern in self._ignore)
        return content.wants(name) and not is_ignored


class NamedBound:
    """What :class:`NamedPlaces` found; see :class:`Bound`."""

    def __init__(
        self, targets: Mapping[str, Sequence[torch.Tensor]], equal: Mapping[str, str]
    ) -> None:
        self._targets = targets
        self._flats = {name: [_flat_of(t) for t in tensors] for name, tensors in targets.items()}
        self.equal = equal

    def spots(self, name: str, first: int, offsets: np.ndarray) -> list[Spot]:
        """See :class:`Bound`."""
        found = []
        for tensor, flat in zip(
            self._targets.get(name, ()), self._flats.get(name, ()), strict=True
        ):
            if tensor.is_contiguous():
                found.append(Spot(flat, first, offsets, None))
            else:
                at = _strided(tensor, offsets.astype(np.int64) + first)
                start = int(at.min()) if at.size else 0
                if at.size and int(at.max()) - start >= 1 << 32:
                    raise _misfit(name, "lies too far apart in memory", "Make it contiguous")
                found.append(Spot(flat, start, (at - start).astype(np.uint32), None))
        return found

    def pairs(self, name: str, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See :class:`Bound`."""
        for tensor in self._targets.get(name, ()):
            yield tensor, values.view(tensor.shape)

    def targets(self, name: str) -> Sequence[torch.Tensor]:
        """See :class:`Bound`."""
        return self._targets.get(name, ())


def _checked(source: Source, name: str, published: Published) -> torch.Tensor:
    """A module's tensor, once it is known to be able to hold a published one."""
    tensor = source.tensor
    shape = tuple(tensor.shape)
    whole = None if source.held is None else source.held.shape
    if whole != shape:
        raise _misfit(name, "is spread over ranks", "Only whole tensors can be kept here")
    if shape != published.shape:
        raise _misfit(
            name, f"is {list(published.shape)} in the stream and {list(shape)} in the module"
        )
    own = dtype_name(tensor.dtype, name)
    if own != published.dtype and not (
        tensor.is_floating_point() and torch_dtype(published.dtype, name).is_floating_point
    ):
        raise _misfit(name, f"is {published.dtype} in the stream and {own} in the module")
    if any(n > 1 and not step for step, n in zip(tensor.stride(), shape, strict=True)):
        raise _misfit(name, "is expanded: several of its elements are one in memory")
    return tensor


def _misfit(name: str, reason: str, hint: str = "") -> TensorMismatch:
    hint = hint or "Is it the same model? rename= maps names"
    return TensorMismatch(f"tensor {name!r} {reason}", hint=hint, tensor=name)


def _missing(name: str, content: Content) -> TensorMismatch:
    near = next((n for n in content.tensors if n.endswith(name) or name.endswith(n)), None)
    found = f"; it has {near!r}" if near else ""
    return TensorMismatch(
        f"the module needs tensor {name!r}, which is not in the stream{found}",
        hint="Is it the same model? rename= maps names (None: the tensor stays), tied= says which "
        "names share weights",
        tensor=name,
    )


def _flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first to its last element, one dimension."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.numel():
        return tensor.reshape(-1)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def _strided(tensor: torch.Tensor, words: np.ndarray) -> np.ndarray:
    """Where words of a tensor that is not contiguous lie in its memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    at = np.zeros_like(words)
    for index, step in zip(np.unravel_index(words, tensor.shape), tensor.stride(), strict=True):
        at += index * step
    return at
