"""The small decoder as in the midst of a long run: its FP32 masters lie between BF16 values.

    python benchmarks/changes_spread.py --out OUT [--steps 48]

The corpus maker starts the masters on BF16 values, where RL does start. A weight then changes for
the first time once it has moved by half the spacing, and the large ones do not get there in tens of
steps. Here every master starts anywhere within half a spacing, evenly; all else is as in
`make_corpus.py` (AdamW, lr 1e-6), down to the BF16 weights of step 0 and the questions.
Writes OUT/decoder-adamw-lr1e-6-spread/<step>/model.safetensors and config.json. Needs torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "corpus"))

from bf16_checkpoint import bf16_weights, write_checkpoint
from grpo import GRPOTrainer, OptimizerSettings
from policy_decoder import DecoderPolicy
from tasks import SortLetters

SEED = 0
PRETRAIN_STEPS = 120
QUESTIONS_PER_STEP = 16
GROUP_SIZE = 8
OPTIMIZER = OptimizerSettings("adamw", 1e-6, beta1=0.9, beta2=0.999, warmup_steps=5)
NAME = "decoder-adamw-lr1e-6-spread"
BF16_MANTISSA_BITS = 7


def spread(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Anywhere within half a spacing of ``weight``, and still rounded to it."""
    exponent = torch.frexp(weight).exponent - 1
    spacing = torch.ldexp(torch.ones_like(weight), exponent - BF16_MANTISSA_BITS)
    moved = weight + spacing * (torch.rand(weight.shape, generator=generator) - 0.5)
    # Below a power of two the spacing is half as wide: the few that would round elsewhere stay.
    return torch.where(moved.to(torch.bfloat16).float() == weight, moved, weight)


def record(out: Path, steps: int) -> None:
    """Train and keep a checkpoint after every step; a run that is there is not overwritten."""
    folder = out / NAME
    if folder.exists():
        raise SystemExit(f"{folder} exists: remove it or give another --out")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    task, policy = SortLetters(SEED), DecoderPolicy(SEED)
    policy.pretrain(task, PRETRAIN_STEPS)
    trainer = GRPOTrainer(policy, task, OPTIMIZER, GROUP_SIZE)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in trainer.weights.master.values():
            weight.copy_(spread(weight, generator))
    write_checkpoint(policy, bf16_weights(policy.module), folder / "0000")
    for step in range(1, steps + 1):
        first = (step - 1) * QUESTIONS_PER_STEP
        questions = [task.question(index) for index in range(first, first + QUESTIONS_PER_STEP)]
        report = trainer.step(step, questions)
        write_checkpoint(policy, bf16_weights(policy.module), folder / f"{step:04d}")
        print(f"step {step}: reward {report.reward:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args()
    record(options.out, options.steps)


if __name__ == "__main__":
    main()
