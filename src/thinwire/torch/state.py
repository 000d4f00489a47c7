"""What is published of a model: names, dtypes, tied weights, and which part is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import nn

from thinwire.errors import InvalidArgument, TensorMismatch
from thinwire.publish.held import Held
from thinwire.publish.spreading import Holding
from thinwire.torch.dtensors import held_of, local_of
from thinwire.torch.dtypes import dtype_name

State = Mapping[str, torch.Tensor]
StateFn = Callable[[], State]
Rename = Callable[[str], str | None]

# Elements compared at a time.
_PIECE = 1 << 22


class Selection(NamedTuple):
    """What to publish of a model, and how; see :class:`thinwire.torch.TorchPublisher`."""

    dtype: torch.dtype | Literal["auto"] | None = "auto"
    dtypes: Mapping[str, torch.dtype | None] = {}
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    buffers: bool = False
    rename: Rename | None = None
    tied: Mapping[str, str] = {}

    def wants(self, name: str) -> bool:
        """Whether a tensor of that published name is published."""
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def dtype_of(self, name: str, tensor: torch.Tensor, is_buffer: bool) -> torch.dtype:
        """The dtype that a tensor is published in."""
        for pattern, dtype in self.dtypes.items():
            if fnmatchcase(name, pattern):
                return tensor.dtype if dtype is None else dtype
        if self.dtype is None or is_buffer or not tensor.dtype.is_floating_point:
            return tensor.dtype
        if self.dtype == "auto":
            # FP16 is somebody's choice: as BF16 it would lose bits.
            return torch.bfloat16 if tensor.element_size() > 2 else tensor.dtype
        # One-byte floats are somebody's quantisation: rounding them up would hide that.
        return tensor.dtype if tensor.element_size() == 1 else self.dtype


def check_dtypes(selection: Selection) -> None:
    """Raise InvalidArgument unless dtypes are torch's."""
    for dtype in (selection.dtype, *selection.dtypes.values()):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            if dtype == "auto" and dtype is selection.dtype:
                continue
            raise InvalidArgument(
                f"{dtype!r} is no dtype", hint='Give torch.bfloat16 and the like, None, or "auto"'
            )


