"""What publishing takes of memory on one rank of a sharded job."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ranks.models import stir
from ranks.worker import Rank
from thinwire.torch import TorchPublisher
from thinwire.torch.publish_thread import PublishThread

LAYERS, WIDTH, HIDDEN = 4, 2560, 5120


class Sizes(TorchDispatchMode):
    """Notes the largest memory that any torch operation of this thread makes or looks at."""

    def __init__(self, found: list[int]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and not hasattr(one, "placements"):
                self._found.append(one.untyped_storage().nbytes())
        return result


class WatchedThread(PublishThread):
    """The publisher's background thread."""

    sizes: list[int]

    def _run(self, *arguments: Any) -> None:
        with Sizes(self.sizes):
            super()._run(*arguments)


def watched_publish(rank: Rank) -> None:
    """Publish a model twice, and tell what that took at most."""
    model = _sharded_model(rank)
    # The first collective of a job and the like: not the publisher's.
    model.norm.full_tensor()
    WatchedThread.sizes = sizes = []
    before = _status_bytes("VmRSS")
    _forget_peak()
    with (
        patch("thinwire.torch.publisher.PublishThread", WatchedThread),
        TorchPublisher(
            model,
            rank.options["url"],
            folder=rank.scratch,
            maintain=False,
            deadline_s=20.0,
        ) as publisher,
    ):
        _say_peak(rank, "open", before, baseline_bytes=publisher.baseline_bytes)
        for step in (1, 2, 3):
            for parameter in model.parameters():
                stir(parameter, step)
            _forget_peak()
            sizes.clear()
            with Sizes(sizes):
                ticket = publisher.publish(step)
            in_publish = len(sizes)
            ticket.wait()
            _say_peak(
                rank,
                "published",
                before,
                step=step,
                changed_count=ticket.changed_count,
                largest_bytes=max(sizes),
                op_counts=[in_publish, len(sizes) - in_publish],
            )


class _Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.empty(WIDTH))


def _sharded_model(rank: Rank) -> Any:
    """No rank ever has the whole of it."""
    mesh = init_device_mesh("cpu", (rank.size,))
    with torch.device("meta"):
        model = _Large()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(rank.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02, generator=draw)
    return model


def _say_peak(rank: Rank, what: str, before: int, **facts: Any) -> None:
    extra = _status_bytes("VmHWM") - before
    rank.say(what, extra_bytes=extra, **facts)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name}")
