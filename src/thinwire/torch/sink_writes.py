"""Changes of a module, prepared while it is used, then carried out in one go, and taken back.

Preparing finds every place and casts every word; nothing of the module is touched. What is left
for the moment when nobody reads is to exchange words, which done once more undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec import _native
from thinwire.codec.delta import ChunkChanges
from thinwire.errors import BaseUnusable
from thinwire.torch.dtypes import torch_dtype
from thinwire.torch.sink_places import Bound, Published, Spot
from thinwire.torch.stored import values_of

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# Of the same size, for bits that are moved and not computed with.
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Native positions are 32 bits wide.
_MAX_SPAN = 1 << 32


class UpdateTimes(NamedTuple):
    """What the last update took.

    Attributes:
        prepare_s: Decoding, verifying and finding places, while readers read.
        wait_s: Until the readers that were there had ended; new ones waited.
        pause_s: Writing, alone.
        word_count: Words that were written; 0: whole tensors were.
    """

    prepare_s: float
    wait_s: float
    pause_s: float
    word_count: int


class Write(Protocol):
    """One change of a module. Nobody may use the module meanwhile."""

    def write(self) -> None:
        """Do it; after an error some of it may be done."""

    def undo(self) -> None:
        """Take it back, also what an error interrupted.

        Raises:
            BaseUnusable: It cannot be told how far it had come.
        """


class HostWrite:
    """Exchanges words in memory: all of them or, where something is malformed, none."""

    def __init__(self) -> None:
        self._items: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []
        self._state = "before"

    def add(self, spot: Spot, bits: torch.Tensor) -> None:
        """Have ``bits``, which are kept and changed, exchanged with those at a spot."""
        size = bits.element_size()
        memory = spot.flat.view(torch.uint8).numpy()
        window = memory[spot.start * size : (spot.start + _MAX_SPAN) * size]
        words = bits.view(torch.uint8).numpy()
        self._items.append((window, np.ascontiguousarray(spot.offsets, np.uint32), words, size))

    def write(self) -> None:
        """See :class:`Write`."""
        self._state = "within"
        try:
            _native.swap_words(self._items)
        except ValueError:
            self._state = "before"
            raise
        self._state = "after"

    def undo(self) -> None:
        """See :class:`Write`."""
        if self._state == "within":
            raise BaseUnusable("writing was interrupted: the module may hold old or new words")
        if self._state == "after":
            self.write()
            self._state = "before"


class DeviceWrite:
    """Scatters words that are on the device already, with ``index_copy_``.

    Never run on a GPU: tested on the CPU, through the same code.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._at: list[np.ndarray] = []
        self._bits: list[torch.Tensor] = []
        self._is_begun = False

    def add(self, spot: Spot, bits: torch.Tensor) -> None:
        """Have ``bits`` written to a spot of this memory."""
        self._at.append(spot.offsets.astype(np.int64) + spot.start)
        self._bits.append(bits)

    def upload(self) -> None:
        """Bring everything to the device and keep what is there now, beside what runs there."""
        at = torch.from_numpy(np.concatenate(self._at))
        bits = torch.cat(self._bits)
        self._at, self._bits = [], []
        device = self._flat.device
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                # Pinned memory must live until the copies are done: they are when this returns.
                pinned = at.pin_memory(), bits.pin_memory()
                self._where, self._new = (t.to(device, non_blocking=True) for t in pinned)
                self._old = self._flat.index_select(0, self._where)
            stream.synchronize()
        else:
            self._where, self._new = at.to(device), bits.to(device)
            self._old = self._flat.index_select(0, self._where)

    def write(self) -> None:
        """See :class:`Write`."""
        self._is_begun = True
        self._scatter(self._new)

    def undo(self) -> None:
        """See :class:`Write`."""
        if self._is_begun:
            self._scatter(self._old)
            self._is_begun = False

    def _scatter(self, bits: torch.Tensor) -> None:
        # Readers have returned, but what they launched, on whatever stream, may still run; and
        # those who come next may use another stream than this.
        wait_for(self._flat.device)
        self._flat.index_copy_(0, self._where, bits)
        wait_for(self._flat.device)


class DenseWrite:
    """Writes whole tensors; keeps what was there where it may have to be put back."""

    def __init__(self, bound: Bound, name: str, tensor: StoredTensor) -> None:
        self._pairs = [(into, new) for into, new in bound.pairs(name, values_of(name, tensor))]
        self._old = [into.clone() for into, _ in self._pairs]
        self._is_begun = False

    def write(self) -> None:
        """See :class:`Write`."""
        self._is_begun = True
        self._copy([new for _, new in self._pairs])

    def undo(self) -> None:
        """See :class:`Write`."""
        if self._is_begun:
            self._copy(self._old)
            self._is_begun = False

    def _copy(self, values: Sequence[torch.Tensor]) -> None:
        for (into, _), value in zip(self._pairs, values, strict=True):
            wait_for(into.device)
            into.copy_(value)
            wait_for(into.device)