class Source(NamedTuple):
    """A tensor as it is published.

    Attributes:
        name: Its published name.
        tensor: The part that is here: contiguous or not, on any device.
        dtype: The dtype that it is published in.
        held: Which part that is; None: none of it.
        identity: That of the whole tensor's object: the same for two names of one parameter.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    held: Held | None
    identity: int


class ModelState:
    """Reads the tensors of a model, or of a function that returns them, time after time.

    Args:
        model: A module, or a function that returns tensors by name. Both are asked at every
            publish: a function may gather, merge or convert what it likes.
        selection: What to publish, and how.
    """

    def __init__(self, model: nn.Module | StateFn, selection: Selection) -> None:
        self._model = _unwrapped(model) if isinstance(model, nn.Module) else model
        self._selection = selection
        if not callable(model):
            raise InvalidArgument(
                f"{type(model).__name__} is neither a torch module nor a function that returns "
                "tensors by name",
                hint="Pass the model, or e.g. lambda: model.state_dict()",
            )
        # Alias -> kept, by published name: found once, checked ever after.
        self.tied: dict[str, str] = dict(selection.tied)

    @torch.no_grad()
    def sources(self) -> list[Source]:
        """The tensors as they are now, each once.

        Raises:
            InvalidArgument: Two of them have one published name, or one has no dtype that can be
                published.
            TensorMismatch: Tied tensors hold different weights.
        """
        sources: dict[str, Source] = {}
        by_memory: dict[tuple[object, ...], str] = {}
        aliases: list[tuple[str, Source]] = []
        for name, tensor, is_buffer in self._named():
            published = self._published(name)
            if published is None or not self._selection.wants(published):
                continue
            source = self._source(published, tensor, is_buffer)
            if published in sources or any(published == alias.name for _, alias in aliases):
                raise InvalidArgument(
                    f"two tensors would be published as {published!r}",
                    hint="Give each a name of its own (rename=), or declare them tied (tied=)",
                )
            shared = by_memory.get(_memory_of(source))
            if published in self.tied or shared is not None:
                kept = self.tied.setdefault(published, shared or "")
                aliases.append((kept, source))
                continue
            by_memory.setdefault(_memory_of(source), published)
            sources[published] = source
        for kept, alias in aliases:
            _check_tied(sources.get(kept), kept, alias)
        return list(sources.values())

    def drawn(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Source]:
        """Tensors that come one by one, each of which may be gone once the next is drawn.

        Tied names must have been declared or found before; they are left out unseen.

        Raises:
            InvalidArgument: What came is not a name and a tensor that can be published.
        """
        for name, tensor in tensors:
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise InvalidArgument("what came is not a name and a tensor")
            published = self._published(_plain(name))
            if published is None or not self._selection.wants(published):
                continue
            if published not in self.tied:
                yield self._source(published, tensor, False)

    def _published(self, name: str) -> str | None:
        published = name if self._selection.rename is None else self._selection.rename(name)
        if published is not None and not _is_text(published):
            raise InvalidArgument(f"the tensor name {published!r} is not Unicode text")
        return published

    def _named(self) -> list[tuple[str, torch.Tensor, bool]]:
        if isinstance(self._model, nn.Module):
            return _named_of(self._model, self._selection.buffers)
        state = self._model()
        if not isinstance(state, Mapping):
            raise InvalidArgument(
                f"the function returned {type(state).__name__}, not tensors by name"
            )
        found = []
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgument(f"{name!r} is {type(tensor).__name__}, not a tensor")
            found.append((name, tensor, False))
        return found

    def _source(self, name: str, tensor: torch.Tensor, is_buffer: bool) -> Source:
        dtype = self._selection.dtype_of(name, tensor, is_buffer)
        dtype_name(dtype, name)
        is_other = tensor.is_floating_point() != dtype.is_floating_point
        if is_other or tensor.is_complex() != dtype.is_complex:
            raise InvalidArgument(
                f"tensor {name!r} is {tensor.dtype} and cannot be published as {dtype}",
                hint="Whole numbers, floats and complex ones stay what they are (dtype=, dtypes=)",
            )
        if tensor.layout != torch.strided:
            raise InvalidArgument(
                f"tensor {name!r} is {tensor.layout}, not an ordinary tensor",
                hint="Leave it out (exclude=), or pass a function that returns dense tensors",
            )
        if tensor.is_meta:
            raise InvalidArgument(
                f"tensor {name!r} is on the meta device: it has no weights",
                hint="Publish after the weights were loaded",
            )
        return Source(name, local_of(tensor), dtype, held_of(name, tensor), id(tensor))


def holdings_of(sources: Sequence[Source]) -> list[Holding]:
    """What this rank holds, as the other ranks are told."""
    return [
        Holding(source.name, dtype_name(source.dtype), source.held.shape, source.held.dims)
        for source in sources
        if source.held is not None
    ]


def _named_of(model: nn.Module, buffers: bool) -> list[tuple[str, torch.Tensor, bool]]:
    named: list[tuple[str, torch.Tensor, bool]] = [
        (_plain(name), tensor, False)
        for name, tensor in model.named_parameters(remove_duplicate=False)
    ]
    if buffers:
        kept = {_plain(name) for name in model.state_dict(keep_vars=True)}
        named += [
            (_plain(name), tensor, True)
            for name, tensor in model.named_buffers(remove_duplicate=False)
            if _plain(name) in kept
        ]
    return named


def _is_text(name: object) -> bool:
    return isinstance(name, str) and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _plain(name: str) -> str:
    """A parameter's name without what compiling and activation checkpoints put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel.

    Raises:
        InvalidArgument: It is sharded by FSDP1, whose flat parameters are nobody's tensors.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _unwrapped(model.module)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InvalidArgument(
            "FullyShardedDataParallel (FSDP1) keeps flat parameters that cannot be published",
            hint="Use fully_shard (FSDP2), or pass a function that returns DTensors by name",
        )
    return model


def _memory_of(source: Source) -> tuple[object, ...]:
    """What is equal for two names of the same memory, or, where nothing is here, of one object."""
    tensor = source.tensor
    if tensor.numel() == 0:
        return (source.identity,)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its elements in order, some at a time: what is done to them takes little memory."""
    flat = tensor.reshape(-1)
    for start in range(0, max(1, flat.numel()), _PIECE):
        yield flat[start : start + _PIECE]


def _check_tied(kept: Source | None, kept_name: str, alias: Source) -> None:
    if kept is None:
        raise InvalidArgument(
            f"{alias.name!r} is tied to {kept_name!r}, which is not published",
            hint="tied= maps the name that is left out to the one that is published",
        )
    if _memory_of(kept) == _memory_of(alias):
        return
    is_equal = kept.held == alias.held and kept.dtype == alias.dtype
    if is_equal:
        is_equal = all(
            torch.equal(*(p.to(kept.dtype).view(torch.uint8) for p in pair))
            for pair in zip(pieces_of(kept.tensor), pieces_of(alias.tensor), strict=True)
        )
    if not is_equal:
        raise TensorMismatch(
            f"{alias.name!r} and {kept.name!r} are tied and hold different weights",
            hint="Only one of them is published: untie them (publish both), or mend the model",
            tensor=alias.name,
        )
