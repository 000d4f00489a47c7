"""The capture by asynchronous copies, on a device that does its work late and out of step.

``FakeDevice`` keeps, for each stream and thread, the set of what is certain to have run before its
next access (as vector clocks do). Two accesses to the same bytes, one of them a write, that are
not ordered so are a race and fail the test at once, whatever the schedule. The schedules prove the
same by the data: ``late`` runs nothing before it is waited for, ``hostile`` runs first all that
nothing forbids, ``early`` runs all at once.
"""

from __future__ import annotations

import gc
import importlib.util
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: the CUDA capture was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch

from thinwire.errors import InvalidArgument
from thinwire.torch.cuda import (
    CudaDevice,
    Run,
    StreamedCapture,
    plan_slabs,
)

SCHEDULES = ["late", "hostile", "early"]
RUN_WORDS = 8
SLAB_BYTES = 256


class Race(AssertionError):
    """Two accesses to the same memory that nothing orders."""


@dataclass(frozen=True)
class Span:
    """Bytes in memory."""

    first: int
    end: int
    is_write: bool

    @classmethod
    def of(cls, memory: torch.Tensor | np.ndarray, *, is_write: bool) -> Span:
        first = memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr()
        return cls(first, first + memory.nbytes, is_write)

    def conflicts(self, other: Span) -> bool:
        return (
            (self.is_write or other.is_write) and self.first < other.end and other.first < self.end
        )


@dataclass
class Access:
    """Something that a stream or a thread does to memory."""

    what: str
    spans: list[Span]
    before: frozenset[int]
    act: Callable[[], object]
    is_done: bool = False


@dataclass
class Stream:
    name: str
    known: set[int] = field(default_factory=set)


@dataclass
class Event:
    known: frozenset[int] = frozenset()


class FakeDevice:
    """A device whose work runs when the schedule says so; ordinary memory is its memory."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule
        self.accesses: list[Access] = []
        self.threads: dict[int, set[int]] = defaultdict(set)
        self.streams: dict[int, Stream] = defaultdict(lambda: Stream("current"))
        self.pinned_bytes = 0
        self.scratch_bytes = 0
        self.copies_until_failure = -1
        self.free_memory_bytes = 1 << 30
        self.lock = threading.RLock()

    # What StreamedCapture asks of a device.

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def current_stream(self) -> Stream:
        return self.streams[threading.get_ident()]

    def new_stream(self) -> Stream:
        return Stream("side")

    def new_event(self) -> Event:
        return Event()

    def record(self, event: Event, stream: Stream) -> None:
        with self.lock:
            event.known = frozenset(stream.known | self._known())

    def wait(self, stream: Stream, event: Event) -> None:
        with self.lock:
            stream.known |= event.known

    def synchronize(self, event: Event) -> None:
        with self.lock:
            self._known().update(event.known)
            if self.schedule == "hostile":
                for index, access in enumerate(self.accesses):
                    if index not in event.known:
                        self._run_if_ready(access)
            self._run(event.known)

    def pinned(self, byte_count: int) -> torch.Tensor:
        self.pinned_bytes += byte_count
        return torch.full((byte_count,), 0xAA, dtype=torch.uint8)

    def scratch(self, byte_count: int, stream: Stream) -> torch.Tensor:
        assert stream.name == "side"
        self.scratch_bytes += byte_count
        return torch.full((byte_count,), 0xBB, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        if self.copies_until_failure == 0:
            raise RuntimeError("CUDA error: the fake one")
        self.copies_until_failure -= 1
        spans = [Span.of(target, is_write=True), Span.of(source, is_write=False)]
        if source.dtype == target.dtype and source.is_floating_point():
            # Who copies numbers may not count on the bits of a NaN.
            self._launch("copy", spans, stream, lambda: target.copy_(source.double()))
        else:
            self._launch("copy", spans, stream, lambda: target.copy_(source))

    def free_bytes(self) -> int:
        return self.free_memory_bytes

    # What the rest of the world does.

    def stream_writes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The optimizer's kernel, on this thread's current stream."""
        span = Span.of(target, is_write=True)
        self._launch("step", [span], self.current_stream(), lambda: target.copy_(source))

    def thread_reads(self, words: np.ndarray) -> None:
        """The comparison."""
        self._on_thread("host read", Span.of(words, is_write=False))

    def memory_is_reused(self, memory: torch.Tensor) -> None:
        """The allocator gave it to somebody else, who writes there at once."""
        self._on_thread("reuse", Span.of(memory, is_write=True))

    def finish(self) -> None:
        """torch.cuda.synchronize()."""
        with self.lock:
            everything = range(len(self.accesses))
            self._run(everything)
            self._known().update(everything)

    def _known(self) -> set[int]:
        return self.threads[threading.get_ident()]

    def _launch(
        self, what: str, spans: list[Span], stream: Stream, act: Callable[[], object]
    ) -> None:
        with self.lock:
            access = self._add(what, spans, frozenset(stream.known | self._known()), act)
            stream.known |= access.before | {len(self.accesses) - 1}
            if self.schedule == "early":
                self._run_if_ready(access)

    def _on_thread(self, what: str, span: Span) -> None:
        with self.lock:
            access = self._add(what, [span], frozenset(self._known()), lambda: None)
            access.is_done = True
            self._known().add(len(self.accesses) - 1)

    def _add(
        self, what: str, spans: list[Span], before: frozenset[int], act: Callable[[], object]
    ) -> Access:
        for index, other in enumerate(self.accesses):
            if index not in before and any(
                mine.conflicts(theirs) for mine in spans for theirs in other.spans
            ):
                raise Race(f"{what} and {other.what} of the same memory are not ordered")
        access = Access(what, spans, before, act)
        self.accesses.append(access)
        return access

    def _run(self, indexes: Iterable[int]) -> None:
        for index in sorted(indexes):
            access = self.accesses[index]
            if not access.is_done:
                access.act()
                access.is_done = True

    def _run_if_ready(self, access: Access) -> None:
        if not access.is_done and all(self.accesses[index].is_done for index in access.before):
            access.act()
            access.is_done = True