class LoaderWrite:
    """Hands whole tensors to the module's own loader, one after another."""

    def __init__(
        self, load: Load, old: Mapping[str, StoredTensor], new: Mapping[str, StoredTensor]
    ) -> None:
        self._load = load
        self._old = old
        self._new = new
        self._is_begun = False

    def write(self) -> None:
        """See :class:`Write`."""
        self._is_begun = True
        self._load(_shaped(self._new))

    def undo(self) -> None:
        """See :class:`Write`."""
        if self._is_begun:
            self._load(_shaped(self._old))
            self._is_begun = False


class Writes:
    """Several changes as one: all of them are done, or none."""

    def __init__(self, writes: Sequence[Write], word_count: int) -> None:
        self._writes = writes
        self.word_count = word_count
        self._begun: list[Write] = []

    def write(self) -> None:
        """Do all; after an error call :meth:`undo`."""
        for write in self._writes:
            self._begun.append(write)
            write.write()

    def undo(self) -> None:
        """Take back what was done.

        Raises:
            BaseUnusable: That is not possible.
        """
        while self._begun:
            self._begun.pop().undo()


def prepare_changes(
    bound: Bound,
    dtypes: Mapping[str, str],
    changes: Iterable[ChunkChanges],
    *,
    swaps_on_host: bool = True,
) -> tuple[list[Write], int]:
    """Find the places of changed words and cast them as ``copy_`` would.

    Args:
        bound: The places.
        dtypes: The published dtype of each tensor.
        changes: The changes; their words are used up.
        swaps_on_host: False: what is in memory goes the way of what is on a device.

    Returns:
        What is to be written, and how many words.
    """
    host = HostWrite()
    devices: dict[tuple[str, int, int], DeviceWrite] = {}
    word_count = 0
    for change in changes:
        spots = bound.spots(change.name, change.first_word, change.positions)
        for number, spot in enumerate(spots):
            words = change.words
            if spot.chosen is not None:
                words = words.reshape(-1, change.word_bytes)[spot.chosen].reshape(-1)
            elif number + 1 < len(spots):
                # Exchanged words must not be those of two places.
                words = words.copy()
            bits = _cast(words, dtypes[change.name], change, spot)
            flat = spot.flat.view(bits.dtype)
            word_count += bits.numel()
            if flat.device.type == "cpu" and swaps_on_host:
                host.add(spot._replace(flat=flat), bits)
            else:
                key = (str(flat.device), flat.data_ptr(), flat.element_size())
                devices.setdefault(key, DeviceWrite(flat)).add(spot, bits)
    for device in devices.values():
        device.upload()
    return [host, *devices.values()], word_count


def fill(bound: Bound, tensors: Mapping[str, StoredTensor]) -> None:
    """Write whole tensors, one after another, as ``copy_`` does. Nobody may use the module."""
    devices = set()
    for name, tensor in tensors.items():
        if name in bound.equal:
            continue
        values = values_of(name, tensor)
        for into, new in bound.pairs(name, values):
            if into.device not in devices:
                devices.add(into.device)
                wait_for(into.device)
            into.copy_(new)
    for device in devices:
        wait_for(device)


def _cast(words: np.ndarray, dtype: str, change: ChunkChanges, spot: Spot) -> torch.Tensor:
    """Words of a published dtype as the bits that a module holds for them."""
    bits = torch.from_numpy(np.ascontiguousarray(words)).view(_INTS[change.word_bytes])
    published = torch_dtype(dtype, change.name)
    if published in (spot.flat.dtype, torch.complex64):
        return bits
    return bits.view(published).to(spot.flat.dtype).view(_INTS[spot.flat.element_size()])


def _shaped(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        yield name, values_of(name, tensor).view(tensor.shape)


def read_bits(bound: Bound, name: str, published: Published) -> np.ndarray:
    """A published tensor's bits, read from a module that has its dtype: where possible, no copy."""
    name = bound.equal.get(name, name)
    count = math.prod(published.shape)
    held = next(iter(bound.targets(name)), None)
    if held is None or held.numel() != count or not held.is_contiguous():
        held = torch.empty(count, dtype=torch_dtype(published.dtype, name))
        for part, values in bound.pairs(name, held):
            values.copy_(part)
    return bits_of(held).view(torch.uint8).cpu().numpy()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits, one dimension, as whole numbers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().contiguous().reshape(-1).view(_INTS[tensor.element_size()])


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what was asked of it, on all streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
