"""Weights leave a GPU by asynchronous copies on a stream of their own, through a few pinned slabs.

**None of this has run on a GPU yet.** What it asks of one goes through ``Device``: the tests put
in a device of their own that works late and out of step, and that finds accesses to the same memory
which nothing orders. ``CudaDevice``, a dozen calls into torch.cuda, is checked by types only.

What is ordered, and by what:

- *The copies come after the weights are complete:* the side stream waits for what the current
  stream holds when ``iterate`` is called.
- *The host reads a slab after it is copied:* it waits for the slab's event.
- *A slab is written again after the host has read it:* the next copy into it is given out when the
  caller asks for the run after its last one.
- *Weights are overwritten, and memory is handed to others, after the copies that read them:* the
  iterator holds the tensors, and does not end before the host has seen the last copy end, also
  where it is closed early or fails. Whatever the host starts after that comes later on any stream.

``TorchPublisher.publish`` takes all runs of all tensors of a device, or closes the iterator, before
it returns: so its caller may do with the weights what it likes, and no optimizer needs a hook. The
conversion and the copy of a slab run beside the comparison of the slabs before it, so the capture
takes as long as the slower of the two; nothing of it runs beside the training step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from thinwire.errors import InvalidArgument

# Long enough that beginning a copy costs little beside the copy; four keep the bus busy while the
# host reads one. Not tuned.
SLAB_BYTES = 8 << 20
SLAB_COUNT = 4
_ALIGNMENT = 64
_WIDEST_WORD = 16


class Device(Protocol):
    """What the capture needs of a GPU; streams and events are the device's own."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on this device."""

    def current_stream(self) -> Any:
        """The stream on which the calling thread works."""

    def new_stream(self) -> Any:
        """A stream that nobody else uses."""

    def new_event(self) -> Any:
        """An event; waiting for one that was never recorded is no wait."""

    def record(self, event: Any, stream: Any) -> None:
        """The event is now the end of what the stream holds."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from here on runs after the event."""

    def synchronize(self, event: Any) -> None:
        """The calling thread waits for the event."""

    def pinned(self, byte_count: int) -> torch.Tensor:
        """Page-locked host memory, uint8."""

    def scratch(self, byte_count: int, stream: Any) -> torch.Tensor:
        """Device memory for use on this stream only, uint8."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Give the stream ``target.copy_(source)``; it runs later."""

    def free_bytes(self) -> int:
        """Device memory that nobody used so far, at the training's peak either."""


def device_of(tensor: torch.Tensor) -> Device | None:
    """The GPU that a tensor lies on; None: it is not on one, and is read where it lies."""
    return _cuda_device(tensor.device) if tensor.is_cuda else None


