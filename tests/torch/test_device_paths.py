"""The whole publisher with tensors on a GPU that is none: FakeDevice, and Triton interpreted.

What lies on the "GPU" is up to the test; its memory is ordinary memory. So each version must be
what the plain path makes of the same weights, byte for byte.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: the GPU paths were NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch

from thinwire.errors import InvalidArgument, Unavailable
from thinwire.publish.staging import Staging
from thinwire.stream.events import Refused
from thinwire.torch import Ticket, capture, cuda, device_diff, triton_diff
from thinwire.torch.cuda import StreamedCapture

from .making import held_in
from .test_cuda_capture import SCHEDULES, FakeDevice, Span
from .test_triton_diff import HAS_TRITON, NO_TRITON, find_changes_reference
from .training import BF16, Rows, Stand, done, row

RUN_WORDS = 500
HOST = ["embed.weight", "counts"]
Find = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Weights:
    """Named tensors, some of them on the fake GPU, and steps that change them."""

    def __init__(self, schedule: str, *, has_gpu: bool = True, has_turned: bool = False) -> None:
        self.device = FakeDevice(schedule)
        self.has_gpu = has_gpu
        self.generator = torch.Generator().manual_seed(1)
        self.tensors = {
            "embed.weight": self.random(70, 30),
            "norm": self.random(30),
            "up": self.random(90, 61),
            "down": self.random(61, 90).to(BF16),
            "gate": self.random(3000),
            "bias": self.random(7).to(torch.float16),
            "counts": torch.arange(5),
            "steps": torch.arange(900),  # on the GPU, and too wide for the kernels
            "mask": torch.arange(40) % 3 == 0,
            "empty": torch.empty(0),
        }
        if has_turned:
            # Torch itself copies it, which the fake device only hears of where nothing is late.
            self.tensors["turned"] = self.random(40, 50).t()
        self.expected: Rows = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def device_of(self, tensor: torch.Tensor) -> FakeDevice | None:
        """What cuda.py is asked: which tensors lie on a GPU."""
        storage = tensor.untyped_storage().data_ptr()
        here = [t for name, t in self.tensors.items() if name not in HOST and self.has_gpu]
        return self.device if storage in [t.untyped_storage().data_ptr() for t in here] else None

    def step(self, share: float = 0.01) -> None:
        """As an optimizer on the GPU: its kernels run later than it returns."""
        self.device.finish()  # to know what they are
        for name, tensor in self.tensors.items():
            new = tensor.clone()
            chosen = torch.rand(new.shape, generator=self.generator) < share
            chosen.reshape(-1)[:1] = True
            if new.dtype.is_floating_point:
                new[chosen] = self.random(int(chosen.sum())).to(new.dtype)
            elif new.dtype == torch.bool:
                new ^= chosen
            else:
                new += chosen
            if name == "gate":
                new[:3] = torch.tensor([-0.0, torch.nan, torch.inf]) * (-1) ** new[3:4].int()
            if name == "down":
                payload = int(torch.randint(1, 127, (1,), generator=self.generator))
                new.reshape(-1)[:1].view(torch.int16)[:] = 0x7F80 + payload
            self.expected[name] = row(new, BF16 if new.dtype == torch.float32 else None)
            if name in HOST:
                tensor.copy_(new)
            elif tensor.numel():
                self.device.stream_writes(tensor, new)


class Scene:
    """A publisher of such weights, and how it went."""

    def __init__(self, folder: Path, weights: Weights, find: Find, **options: Any) -> None:
        self.stand = Stand(folder)
        self.weights = weights
        self.find = find
        self.find_count = 0
        self.versions: list[tuple[int, int, int]] = []
        self.options = {"dtypes": {"down": None, "bias": None}, "memory_limit_bytes": 2000}
        self.options |= options
        self.follower = self.stand.follower()
        self.follower_folder = folder / "f"

    def open(self) -> None:
        self.publisher = self.stand.publisher(lambda: self.weights.tensors, **self.options)

    def find_changes(self, new: torch.Tensor, base: torch.Tensor) -> Any:
        """On the current stream, which the host waits for."""
        device = self.weights.device
        event = device.new_event()
        device.record(event, device.current_stream())
        device.synchronize(event)
        self.find_count += 1
        return self.find(new, base)

    def publish(self, share: float = 0.01, *, is_drawn: bool = False) -> None:
        """Step, publish, step again at once; what was published is what was there between."""
        self.weights.step(share)
        expected = dict(self.weights.expected)
        drawn = reversed(self.weights.tensors.items()) if is_drawn else None
        ticket = self.publisher.publish(tensors=drawn)
        self.weights.step(share)
        self.check(ticket, expected)

    def publish_in_vain(self) -> None:
        self.weights.step()
        self.stand.fail("put_file")
        with pytest.raises(Unavailable):
            self.publisher.publish().wait(60)
        self.stand.mend()

    def skip(self) -> None:
        """A version waits for its upload while the next is to be published."""
        self.weights.step()
        gate = self.stand.hold()
        expected = dict(self.weights.expected)
        first = self.publisher.publish()
        self.weights.step()
        assert self.publisher.publish().state == "skipped"
        gate.set()
        self.check(first, expected)

    def check(self, ticket: Ticket, expected: Rows) -> None:
        version = done(ticket)
        if version.kind == "delta":
            assert ticket.changed_count == version.changed_count, "nothing was found twice"
        assert self.follower.catch_up() == version
        assert held_in(self.follower_folder) == expected
        self.versions.append((version.version, version.changed_count, version.payload_bytes))

    @property
    def refusals(self) -> list[str]:
        """Why the GPU was not asked any more."""
        events = [e for e in self.stand.observer.events if isinstance(e, Refused)]
        return [event.reason for event in events if "any more" in event.reason]

    @property
    def choice(self) -> str:
        (choice,) = self.publisher.device_choices.values()
        return choice


@contextmanager
def scene(
    folder: Path,
    schedule: str = "late",
    *,
    find: Find = find_changes_reference,
    has_gpu: bool = True,
    has_turned: bool = False,
    **options: Any,
) -> Iterator[Scene]:
    """Runs, slabs and pieces are small, so that there are many."""
    weights = Weights(schedule, has_gpu=has_gpu, has_turned=has_turned)
    one = Scene(folder, weights, find, **options)
    slabs = partial(StreamedCapture, slab_bytes=RUN_WORDS * 16 * 4, slab_count=2)
    with pytest.MonkeyPatch.context() as patched, closing(one.stand), closing(one.follower):
        patched.setattr(capture, "RUN_WORDS", RUN_WORDS)
        patched.setattr(capture, "StreamedCapture", slabs)
        patched.setattr(capture, "why_unavailable", lambda: "")
        patched.setattr(cuda, "device_of", weights.device_of)
        patched.setattr(triton_diff, "find_changes", one.find_changes)
        patched.setattr(triton_diff, "PIECE_WORDS", 4000)
        # A measurement would choose by chance.
        patched.setattr(device_diff, "MIN_GAIN", 0)
        one.open()
        yield one


def play(one: Scene) -> list[tuple[int, int, int]]:
    """All that can become of a publish, in an order in which each follows others."""
    one.publish_in_vain()
    one.publish()
    one.publish_in_vain()
    for _ in range(4):
        one.publish()
    one.publish_in_vain()
    one.publish()
    one.publish_in_vain()
    one.publish_in_vain()
    one.publish(is_drawn=True)
    one.skip()
    one.publish()
    one.publish(0.2)
    one.publish()
    one.publish(0.9)
    one.publish_in_vain()
    one.publish(is_drawn=True)
    one.publish(0)
    one.publish()
    one.stand.check_whole()
    return one.versions


def played(folder: Path, schedule: str, find: Find | None = None) -> tuple[Any, ...]:
    """Also in another process, where Triton interprets."""
    find = find or triton_diff.find_changes
    has_turned = schedule == "early"
    with scene(folder, schedule, find=find, has_turned=has_turned, device_diff="on") as one:
        return play(one), one.refusals, one.choice, one.find_count


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Any]:
    """What becomes of it where every tensor is read where it lies."""

    @cache
    def versions(has_turned: bool) -> Any:
        folder = tmp_path_factory.mktemp("plain")
        with scene(folder, "early", has_gpu=False, has_turned=has_turned) as one:
            found = play(one)
            assert one.publisher.device_choices == {}
            assert one.weights.device.pinned_bytes == one.find_count == 0
            return found

    return versions


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_versions_copied_to_the_host(
    tmp_path: Path, schedule: str, plain: Callable[[bool], Any]
) -> None:
    has_turned = schedule == "early"
    with scene(tmp_path, schedule, has_turned=has_turned, device_diff="off") as one:
        assert play(one) == plain(has_turned)
        assert one.publisher.device_choices == {}
        # Slabs are made once, for all publishes.
        assert one.weights.device.pinned_bytes == 2 * RUN_WORDS * 16 * 4
        assert one.find_count == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_versions_found_on_the_device(
    tmp_path: Path, schedule: str, plain: Callable[[bool], Any]
) -> None:
    versions, refusals, choice, find_count = played(tmp_path, schedule, find_changes_reference)
    assert versions == plain(schedule == "early")
    assert refusals == []
    assert choice.startswith("device: ")
    assert find_count > 50


def test_versions_found_by_triton(tmp_path: Path, plain: Callable[[bool], Any]) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    if not HAS_TRITON:
        pytest.skip(NO_TRITON)
    program = (
        "(sys := __import__('sys')).path.insert(0, root) or __import__('importlib')"
        f".import_module('tests.torch.{Path(__file__).stem}').played(folder, 'hostile')"
    )
    root = str(Path(__file__).parents[2])
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("TRITON_INTERPRET", "1")
        future = pool.submit(eval, program, {"root": root, "folder": tmp_path})
        versions, refusals, choice, find_count = future.result()
    assert versions == plain(False)
    assert (refusals, choice[:8]) == ([], "device: ")
    assert find_count > 50


def test_no_copy_of_what_is_found_on_the_device(tmp_path: Path) -> None:
    """After the trials only what the kernels cannot take goes through a slab."""
    with scene(tmp_path, device_diff="auto") as one:
        for _ in range(4):
            one.publish()
        assert one.choice.startswith("device: ")
        (stream,) = one.publisher._capture._capture._streams.values()
        assert stream._buffers is not None
        slabs = [Span.of(slab.memory, is_write=False) for slab in stream._buffers.slabs]
        seen = len(one.weights.device.accesses)
        one.publish()
        spans = [s for access in one.weights.device.accesses[seen:] for s in access.spans]
        copied = [span for span in spans if any(span.conflicts(slab) for slab in slabs)]
        assert sum(span.end - span.first for span in copied) == one.weights.tensors["steps"].nbytes
        assert one.refusals == []


class Broken:
    """Finds changes, but for some calls."""

    def __init__(self, *, last_good: int, lies: bool) -> None:
        self.calls_left = last_good
        self.lies = lies

    def __call__(self, new: torch.Tensor, base: torch.Tensor) -> Any:
        self.calls_left -= 1
        positions, words = find_changes_reference(new, base)
        if self.calls_left >= 0:
            return positions, words
        if self.lies:
            return positions[1:], words[1:]
        raise RuntimeError("CUDA out of memory: the fake one")


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("last_good", [0, 1, 3])
@pytest.mark.parametrize("lies", [False, True])
def test_a_device_that_fails_its_trial(
    tmp_path: Path, mode: str, last_good: int, lies: bool
) -> None:
    """The host's word counts, and the device is not asked again."""
    find = Broken(last_good=last_good, lies=lies)
    with scene(tmp_path, find=find, device_diff=mode) as one:
        for _ in range(3):
            one.publish()
        (reason,) = one.refusals
        assert ("other changes" if lies else "out of memory") in reason
        assert "any more" in one.choice
        asked = one.find_count
        one.publish()
        assert one.find_count == asked
        assert one.choice.startswith("host: ")


