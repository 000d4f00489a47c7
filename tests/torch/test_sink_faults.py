"""All or nothing: what fails before, within and after an update. Readers never see a mix."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: TorchSink was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch
from torch import nn

from thinwire import Follower
from thinwire.checkpoint import marked, update
from thinwire.codec import _native
from thinwire.errors import BaseUnusable, Deadline, StoreError, Unavailable
from thinwire.torch import TorchPublisher, TorchSink, sink_writes

from .sinking import bits, check, following, publish, small
from .training import BF16, Small, Stand, wait_until

WAYS: list[dict[str, Any]] = [{}, {"canonical": "none"}]


def state(module: nn.Module) -> list[bytes]:
    return [bits(tensor) for tensor in module.parameters()]


class Broken(Exception):
    """What a device, or a bug, may do."""


def failing(at: int, act: Callable[..., Any], error: type[BaseException] = Broken) -> Any:
    """The same function; at its so manieth call it fails."""
    calls = [0]

    def failing_act(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise error(f"call {at}")
        return act(*args, **options)

    return failing_act


@contextmanager
def caught_up(stand: Stand, way: dict[str, Any], *, on_host: bool = True) -> Iterator[Any]:
    """A sink at version 1, and version 2 published."""
    model, held = Small(), small()
    publisher = stand.publisher(model)
    publish(publisher, model, 0)
    sink = TorchSink(held, **way)
    sink._swaps_on_host = on_host
    with following(stand, sink) as follower:
        follower.catch_up()
        old = state(held)
        publish(publisher, model, 1)
        yield model, held, sink, follower, old


@pytest.mark.parametrize("way", WAYS, ids=["folder", "none"])
class TestAnUpdateThatFails:
    def test_before_anything_is_written(
        self, stand: Stand, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with caught_up(stand, way) as (model, held, sink, follower, old):
            with monkeypatch.context() as patch:
                patch.setattr(_native, "swap_words", failing(1, _native.swap_words))
                # An error of the kernel's own checks: nothing was written.
                patch.setattr(_native, "swap_words", failing(1, _native.swap_words, ValueError))
                with pytest.raises(ValueError, match="call 1"):
                    follower.catch_up()
            assert state(held) == old
            with sink.reading() as version:
                assert version.version == 1
            assert sink.prove()
            assert follower.catch_up().version == 2
            check(model, held)

    def test_within_on_a_device(
        self, stand: Stand, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Some of the tensors were written: they are put back."""
        with caught_up(stand, way, on_host=False) as (model, held, sink, follower, old):
            scatter = sink_writes.DeviceWrite._scatter
            with monkeypatch.context() as patch:
                patch.setattr(sink_writes.DeviceWrite, "_scatter", failing(3, scatter))
                with pytest.raises(Broken):
                    follower.catch_up()
            assert state(held) == old
            with sink.reading() as version:
                assert version.version == 1
            assert follower.catch_up().version == 2
            check(model, held)
            assert sink.prove()

    def test_and_so_does_taking_it_back(
        self, stand: Stand, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody may read what is left; it is read anew before anything else."""

        def broken(*_: Any) -> None:
            raise Broken

        with caught_up(stand, way, on_host=False) as (model, held, sink, follower, old):
            scatter = sink_writes.DeviceWrite._scatter
            calls = [0]

            def twice(self: Any, new: Any) -> None:
                calls[0] += 1
                if calls[0] >= 3:
                    raise Broken
                scatter(self, new)

            with monkeypatch.context() as patch:
                patch.setattr(sink_writes.DeviceWrite, "_scatter", twice)
                with pytest.raises(Broken):
                    follower.catch_up()
            assert state(held) != old
            with pytest.raises(BaseUnusable, match="version 2 failed"), sink.reading():
                pass
            assert follower.catch_up().version == 2
            check(model, held)
            assert sink.prove()

    def test_interrupted_within(
        self, stand: Stand, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with caught_up(stand, way) as (model, held, sink, follower, _):
            with monkeypatch.context() as patch:
                patch.setattr(
                    _native, "swap_words", failing(1, _native.swap_words, KeyboardInterrupt)
                )
                with pytest.raises(KeyboardInterrupt):
                    follower.catch_up()
            with pytest.raises(BaseUnusable, match="may hold old or new words"), sink.reading():
                pass
            follower.catch_up()
            check(model, held)

    def test_because_readers_do_not_end(self, stand: Stand, way: dict[str, Any]) -> None:
        with caught_up(stand, {**way, "update_timeout_s": 0.05}) as (model, held, sink, f, old):
            is_over = threading.Event()

            def read() -> None:
                with sink.reading():
                    is_over.wait(30)

            thread = threading.Thread(target=read)
            thread.start()
            try:
                with pytest.raises(Deadline):
                    f.catch_up()
                assert state(held) == old
                assert sink.prove()
            finally:
                is_over.set()
                thread.join(30)
            f.catch_up()
            check(model, held)

    def test_an_installation(
        self, stand: Stand, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whole tensors: the old ones come back from the copy, or nobody may read."""
        with caught_up(stand, way) as (_, held, sink, follower, old):
            follower.catch_up()
            new = state(held)
            copy = torch.Tensor.copy_
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "copy_", failing(3, copy))
                with pytest.raises(Broken):
                    follower.catch_up(1, reset=True)
            if way:
                with pytest.raises(BaseUnusable), sink.reading():
                    pass
                assert follower.version() is None
            else:
                assert state(held) == new
                with sink.reading() as version:
                    assert version.version == 2
            follower.catch_up(1, reset=True)
            assert state(held) == old


