"""Modules that follow a stream, and what they must hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire import Follower, open_stream
from thinwire.torch import TorchSink

from .training import BF16, Small, Stand, done, nudge


@torch.no_grad()
def blank(model: nn.Module, dtype: torch.dtype = BF16) -> nn.Module:
    """A module of the same kind that holds other weights."""
    model = model.to(dtype)
    for tensor in model.parameters():
        tensor.fill_(0.5)
    return model


def small(dtype: torch.dtype = BF16) -> Small:
    found = blank(Small(7), dtype)
    assert isinstance(found, Small)
    return found


@contextmanager
def following(stand: Stand, sink: TorchSink, **options: Any) -> Iterator[Follower]:
    with Follower(open_stream(stand.store), sink, lease=False, **options) as follower:
        yield follower


def publish(publisher: Any, model: nn.Module, seed: int, share: float = 0.02) -> int:
    """The next version, in which something changed."""
    if seed:
        nudge(model, seed, share)
    version: int = done(publisher.publish(seed, when_busy="block")).version
    return version


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def check(model: nn.Module, held: nn.Module, published: torch.dtype | None = BF16) -> None:
    """Every parameter is what copying the published one would have made of it."""
    mine = dict(held.named_parameters())
    for name, tensor in model.named_parameters():
        new = tensor.detach() if published is None else tensor.detach().to(published)
        expected = torch.empty_like(mine[name]).copy_(new)
        assert bits(mine[name]) == bits(expected), name


def addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in model.state_dict().values()]


def make_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path
