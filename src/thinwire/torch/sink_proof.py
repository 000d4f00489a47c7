"""Whether tensors are what digests and other tensors say."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.digest import tensor_digest
from thinwire.errors import TensorMismatch
from thinwire.stream.weights import weights_digest
from thinwire.torch.dtypes import dtype_name
from thinwire.torch.sink_places import Bound, Published
from thinwire.torch.sink_writes import bits_of
from thinwire.torch.stored import values_of


def digest_of(tensors: Mapping[str, StoredTensor]) -> str:
    """The digest by which a version's manifest names its tensors."""
    rows = [
        (name, t.dtype, list(t.shape), f"{tensor_digest(t.dtype, t.data):016x}")
        for name, t in tensors.items()
    ]
    return weights_digest(rows)


def holds(bound: Bound, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a module holds published tensors, cast to its own dtypes."""
    return all(
        _is_equal(held, new)
        for name, tensor in tensors.items()
        for held, new in bound.pairs(bound.equal.get(name, name), values_of(name, tensor))
    )


def check_dtypes(bound: Bound, tensors: Mapping[str, Published]) -> None:
    """Refuse a module that cannot stand for the published bits.

    Raises:
        TensorMismatch: A tensor has another dtype than it is published in.
    """
    for name, published in tensors.items():
        for target in bound.targets(bound.equal.get(name, name)):
            if dtype_name(target.dtype, name) != published.dtype:
                raise TensorMismatch(
                    f"tensor {name!r} is published as {published.dtype}, and is {target.dtype} in "
                    "the module: its bits cannot be decoded against",
                    hint='Leave canonical="none" out, or convert the module',
                    tensor=name,
                )


def _is_equal(held: torch.Tensor, published: torch.Tensor) -> bool:
    held = held.cpu()
    wanted = published.to(held.dtype)
    if torch.equal(bits_of(held), bits_of(wanted)):
        return True
    if held.dtype == published.dtype:
        return False
    # Which NaN a cast makes of a NaN depends on the instructions that torch happened to use.
    is_same = (held == wanted) | (held.isnan() & wanted.isnan())
    return bool(is_same.all())