@pytest.mark.parametrize("last_good", range(6))
def test_a_device_that_fails_later(tmp_path: Path, last_good: int) -> None:
    """In the middle of a capture: the host finds the rest, and nothing twice."""
    with scene(tmp_path, device_diff="on") as one:
        for _ in range(3):
            one.publish()
        assert one.choice.startswith("device: ")
        one.find = Broken(last_good=last_good, lies=False)
        one.publish()
        one.publish()
        assert len(one.refusals) == 1
        assert one.choice.startswith("host: ")


def test_a_device_that_lies_later_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_diff, "CHECK_EVERY", 5)
    with scene(tmp_path, device_diff="on") as one:
        for _ in range(4):
            one.publish()
        assert one.choice.startswith("device: ")
        one.find = Broken(last_good=0, lies=True)
        one.publish()
        assert len(one.refusals) == 1


def test_the_host_way_is_chosen_where_it_is_faster(tmp_path: Path) -> None:
    # Undone before what the scene sets is.
    with scene(tmp_path) as one, pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_diff, "MIN_GAIN", 1e9)
        one.publish()
        assert one.choice == "host: the device was not tried yet"
        for _ in range(2):
            one.publish()
        asked = one.find_count
        assert asked > 0
        assert "times faster" in one.choice
        assert one.choice.startswith("host: ")
        one.publish()
        assert one.find_count == asked
        assert one.refusals == []


