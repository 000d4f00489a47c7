"""Weights that are known for every step, on the ranks and in the test, without any gathering."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

# By name: the shape, and the dimension that is cut over the ranks; None: each has all of it.
_SPREAD: Mapping[str, tuple[tuple[int, ...], int | None]] = {
    "rows": ((301, 257), 0),
    "columns": ((257, 300), 1),
    "few": ((3, 40), 0),
    "norm": ((129,), None),
    "large": ((1031, 1033), 1),
}


@cache
def _first(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        name: draw.normal(0, 0.02, shape).astype(np.float32) for name, (shape, _) in _SPREAD.items()
    }


def weights_at(seed: int, step: int) -> dict[str, torch.Tensor]:
    """The whole weights of a step: the first ones, with some replaced."""
    draw = np.random.default_rng([seed, step])
    found = {}
    for name, first in _first(seed).items():
        flat = first.reshape(-1).copy()
        places = draw.integers(0, flat.size, 1 + flat.size // 50)
        flat[places] = draw.normal(0, 0.02, places.size)
        found[name] = torch.from_numpy(flat.reshape(first.shape))
    return found


class Dealt:
    """The weights of any step, dealt to the ranks."""

    def __init__(self, size: int, seed: int) -> None:
        self._seed = seed
        self._mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
        self._tensors: dict[str, torch.Tensor] = {}
        self.go_to(0)

    def go_to(self, step: int, *, shape_change: bool = False) -> None:
        """Hold the weights of that step; perhaps in a shape that they must not have."""
        for name, tensor in weights_at(self._seed, step).items():
            cut = _SPREAD[name][1]
            if self._mesh is not None:
                placement: Placement = Replicate() if cut is None else Shard(cut)
                # From this rank's own copy: nothing is sent, so a dead rank is not noticed here.
                tensor = distribute_tensor(tensor, self._mesh, [placement], src_data_rank=None)
            self._tensors[name] = tensor
        if shape_change:
            self._tensors["norm"] = torch.zeros(130)

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank holds."""
        return self._tensors
