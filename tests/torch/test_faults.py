"""What a review found: each of these once published, or could have, what nobody had."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch
from torch import nn

from thinwire.errors import (
    AccessDenied,
    BaseUnusable,
    CommitConflict,
    Deadline,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
    Unavailable,
)
from thinwire.publish.held import Held
from thinwire.publish.replicas import check_replicas, replicated
from thinwire.publish.spreading import Holding
from thinwire.publish.units import Plan
from thinwire.stream.events import Event
from thinwire.torch.dtensors import held_of
from thinwire.torch.ranks import _Caller

from .making import spreads_of
from .training import Small, Stand, done, nudge, rows_of


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_read_changes_on_file(stand: Stand) -> None:
    """Several threads encode from one file of captured changes."""
    torch.manual_seed(0)
    weights = {f"w{n}": torch.randn(1 << 17) for n in range(8)}
    publisher = stand.publisher(lambda: weights, workers=4, memory_limit_bytes=0)
    done(publisher.publish(0))
    for step in range(1, 6):
        for weight in weights.values():
            weight[:: 2 + step] *= 1.01
        done(publisher.publish(step))
        assert stand.held() == rows_of(weights)
    stand.check_whole()


def lose_the_answer(stand: Stand, then: type[ThinwireError]) -> None:
    """The next commit is made and its answer lost; every later one is refused."""
    seen: list[str] = []

    def hook(when: str, operation: str, key: str) -> None:
        if operation != "put_if_absent":
            return
        if seen and when == "before":
            raise then("refused")
        if when == "after":
            seen.append(key)
            raise Unavailable("no answer")

    stand.store.hook = hook


def test_a_refusal_after_a_lost_answer(stand: Stand) -> None:
    """It says nothing of the commit before it, which was made."""
    model = Small()
    publisher = stand.publisher(model)
    done(publisher.publish(0))
    nudge(model, 1)
    lose_the_answer(stand, AccessDenied)
    ticket = publisher.publish(1)
    time.sleep(0.2)
    assert not ticket.is_done, "nobody knows what became of it"
    stand.store.hook = lambda when, operation, key: None
    assert done(ticket).version == 2
    for step in (2, 3):
        nudge(model, step)
        done(publisher.publish(step))
        assert stand.held() == rows_of(model)
    stand.check_whole()


@pytest.mark.parametrize("kind", [ValueError, InvalidArgument])
def test_an_observer_that_raises(stand: Stand, kind: type[Exception]) -> None:
    class Broken:
        def on_event(self, event: Event) -> None:
            raise kind("broken")

    model = Small()
    publisher = stand.publisher(model, observer=Broken())
    for step in range(4):
        nudge(model, step)
        assert done(publisher.publish(step)).version == step + 1
        assert stand.held() == rows_of(model)
    stand.check_whole()


def test_a_baseline_that_was_half_moved(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not compared with any more."""
    model = Small()
    publisher = stand.publisher(model)
    done(publisher.publish(0))
    nudge(model, 1)

    def fail(*arguments: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr("thinwire.publish.rank_publisher.move_on", fail)
        with pytest.raises(ThinwireError):
            publisher.publish(1).wait(60)
    with pytest.raises(BaseUnusable, match="open another publisher"):
        publisher.publish(2)
    publisher.close()
    nudge(model, 2)
    assert done(stand.publisher(model).publish(2)).version == 3
    assert stand.held() == rows_of(model)


def test_two_publishers_with_one_folder(stand: Stand, tmp_path: Path) -> None:
    first = stand.publisher(Small(), folder=tmp_path / "scratch")
    with pytest.raises(BaseUnusable):
        stand.publisher(Small(), folder=tmp_path / "scratch")
    done(first.publish(0))


def test_a_first_version_that_was_killed(stand: Stand, tmp_path: Path) -> None:
    stand.publisher(Small(), folder=tmp_path / "scratch").close()
    (left,) = (tmp_path / "scratch").glob("*/rank0")
    (left / "first").mkdir()
    (left / "first" / "model.safetensors").write_bytes(b"half")
    (left / "0123.tw").write_bytes(b"half")
    model = Small()
    publisher = stand.publisher(model, folder=tmp_path / "scratch")
    done(publisher.publish(0))
    assert stand.held() == rows_of(model)
    assert not list(left.rglob("*.tw"))


def test_the_last_step_may_block(stand: Stand) -> None:
    model = Small()
    publisher = stand.publisher(model)
    done(publisher.publish(0))
    gate = stand.hold()
    nudge(model, 1)
    publisher.publish(1)
    nudge(model, 2)
    assert publisher.publish(2).state == "skipped"
    threading.Timer(0.2, gate.set).start()
    assert done(publisher.publish(3, when_busy="block")).step == 3
    assert stand.held() == rows_of(model)


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "let go"])
def test_a_process_that_does_not_close(is_held: bool, tmp_path: Path) -> None:
    """What is on its way at the end of a script is not lost, whether or not somebody holds on."""
    import subprocess

    from thinwire import open_stream

    script = f"""
import gc, time, torch
from thinwire import Stream
from thinwire.store import StoreWrapper, open_store
from thinwire.torch import TorchPublisher

class Slow(StoreWrapper):
    def put_if_absent(self, key, data):
        time.sleep(0.3)
        super().put_if_absent(key, data)

def train():
    stream = Stream(Slow(open_store({str(tmp_path / "s")!r})))
    publisher = TorchPublisher(lambda: weights, stream, maintain=False)
    publisher.publish(0).wait()
    weights["w"] += 1
    publisher.publish(1)
    return publisher

weights = {{"w": torch.randn(3000)}}
held = train()
if not {is_held}:
    del held
gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert done.returncode == 0
    head = open_stream(tmp_path / "s").tip().head
    assert head is not None
    assert head.step == 1


class _Mesh:
    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def size(self, number: int) -> int:
        return self._sizes[number]

    def get_coordinate(self) -> list[int]:
        return [0] * len(self._sizes)


def test_strided_shards_of_another_factor_are_refused() -> None:
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    class Tensor(nn.Parameter):
        def to_local(self) -> torch.Tensor:
            return torch.zeros(2, 3)

    for placements, sizes in (
        ([_StridedShard(0, split_factor=2)], (4,)),
        ([Shard(0), _StridedShard(0, split_factor=2)], (2, 2)),
    ):
        tensor = Tensor(torch.zeros(8, 3))
        tensor.device_mesh = _Mesh(*sizes)  # type: ignore[attr-defined]
        tensor.placements = placements  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgument, match="not known to this release"):
            held_of("w", tensor)


def whole(name: str) -> Holding:
    held = Held.whole((4,))
    return Holding(name, "BF16", held.shape, held.dims)


def test_replicas_of_ranks_that_hold_different_tensors() -> None:
    """Whose turn it is does not depend on what else a rank holds."""
    stages = [["embed", *(f"a{n}" for n in range(40)), "head"], ["embed", "head"]]
    plan = Plan(spreads_of([[whole(name) for name in names] for names in stages]), 2)
    turns = set()
    for count in range(64):
        compared = [replicated(plan, rank, count) for rank in range(2)]
        assert compared[0] == compared[1]
        turns |= set(compared[0]) if count > 8 else set()
        check_replicas(plan, [dict.fromkeys(names, 7) for names in compared])
    assert turns == {"embed", "head"}
    with pytest.raises(TensorMismatch, match="ranks 0 and 1"):
        check_replicas(plan, [{"head": 1}, {"head": 2}])


def test_a_store_that_hung_is_used_again() -> None:
    caller, gate = _Caller(), threading.Event()
    with pytest.raises(Deadline):
        caller.call(gate.wait, 0.05)
    made: list[int] = []
    with pytest.raises(Deadline):
        caller.call(lambda: made.append(1), 0.05)
    gate.set()
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        try:
            assert caller.call(lambda: 5, 1.0) == 5
            break
        except Deadline:
            time.sleep(0.01)
    assert caller.call(lambda: 6, 1.0) == 6
    assert not made, "what nobody waits for any more is not done later"


def test_conflicts_remove_only_what_is_ours(stand: Stand) -> None:
    one, other = Small(), Small(1)
    first = stand.publisher(one)
    done(first.publish(0))
    second = stand.publisher(one)
    nudge(one, 1)
    done(first.publish(1))
    nudge(other, 2)
    with pytest.raises(CommitConflict):
        second.publish(1).wait(60)
    assert stand.held() == rows_of(one)
    stand.check_whole()


def test_a_reference_to_another_model(stand: Stand, tmp_path: Path) -> None:
    """The stream must not begin with what the trainer cannot go on from."""
    from safetensors.torch import save_file

    model = Small()
    copy = tmp_path / "copy"
    copy.mkdir()
    save_file(
        {name: p.detach().clone() for name, p in model.named_parameters()},
        copy / "model.safetensors",
    )
    with pytest.raises(TensorMismatch, match="published as BF16"):
        stand.publisher(model, reference=str(copy))
    publisher = stand.publisher(model, reference=str(copy), dtype=None)
    assert publisher.head is not None
    assert publisher.head.kind == "reference"
    nudge(model, 1)
    assert done(publisher.publish(1)).version == 2


@pytest.mark.parametrize(
    "options", [{"dtype": torch.int8}, {"dtype": "bfloat16"}, {"dtypes": {"*": torch.int32}}]
)
def test_dtypes_that_lose_what_weights_are(stand: Stand, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        stand.publisher(Small(), **options)


def test_when_busy_is_one_of_two(stand: Stand) -> None:
    publisher = stand.publisher(Small())
    with pytest.raises(InvalidArgument, match="when_busy"):
        publisher.publish(0, when_busy="never")  # type: ignore[arg-type]
    done(publisher.publish(0))
