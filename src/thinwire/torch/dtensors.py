"""Which part of a tensor is here: DTensor placements as runs of indices."""

from __future__ import annotations

import math
from typing import Any

import torch

from thinwire.errors import InvalidArgument
from thinwire.publish.held import Held, runs_of


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is spread over a device mesh."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is here; an ordinary tensor as it is."""
    if not is_dtensor(tensor):
        return tensor.detach()
    local: Any = tensor.detach().to_local()  # type: ignore[attr-defined]
    # An asynchronous collective's result, where the tensor came of one.
    found: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return found


def held_of(name: str, tensor: torch.Tensor) -> Held | None:
    """Which part of a tensor this rank holds; None: it is not part of the tensor's mesh.

    The indices are found by cutting them as the placements cut the tensor: by torch's own code, so
    that uneven and strided parts are what torch makes them.

    Raises:
        InvalidArgument: A placement that leaves no plain part here, such as a pending sum.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Held.whole(shape)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    runs = []
    for dim, size in enumerate(shape):
        indices = torch.arange(size)
        for number in _order(name, placements, mesh, dim):
            indices = _cut(indices, mesh.size(number), coordinate[number])
        runs.append(runs_of(indices.tolist()))
    for placement in placements:
        if not (placement.is_shard() or placement.is_replicate() or _is_strided(placement)):
            raise InvalidArgument(
                f"tensor {name!r} is {placement} on its mesh, which no rank holds a part of",
                hint="Publish parameters, not intermediate results",
            )
    held = Held(shape, tuple(runs))
    local_shape = tuple(local_of(tensor).shape)
    is_empty = held.size == 0 and local_of(tensor).numel() == 0
    if held.local_shape != local_shape and not is_empty:
        raise InvalidArgument(
            f"tensor {name!r}: its placements {list(placements)} say that {held.local_shape} is "
            f"here, and {local_shape} is",
            hint="This is a sharding that this release does not know; please report it",
        )
    return held


def _order(name: str, placements: Any, mesh: Any, dim: int) -> list[int]:
    """The mesh dimensions that cut a tensor dimension, in the order in which they cut it.

    A strided shard was cut after the plain ones to its right, whose pieces it must not disturb:
    its split factor says how many pieces these are. Other split factors are other shardings.
    """
    cutting = [
        number
        for number, placement in enumerate(placements)
        if (placement.is_shard() or _is_strided(placement)) and placement.dim == dim
    ]
    plain = [number for number in cutting if not _is_strided(placements[number])]
    strided = [number for number in cutting if _is_strided(placements[number])]
    for number in strided:
        pieces = math.prod(mesh.size(other) for other in plain if other > number)
        if placements[number].split_factor != pieces or len(strided) > 1:
            raise InvalidArgument(
                f"tensor {name!r} is sharded as {list(placements)}: not known to this release",
                hint="Redistribute it, or pass a function that returns it otherwise sharded",
            )
    return [*plain, *reversed(strided)]


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def _cut(indices: torch.Tensor, parts: int, number: int) -> torch.Tensor:
    """One part of the indices of a dimension: as ``torch.chunk`` cuts, which is what Shard does."""
    pieces = torch.chunk(indices, parts)
    return pieces[number] if number < len(pieces) else indices[:0]