def test_no_memory_is_taken_that_the_training_may_need(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        one.weights.device.free_memory_bytes = 1000
        for _ in range(3):
            one.publish()
        assert one.find_count == 0
        assert "1000 are free" in one.choice


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_failed_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("CUDA out of memory: the fake one")

    with scene(tmp_path, device_diff=mode) as one:
        monkeypatch.setattr(device_diff, "DeviceWords", fail)
        for _ in range(3):
            one.publish()
        assert len(one.refusals) == 1
        assert "out of memory" in one.choice


class TestWhereItIsImpossible:
    def test_nothing_on_a_gpu(self, tmp_path: Path) -> None:
        with (
            pytest.raises(InvalidArgument, match="no tensor with short words"),
            scene(tmp_path, has_gpu=False, device_diff="on"),
        ):
            pass

    def test_without_triton(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with scene(tmp_path, device_diff="off") as one:
            monkeypatch.setattr(capture, "why_unavailable", lambda: "Triton is gone")
            one.options["device_diff"] = "on"
            with pytest.raises(InvalidArgument, match="Triton is gone"):
                one.open()
            one.options["device_diff"] = "auto"
            one.open()
            for _ in range(3):
                one.publish()
            assert (one.publisher.device_choices, one.find_count) == ({}, 0)

    def test_without_memory(self, tmp_path: Path) -> None:
        with scene(tmp_path, device_diff="off") as one:
            one.weights.device.free_memory_bytes = 1000
            one.options["device_diff"] = "on"
            with pytest.raises(InvalidArgument, match="1000 are free"):
                one.open()

    def test_a_word_that_is_none(self, tmp_path: Path) -> None:
        with (
            pytest.raises(InvalidArgument, match="'yes'"),
            scene(tmp_path, device_diff="yes"),
        ):
            pass


def test_a_publisher_that_goes_on_from_the_head(tmp_path: Path) -> None:
    """The words on the device are those of the version that it found."""
    with scene(tmp_path, device_diff="on") as one:
        for _ in range(4):
            one.publish()
        one.publisher.close()
        one.weights.step()
        one.open()
        asked = one.find_count
        one.publish()
        assert one.find_count == asked, "nobody knows yet what memory the training needs"
        for _ in range(4):
            one.publish()
        assert one.choice.startswith("device: ")
        assert one.refusals == []


def test_what_failed_and_was_undone_comes_later(tmp_path: Path) -> None:
    """Nothing of it may have stayed on the device."""
    with scene(tmp_path, "early", device_diff="on") as one:
        for _ in range(4):
            one.publish()
        up = one.weights.tensors["up"]
        one.weights.step()
        done(one.publisher.publish())
        committed = up.clone()
        other = committed.clone()
        other[0] = 3.0

        def write(new: torch.Tensor) -> None:
            one.weights.device.stream_writes(up, new)
            one.weights.expected["up"] = row(new)

        write(other)
        one.stand.fail("put_file")
        with pytest.raises(Unavailable):
            one.publisher.publish().wait(60)
        one.stand.mend()
        write(committed)
        one.check(one.publisher.publish(), one.weights.expected)
        write(other)
        one.check(one.publisher.publish(), one.weights.expected)
        assert one.refusals == []


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("last_good", [0, 1, 3])
def test_a_capture_that_fails_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, last_good: int
) -> None:
    """The error is held on to, and all that stood on the way: yet nothing reads the weights."""
    add = Staging.add
    left = [10**9]

    def fail(staging: Staging, *found: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Unavailable("no space left: the fake one")
        add(staging, *found)

    monkeypatch.setattr(Staging, "add", fail)
    with scene(tmp_path, device_diff=mode) as one:
        for _ in range(4):
            one.publish()
        one.weights.step(0.5)
        left[0] = last_good
        with pytest.raises(Unavailable, match="no space left") as caught:
            one.publisher.publish()
        left[0] = 10**9
        for name, tensor in one.weights.tensors.items():
            if name not in HOST and tensor.numel():
                one.weights.device.stream_writes(tensor, tensor.clone())
        for _ in range(3):
            one.publish()
        assert caught.value.__traceback__ is not None
        assert one.refusals == []


def test_closing_gives_back_what_it_holds(tmp_path: Path) -> None:
    with scene(tmp_path, device_diff="on") as one:
        for _ in range(4):
            one.publish()
        inside = one.publisher._capture._capture
        (stream,) = inside._streams.values()
        (diff,) = inside._diffs.values()
        assert stream._buffers is not None
        assert diff._words is not None
        one.publisher.close()
        assert stream._buffers is None
        assert diff._words is None
