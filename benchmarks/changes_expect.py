"""What a step will change in a checkpoint and what its delta will take, before any training.

    python benchmarks/changes_expect.py CHECKPOINT --learning-rate 1e-6 [--move 0.25]

CHECKPOINT is a safetensors file or a model folder; its BF16 weights count. The rule is that of
docs/changes.md: every weight moves by ``move`` learning rates, and changes with probability
move / spacing. Embeddings are told apart: rows of tokens that are not in the batch hardly move.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from changes_measure import EXPONENT_BIAS, is_embedding, spacing_of
from thinwire.bench.bound import class_of
from thinwire.bench.ours import load_checkpoint
from thinwire.bench.tensors import Checkpoint, Tensor

# AdamW on matrices that get a gradient at every step: see docs/changes.md.
DEFAULT_MOVE = 0.25
MAGNITUDE_BITS = 15


class Expected(NamedTuple):
    """Shares in %, of the weights and of their raw bytes."""

    weight_count: int
    changed_percent: float
    delta_percent: float


def expect(tensors: Mapping[str, Tensor], length: float) -> Expected:
    """What one step of this mean length changes.

    A change is charged what says where it is, given the exponent, and one bit for its direction;
    its size takes up to a bit more, and where steps are longer than the spacing those of their
    ratio.
    """
    counts = np.zeros(256)
    for tensor in tensors.values():
        counts += np.bincount(class_of(tensor.words, "BF16"), minlength=256)
    steps = length / np.array([spacing_of(field - EXPONENT_BIAS) for field in range(256)])
    share = np.minimum(1.0, steps)
    # A zero is as far from the first step as BF16 has magnitudes.
    size_bits = np.minimum(np.log2(np.maximum(1.0, steps)) + share, MAGNITUDE_BITS)
    bits = counts * (_entropy_bits(share) + share * (1 + size_bits))
    total = max(counts.sum(), 1.0)
    return Expected(
        int(counts.sum()),
        float(100 * (counts * share).sum() / total),
        float(100 * bits.sum() / (16 * total)),
    )


def _entropy_bits(share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(share, 1e-300, 1 - 1e-16)
    bits: npt.NDArray[np.float64] = -inside * np.log2(inside) - (1 - inside) * np.log2(1 - inside)
    return bits


def split(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """The BF16 tensors: all of them, and all but the embeddings."""
    every = {name: tensor for name, tensor in checkpoint.items() if tensor.dtype == "BF16"}
    rest = {name: tensor for name, tensor in every.items() if not is_embedding(name, tensor.shape)}
    return {"all weights": every, "without embeddings": rest}


def main() -> None:
    """Print the two estimates as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--move", type=float, default=DEFAULT_MOVE, help="in learning rates")
    options = parser.parse_args()
    print("| weights | millions | changed a step, % | delta, % of their raw bytes |")
    print("| --- | ---: | ---: | ---: |")
    for name, tensors in split(load_checkpoint(options.checkpoint)).items():
        found = expect(tensors, options.move * options.learning_rate)
        print(
            f"| {name} | {found.weight_count / 1e6:.1f} | {found.changed_percent:.3f} "
            f"| {found.delta_percent:.3f} |"
        )


if __name__ == "__main__":
    main()
