"""The ways of changing a running model: what an engine can do, what was found, what is staged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from thinwire.torch.probing import Load
from thinwire.torch.scatter import Swap

Way = Literal["map", "dense", "patches", "reload"]
WAYS: tuple[Way, ...] = ("map", "dense", "patches", "reload")


class Patch(NamedTuple):
    """Changed words of a tensor, as :attr:`Loader.patch` takes them; flat positions."""

    name: str
    shape: tuple[int, ...]
    positions: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What an engine can do with weights.

    Attributes:
        identity: Engine, release, model class and rank: what a cached map depends on.
        load: Loads tensors by their checkpoint names into the parameters, in place.
        patch: Loads changed words; None: the engine has no such function.
        reload: Loads all tensors and processes them as after a start; None: it cannot.
        synchronize: Waits for the device.
        tensors: Gives the model's tensors as they are now; None: they are never replaced.
    """

    identity: str
    load: Load
    patch: Callable[[Sequence[Patch]], object] | None = None
    reload: Load | None = None
    synchronize: Callable[[], None] = field(default=lambda: None)
    tensors: Callable[[], Mapping[str, torch.Tensor]] | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What attaching found out.

    Attributes:
        way: The way of updates.
        reason: Why it is not the map, where that was tried.
        run_count: Runs of the map.
        map_bytes: What the map takes.
        is_cached: Whether the map was found in the cache.
        probe_s: Seconds that finding it took, without restoring the weights.
        dense_s: Seconds that the engine's loader took for all tensors; None: it was not asked.
        refused: Parameters that cannot be placed, with why.
        loose: Tensors that go the dense way.
        absent: Tensors of which nothing is held here.
        uncovered: Parameters that no tensor feeds, with their elements.
    """

    way: Way
    reason: str = ""
    run_count: int = 0
    map_bytes: int = 0
    is_cached: bool = False
    probe_s: float = 0.0
    dense_s: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    loose: Sequence[str] = ()
    absent: Sequence[str] = ()
    uncovered: Mapping[str, int] = field(default_factory=dict)


class Staged(NamedTuple):
    """A prepared update: words to exchange, and whole tensors to load."""

    swap: Swap | None
    dense: list[str]
    patches: list[Patch]
    touched: list[str]
    is_reload: bool = False

    @property
    def can_be_undone(self) -> bool:
        """Whether exchanging the words once more takes it back."""
        return not (self.dense or self.patches or self.is_reload)
