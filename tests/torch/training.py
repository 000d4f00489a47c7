"""A small model that trains, a stream that fails when it is told to, and what must arrive."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire import Follower, Version, fsck, open_stream
from thinwire.store import open_store
from thinwire.stream.events import Event
from thinwire.testing import FaultStore, Rates
from thinwire.torch import Ticket, TorchPublisher
from thinwire.torch.dtypes import dtype_name

from .making import held_in

BF16 = torch.bfloat16
Rows = dict[str, tuple[str, tuple[int, ...], bytes]]


class Small(nn.Module):
    """Large tensors that stand alone, small ones that share a chunk, and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(600, 120)
        self.layers = nn.ModuleList([nn.Linear(120, 120), nn.Linear(120, 40, bias=False)])
        self.norm = nn.BatchNorm1d(40)
        self.register_buffer("scratch", torch.zeros(7), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layers[0](self.embed(ids)))
        return self.norm(self.layers[1](hidden))


def row(tensor: torch.Tensor, dtype: torch.dtype | None = BF16) -> tuple[str, Any, bytes]:
    """What a tensor is published as, by torch's own conversion."""
    new = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    data = new.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return dtype_name(new.dtype), tuple(new.shape), data


def rows_of(model: nn.Module | Mapping[str, torch.Tensor]) -> Rows:
    """What followers must hold of a model's parameters in BF16."""
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    return {name: row(tensor) for name, tensor in named}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 600, (16,), generator=generator)
    model(ids).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def nudge(model: nn.Module, seed: int = 0, share: float = 0.01) -> None:
    """Some of each parameter's weights change visibly."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        chosen.reshape(-1)[0] = True
        tensor[chosen] = torch.randn(int(chosen.sum()), generator=generator).to(tensor.dtype)


class Recorder:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


class Stand:
    """A stream in a store that fails when it is told to, its publishers and its followers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = FaultStore(open_store(str(folder / "stream"), retry_s=0), random.Random(0))
        self.observer = Recorder()
        self._open: list[TorchPublisher] = []
        self._count = 0

    def publisher(self, model: Any, **options: Any) -> TorchPublisher:
        options = {"maintain": False, "observer": self.observer, **options}
        stream = options.pop("stream", None) or open_stream(self.store)
        found = TorchPublisher(model, stream, **options)
        self._open.append(found)
        return found

    def follower(self, folder: str = "f", **options: Any) -> Follower:
        stream = options.pop("stream", None) or open_stream(self.store)
        return Follower(stream, self.folder / folder, lease=False, **options)

    def held(self, target: Any = "latest", **options: Any) -> Rows:
        """What somebody holds who joins now."""
        self._count += 1
        with self.follower(f"joiner{self._count}", **options) as follower:
            follower.catch_up(target)
        return held_in(self.folder / f"joiner{self._count}")

    def fail(self, operation: str, *, is_done: bool = False) -> None:
        """From now on this operation fails, after or before the deed."""
        self.store.set_rates({operation: Rates(fail_after=is_done, fail_before=not is_done)})

    def mend(self) -> None:
        self.store.set_rates({})

    def hold(self, operation: str = "put_file") -> threading.Event:
        """This operation waits for the event, for the first that it meets."""
        gate = threading.Event()

        def hook(when: str, found: str, key: str) -> None:
            if when == "before" and found == operation:
                assert gate.wait(60)

        self.store.hook = hook
        return gate

    def check_whole(self, **options: Any) -> None:
        report = fsck(open_stream(self.store), deep=True, **options)
        assert report.is_whole, report.problems

    def close(self) -> None:
        self.store.hook = lambda when, operation, key: None
        self.mend()
        for publisher in self._open:
            publisher.close()


def wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def done(ticket: Ticket) -> Version:
    """The version that a ticket became."""
    version = ticket.wait(60)
    assert version is not None
    return version