@pytest.fixture(params=SCHEDULES)
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(request.param)


def capture_on(device: FakeDevice, slab_count: int = 2) -> StreamedCapture:
    return StreamedCapture(
        device, slab_bytes=SLAB_BYTES, slab_count=slab_count, run_words=RUN_WORDS
    )


def raw(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    return tensor.detach().to(dtype).view(torch.uint8).numpy().tobytes()


def masters(*counts: int) -> list[torch.Tensor]:
    return [torch.randn(count) for count in counts]


def taken(device: FakeDevice, runs: Iterator[Run], count: int) -> list[bytes]:
    """The words by tensor, each run compared as it comes: in order, none twice, none too long."""
    found = [b""] * count
    words_seen = [0] * count
    newest = 0
    for tensor, start, words in runs:
        device.thread_reads(words)
        assert tensor >= newest
        newest = tensor
        assert start == words_seen[tensor]
        assert start % RUN_WORDS == 0
        found[tensor] += words.tobytes()
        words_seen[tensor] += RUN_WORDS
    return found


def published(
    device: FakeDevice,
    capture: StreamedCapture,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> list[bytes]:
    return taken(device, capture.iterate(tensors, [dtype] * len(tensors)), len(tensors))


def test_every_bit_of_every_dtype_arrives(device: FakeDevice) -> None:
    odd = torch.tensor([0x7FA1, -0x8000, 0, 0x0001, -0x7FFF, 0x7F80], dtype=torch.int16)
    master = torch.tensor([-0.0, 0.0, 1e-40, float("inf"), float("-inf"), float("nan"), 3.1])
    tensors = [
        odd.view(torch.bfloat16),
        odd.view(torch.float16),
        master,
        torch.randn(1000, dtype=torch.float64),
        torch.arange(77),
        torch.arange(9) % 2 == 0,
        torch.empty(0),
        torch.randn(33, dtype=torch.complex64),
        torch.randn(5, requires_grad=True),
        master,
    ]
    dtypes = [
        torch.bfloat16,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.int64,
        torch.bool,
        torch.bfloat16,
        torch.complex64,
        torch.float16,
        torch.float8_e4m3fn,
    ]
    capture = capture_on(device)
    found = taken(device, capture.iterate(tensors, dtypes), len(tensors))
    assert found == [raw(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 400), max_size=6),
    slab_count=st.integers(1, 4),
    schedule=st.sampled_from(SCHEDULES),
)
def test_any_sizes_arrive(counts: list[int], slab_count: int, schedule: str) -> None:
    device = FakeDevice(schedule)
    capture = capture_on(device, slab_count)
    for _ in range(2):
        tensors = masters(*counts)
        assert published(device, capture, tensors) == [raw(t, torch.bfloat16) for t in tensors]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 16])), max_size=8)
)
def test_the_plan_covers_all_in_order_within_the_slabs(sizes: list[tuple[int, int]]) -> None:
    counts, widths = [size[0] for size in sizes], [size[1] for size in sizes]
    expected = [(tensor, word) for tensor, count in enumerate(counts) for word in range(count)]
    seen = []
    for pieces in plan_slabs(counts, widths, slab_bytes=SLAB_BYTES, run_words=RUN_WORDS):
        end = 0
        for tensor, start, count, at in pieces:
            assert at >= end
            assert at % 16 == 0
            assert start % RUN_WORDS == 0
            end = at + count * widths[tensor]
            seen += [(tensor, word) for word in range(start, start + count)]
        assert 0 < end <= SLAB_BYTES
    assert seen == expected