class TestAFolderThatFails:
    def test_before_it_counts(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        """The module was changed, and is changed back."""
        with caught_up(stand, {}) as (model, held, sink, follower, old):
            with monkeypatch.context() as patch:
                patch.setattr(update, "seal", failing(1, update.seal, Unavailable))
                with pytest.raises(Unavailable):
                    follower.catch_up()
            assert state(held) == old
            assert sink.version.version == 1
            assert sink.prove()
            follower.catch_up()
            check(model, held)

    def test_once_it_counts(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        """The log was complete: both are at the new version, now or when they are asked next."""
        with caught_up(stand, {}) as (model, held, sink, follower, _):
            with monkeypatch.context() as patch:
                patch.setattr(update, "settle", failing(1, update.settle, Unavailable))
                with pytest.raises(Unavailable):
                    follower.catch_up()
            check(model, held)
            assert sink.version.version == 2
            assert follower.version() == sink.version
            assert sink.prove()

    def test_of_an_installation(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        with caught_up(stand, {}) as (_, held, sink, follower, _old):
            follower.catch_up()
            new = state(held)
            with monkeypatch.context() as patch:
                patch.setattr(marked, "settle", failing(10**6, marked.settle))
                patch.setattr(
                    marked.Installation, "seal", failing(1, marked.Installation.seal, StoreError)
                )
                with pytest.raises(StoreError):
                    follower.catch_up(1, reset=True)
            assert state(held) == new
            assert sink.version.version == 2
            assert sink.prove()


@pytest.mark.parametrize("way", [*WAYS, {"float32": True}], ids=["folder", "none", "cast"])
def test_readers_never_see_a_mix(stand: Stand, way: dict[str, Any]) -> None:
    """What is read inside a reading is, bit for bit, the version that the reading says."""
    options = {k: v for k, v in way.items() if k != "float32"}
    dtype = torch.float32 if "float32" in way else BF16
    model, held = Small(), small(dtype)
    publisher = stand.publisher(model)
    expected: dict[int, list[bytes]] = {}

    def note(version: int) -> None:
        expected[version] = [bits(t.detach().to(BF16).to(dtype)) for t in model.parameters()]

    note(publish(publisher, model, 0))
    sink = TorchSink(held, **options)
    failures: list[BaseException] = []
    seen: set[int] = set()
    is_over = threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                with sink.reading(30) as version:
                    found = state(held)
                assert found == expected[version.version]
                seen.add(version.version)
        except BaseException as error:
            failures.append(error)

    with following(stand, sink) as follower:
        follower.catch_up()
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for seed in range(1, 9):
                note(publish(publisher, model, seed, 0.2))
                if seed % 5 == 0:
                    # Whole tensors too.
                    follower.catch_up(1, reset=True)
                follower.catch_up()
                number = follower.version().version  # type: ignore[union-attr]
                wait_until(lambda number=number: number in seen or bool(failures))
        finally:
            is_over.set()
            for thread in threads:
                thread.join(30)
    assert not failures
    assert len(seen) >= 9


_FOLLOW = """
import os, sys
import torch
from torch import nn
from thinwire import Follower
from thinwire.torch import TorchSink
from thinwire.checkpoint import update
from thinwire.codec import _native

url, folder, where = sys.argv[1:]
module = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Embedding(500, 64)}).to(torch.bfloat16)
with Follower(url, TorchSink(module, folder=folder), lease=False) as follower:
    follower.catch_up(1)

    def killed(act):
        def run(*args, **options):
            if where.endswith("after"):
                act(*args, **options)
            os._exit(9)
        return run

    if where.startswith("swap"):
        _native.swap_words = killed(_native.swap_words)
    else:
        update.seal = killed(update.seal)
    follower.catch_up()
"""


@pytest.mark.parametrize("where", ["swap-before", "seal-after"])
def test_killed(tmp_path: Path, where: str) -> None:
    """The folder is at the old version or at the new one, and so is a module read from it."""
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Embedding(500, 64)})
    url, folder = str(tmp_path / "stream"), tmp_path / "copy"
    states = []
    with TorchPublisher(model, url, maintain=False) as publisher:
        for step in range(2):
            if step:
                with torch.no_grad():
                    model["b"].weight[3] *= -2
                    model["a"].bias[3] = 1
            publisher.publish(step, when_busy="block").wait(60)
            states.append([bits(t.detach().to(BF16)) for t in model.parameters()])
    done = subprocess.run(
        [sys.executable, "-c", _FOLLOW, url, str(folder), where],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 9
    held = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Embedding(500, 64)}).to(BF16)
    sink = TorchSink(held, folder=folder)
    with Follower(url, sink, lease=False) as follower:
        found = follower.version()
        assert found is not None
        assert found.version == (2 if where == "seal-after" else 1)
        assert state(held) == states[found.version - 1]
        follower.catch_up()
        assert state(held) == states[1]
        assert sink.prove()
