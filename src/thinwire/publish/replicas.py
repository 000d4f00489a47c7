"""Whether ranks that should hold the same weights do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.errors import TensorMismatch
from thinwire.publish.units import Plan

# At each publish one in so many replicated tensors is compared; right after opening all are.
_TURN = 16
_WHOLE_UNTIL = 4


def replicated(plan: Plan, rank: int, count: int) -> list[str]:
    """The tensors of which other ranks hold the same part, as far as it is their turn.

    Args:
        plan: Who holds what.
        rank: This rank.
        count: How many captures there were, this one included; 0: when the publisher is opened.
    """
    # Weights that begin as zeros are equal at first, whatever they are.
    is_all = count <= _WHOLE_UNTIL
    return [
        spread.name
        for number, spread in enumerate(plan.spreads)
        if is_all or number % _TURN == count % _TURN
        if any(len(ranks) > 1 and rank in ranks for ranks in spread.holders)
    ]


def check_replicas(plan: Plan, digests: Sequence[Mapping[str, int]]) -> None:
    """Raise unless ranks that hold the same part of a tensor hold the same weights.

    Args:
        plan: Who holds what.
        digests: Of each rank the digests of some tensors, as :func:`replicated` names them.

    Raises:
        TensorMismatch: They do not: the tensor is something else than what it looks like.
    """
    for spread in plan.spreads:
        for ranks in spread.holders:
            found = {r: digests[r][spread.name] for r in ranks if spread.name in digests[r]}
            first = min(found, default=0)
            for rank, digest in found.items():
                if digest != found[first]:
                    raise TensorMismatch(
                        f"tensor {spread.name!r} is on ranks {first} and {rank}, with other "
                        "weights on each",
                        hint="Ranks that hold different parts of a tensor must publish DTensors, "
                        "which say what part that is; replicas must be kept equal",
                        tensor=spread.name,
                    )