def test_small_tensors_share_a_copy(device: FakeDevice) -> None:
    tensors = masters(3, 5, 7)
    assert published(device, capture_on(device), tensors) == [
        raw(t, torch.bfloat16) for t in tensors
    ]
    assert sum(access.what == "copy" for access in device.accesses) == len(tensors) + 1


def test_the_copies_come_after_the_weights_are_complete(device: FakeDevice) -> None:
    weights, stepped = masters(500, 500)
    device.stream_writes(weights, stepped)
    assert published(device, capture_on(device), [weights]) == [raw(stepped, torch.bfloat16)]


def test_a_step_during_the_capture_is_seen_by_this_device(device: FakeDevice) -> None:
    """Proves the fake, not the capture."""
    weights, stepped = masters(100, 100)
    runs = capture_on(device).iterate([weights], [torch.bfloat16])
    with pytest.raises(Race):
        device.stream_writes(weights, stepped)
    runs.close()


def test_many_publishes_with_steps_between(device: FakeDevice) -> None:
    capture = capture_on(device, slab_count=3)
    weights = masters(700, 3, 0, 64)
    for _ in range(5):
        stepped = masters(700, 3, 0, 64)
        for target, source in zip(weights, stepped, strict=True):
            device.stream_writes(target, source)
        assert published(device, capture, weights) == [raw(t, torch.bfloat16) for t in stepped]
    assert device.pinned_bytes == 3 * SLAB_BYTES
    assert device.scratch_bytes == SLAB_BYTES


def test_one_capture_at_a_time(device: FakeDevice) -> None:
    weights = masters(100)
    capture = capture_on(device)
    runs = capture.iterate(weights, [torch.bfloat16])
    with pytest.raises(InvalidArgument, match="not over"):
        capture.iterate(weights, [torch.bfloat16])
    with pytest.raises(InvalidArgument, match="running"):
        capture.close()
    taken(device, runs, 1)
    capture.close()
    assert published(device, capture, weights) == [raw(weights[0], torch.bfloat16)]


def check_still_sound(device: FakeDevice, capture: StreamedCapture, old: torch.Tensor) -> None:
    """After an early end: nothing reads the old weights, and the next capture is right."""
    device.memory_is_reused(old)
    weights = masters(1000, 3)
    assert published(device, capture, weights) == [raw(t, torch.bfloat16) for t in weights]
    assert device.pinned_bytes == 2 * SLAB_BYTES


@pytest.mark.parametrize("run_count", [0, 1, 5, 40])
def test_closed_early(device: FakeDevice, run_count: int) -> None:
    (weights,) = masters(2000)
    capture = capture_on(device)
    runs = capture.iterate([weights], [torch.bfloat16])
    for _ in range(run_count):
        device.thread_reads(next(runs).words)
    runs.close()
    check_still_sound(device, capture, weights)


def test_forgotten(device: FakeDevice) -> None:
    (weights,) = masters(2000)
    capture = capture_on(device)
    runs = capture.iterate([weights], [torch.bfloat16])
    del runs
    gc.collect()
    check_still_sound(device, capture, weights)