class CudaDevice:
    """A CUDA (or ROCm) device, as torch shows it."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise InvalidArgument(f"{device} is not a CUDA device")
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on this device."""
        return tensor.device == self._device

    def current_stream(self) -> torch.cuda.Stream:
        """The stream on which the calling thread works."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Any:
        """A stream of torch's pool."""
        make: Any = torch.cuda.Stream  # torch does not annotate it
        return make(self._device)

    def new_event(self) -> Any:
        """An event for which a thread sleeps rather than spins."""
        make: Any = torch.cuda.Event
        return make(blocking=True)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """The event is now the end of what the stream holds."""
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """What the stream is given from here on runs after the event."""
        stream.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """The calling thread waits for the event, without the GIL."""
        event.synchronize()

    def pinned(self, byte_count: int) -> torch.Tensor:
        """Page-locked host memory, uint8."""
        return torch.empty(byte_count, dtype=torch.uint8, pin_memory=True)

    def scratch(self, byte_count: int, stream: torch.cuda.Stream) -> torch.Tensor:
        """Device memory that the allocator knows to belong to this stream, uint8."""
        with torch.cuda.stream(stream):
            return torch.empty(byte_count, dtype=torch.uint8, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Give the stream ``target.copy_(source)``; it runs later."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def free_bytes(self) -> int:
        """Device memory that nobody used so far, at the training's peak either."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        peak_bytes = torch.cuda.max_memory_reserved(self._device)
        return max(0, free_bytes - (peak_bytes - torch.cuda.memory_reserved(self._device)))


@cache
def _cuda_device(device: torch.device) -> CudaDevice:
    return CudaDevice(device)


class Run(NamedTuple):
    """Consecutive words of one tensor, as published; valid until the next one is asked for."""

    tensor: int
    start: int
    words: np.ndarray  # uint8, read-only


class Piece(NamedTuple):
    """A part of a tensor and its place in a slab."""

    tensor: int
    start: int
    length: int
    at: int  # byte


def plan_slabs(
    counts: Sequence[int], word_bytes: Sequence[int], *, slab_bytes: int, run_words: int
) -> Iterator[list[Piece]]:
    """Fill slabs with the tensors in their order; small ones share a slab, one copy, one wait.

    A tensor is divided at multiples of ``run_words`` only, so that its runs do not depend on what
    lies before it.
    """
    pieces: list[Piece] = []
    at = 0
    for tensor, (count, width) in enumerate(zip(counts, word_bytes, strict=True)):
        start = 0
        while start < count:
            take = min(count - start, (slab_bytes - at) // width)
            if take < count - start:
                take -= take % run_words
            if take == 0:
                yield pieces
                pieces, at = [], 0
                continue
            pieces.append(Piece(tensor, start, take, at))
            start += take
            at += -(-take * width // _ALIGNMENT) * _ALIGNMENT
    if pieces:
        yield pieces


@dataclass
class _Slab:
    """Pinned memory, and what was copied there last."""

    memory: torch.Tensor
    copied: Any  # event
    pieces: list[Piece]

    def runs(self, dtypes: Sequence[torch.dtype], run_words: int) -> Iterator[Run]:
        words = self.memory.numpy()
        words.flags.writeable = False
        for tensor, start, length, at in self.pieces:
            width = dtypes[tensor].itemsize
            for first in range(0, length, run_words):
                stop = min(length, first + run_words)
                yield Run(tensor, start + first, words[at + first * width : at + stop * width])


class _Buffers:
    """What a capture holds on the device and in pinned memory, from one publish to the next."""

    def __init__(self, device: Device, slab_bytes: int, slab_count: int) -> None:
        self.side = device.new_stream()
        self.written = device.new_event()
        self.drained = device.new_event()
        self.scratch = device.scratch(slab_bytes, self.side)
        self.slabs = [
            _Slab(device.pinned(slab_bytes), device.new_event(), []) for _ in range(slab_count)
        ]


class StreamedCapture:
    """Reads tensors of one device on a side stream; see the module's text for the order of things.

    It holds ``slab_count`` slabs (32 MiB) of pinned and one of device memory until it is closed.

    Args:
        device: Where the tensors lie.
        run_words: The longest run to hand out.
        slab_bytes: What is copied at once; a multiple of 64, and at least ``run_words`` words.
        slab_count: Slabs in turn; with one, copy and comparison alternate.
    """

    def __init__(
        self,
        device: Device,
        *,
        run_words: int,
        slab_bytes: int = SLAB_BYTES,
        slab_count: int = SLAB_COUNT,
    ) -> None:
        if min(run_words, slab_count) < 1:
            raise InvalidArgument("run_words and slab_count are at least 1")
        if slab_bytes % _ALIGNMENT or slab_bytes < run_words * _WIDEST_WORD:
            raise InvalidArgument(
                f"slab_bytes={slab_bytes} is not a multiple of {_ALIGNMENT} that holds "
                f"{run_words} words of {_WIDEST_WORD} bytes"
            )
        self._device = device
        self._slab_bytes = slab_bytes
        self._slab_count = slab_count
        self._run_words = run_words
        self._buffers: _Buffers | None = None
        self._is_busy = False

    def iterate(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> Generator[Run, None, None]:
        """The words of ``tensor.to(dtype)``, run by run, in order; an empty tensor has no runs.

        The first copies are given out at once, after what the current stream holds. Take the runs
        to their end, or in a ``contextlib.closing``: the weights may be written after that.

        Raises:
            InvalidArgument: A tensor is not flat, contiguous and on this device, or the runs of
                another call were not taken to their end, nor closed.
        """
        sources = self._checked(tensors, dtypes)
        if self._is_busy:
            raise InvalidArgument(
                "the capture before this one is not over", hint="Take all its runs, or close it"
            )
        self._is_busy = True
        runs = self._runs(sources, tuple(dtypes))
        # To its first yield: so the end is tidy also where nobody ever takes a run.
        next(runs)
        return runs

    def close(self) -> None:
        """Give the memory back; the next capture, if any, takes it anew."""
        if self._is_busy:
            raise InvalidArgument("a capture is running", hint="Take all its runs, or close it")
        self._buffers = None

    def _checked(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        if len(tensors) != len(dtypes):
            raise InvalidArgument(f"{len(tensors)} tensors, but {len(dtypes)} dtypes")
        for index, tensor in enumerate(tensors):
            if tensor.dim() != 1 or not tensor.is_contiguous() or not self._device.holds(tensor):
                raise InvalidArgument(
                    f"tensor {index} ({tuple(tensor.shape)} on {tensor.device}) is not flat, "
                    "contiguous and on the device of this capture"
                )
        return [tensor.detach() for tensor in tensors]

    def _runs(
        self, sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> Generator[Run, None, None]:
        device = self._device
        try:
            if self._buffers is None:
                # What is made in inference mode could not be written outside of it.
                with torch.inference_mode(False):
                    self._buffers = _Buffers(device, self._slab_bytes, self._slab_count)
            buffers = self._buffers
            device.record(buffers.written, device.current_stream())
            device.wait(buffers.side, buffers.written)
            slabs = plan_slabs(
                [source.numel() for source in sources],
                [dtype.itemsize for dtype in dtypes],
                slab_bytes=self._slab_bytes,
                run_words=self._run_words,
            )
            plan = deque(slabs)
            free = deque(buffers.slabs)
            copying: deque[_Slab] = deque()
            self._give_out(plan, free, copying, sources, dtypes)
            yield Run(0, 0, np.empty(0, np.uint8))  # taken by iterate()
            while copying:
                slab = copying.popleft()
                device.synchronize(slab.copied)
                yield from slab.runs(dtypes, self._run_words)
                free.append(slab)
                self._give_out(plan, free, copying, sources, dtypes)
        finally:
            self._drain()

    def _give_out(
        self,
        plan: deque[list[Piece]],
        free: deque[_Slab],
        copying: deque[_Slab],
        sources: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """Begin as many copies as there are free slabs."""
        assert self._buffers is not None
        buffers, device = self._buffers, self._device
        while plan and free:
            slab = free.popleft()
            slab.pieces = plan.popleft()
            # One stream: these words reach the scratch after those of the slab before have left it.
            for tensor, start, length, at in slab.pieces:
                source = sources[tensor][start : start + length]
                end = at + length * dtypes[tensor].itemsize
                target = buffers.scratch[at:end].view(dtypes[tensor])
                if source.dtype == target.dtype:
                    # As bytes, so that nothing interprets a NaN on the way.
                    source, target = source.view(torch.uint8), target.view(torch.uint8)
                device.copy(target, source, buffers.side)
            device.copy(slab.memory[:end], buffers.scratch[:end], buffers.side)
            device.record(slab.copied, buffers.side)
            copying.append(slab)

    def _drain(self) -> None:
        """From here on no copy reads the weights or writes a slab."""
        try:
            if self._buffers is not None:
                self._device.record(self._buffers.drained, self._buffers.side)
                self._device.synchronize(self._buffers.drained)
        except BaseException:
            # The device failed, and may write to these slabs yet: never again.
            self._buffers = None
            raise
        finally:
            self._is_busy = False