def test_an_error_of_the_comparison(device: FakeDevice) -> None:
    (weights,) = masters(2000)
    capture = capture_on(device)

    def compare() -> None:
        with closing(capture.iterate([weights], [torch.bfloat16])) as runs:
            next(runs)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare()
    check_still_sound(device, capture, weights)


@pytest.mark.parametrize("copy_count", [0, 1, 2, 3, 4, 5, 9])
def test_an_error_of_the_device(device: FakeDevice, copy_count: int) -> None:
    (weights,) = masters(2000)
    capture = capture_on(device)
    device.copies_until_failure = copy_count
    with pytest.raises(RuntimeError, match="CUDA error"):
        published(device, capture, [weights])
    device.copies_until_failure = -1
    check_still_sound(device, capture, weights)


def test_a_device_that_cannot_even_be_waited_for(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies may still come: they never meet a slab of the next capture."""
    (weights,) = masters(2000)
    capture = capture_on(device)
    runs = capture.iterate([weights], [torch.bfloat16])

    def fail(event: Event) -> None:
        raise RuntimeError("CUDA error: the fake one")

    with monkeypatch.context() as patched:
        patched.setattr(device, "synchronize", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            next(runs)
    assert published(device, capture, [weights]) == [raw(weights, torch.bfloat16)]
    assert device.pinned_bytes == 4 * SLAB_BYTES


def test_the_tensors_live_until_they_are_read(device: FakeDevice) -> None:
    weights = torch.randn(2000)
    alive = weakref.ref(weights.untyped_storage())
    expected = raw(weights, torch.bfloat16)
    runs = capture_on(device).iterate([weights], [torch.bfloat16])
    del weights
    gc.collect()
    assert alive() is not None
    assert taken(device, runs, 1) == [expected]


def test_begun_in_inference_mode(device: FakeDevice) -> None:
    capture = capture_on(device)
    weights = masters(500)
    with torch.inference_mode():
        published(device, capture, weights)
    assert published(device, capture, weights) == [raw(weights[0], torch.bfloat16)]


def test_the_words_are_not_for_writing(device: FakeDevice) -> None:
    with closing(capture_on(device).iterate(masters(5), [torch.bfloat16])) as runs:
        assert not next(runs).words.flags.writeable


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 3), torch.zeros(6)[::2], torch.zeros(3, device="meta")],
    ids=["shape", "stride", "device"],
)
def test_what_is_not_flat_and_here_is_refused(device: FakeDevice, tensor: torch.Tensor) -> None:
    capture = capture_on(device)
    with pytest.raises(InvalidArgument, match="tensor 1"):
        capture.iterate([torch.zeros(3), tensor], [torch.bfloat16] * 2)
    with pytest.raises(InvalidArgument, match="2 dtypes"):
        capture.iterate([torch.zeros(3)], [torch.bfloat16] * 2)
    assert published(device, capture, [torch.zeros(3)]) == [bytes(6)]


@pytest.mark.parametrize(
    "sizes", [{"slab_bytes": 100}, {"slab_bytes": 64}, {"slab_count": 0}, {"run_words": 0}]
)
def test_sizes_that_do_not_fit(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        StreamedCapture(FakeDevice("late"), **{"slab_bytes": 256, "run_words": 8, **sizes})


def test_a_cuda_device_is_a_cuda_device() -> None:
    with pytest.raises(InvalidArgument, match="not a CUDA device"):
        CudaDevice(torch.device("cpu"))


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="there is no CUDA device here: the capture was NOT run on one, only on the fake",
)
def test_on_a_real_device() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    weights = [torch.randn(5_000_001, device=cuda), torch.randn(77, device=cuda).bfloat16()]
    capture = StreamedCapture(CudaDevice(cuda), run_words=1 << 17)
    for _ in range(3):
        expected = [w.to(torch.bfloat16).view(torch.uint8).cpu().numpy().tobytes() for w in weights]
        runs = capture.iterate(weights, [torch.bfloat16] * 2)
        found = [b"", b""]
        for tensor, _, words in runs:
            found[tensor] += words.tobytes()
        assert found == expected
        for weight in weights:
            weight.add_(1)
