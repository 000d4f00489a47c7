"""A complete small asynchronous GRPO loop: a trainer, a sampler, and thinwire between the two.

    python examples/grpo.py            # SmolLM2-135M; `make grpo`
    python examples/grpo.py --quick    # a decoder of 0.1 M weights, in a minute

The trainer publishes after every step and never waits for the sampler to take it. The sampler
answers each request for rollouts with the newest version it can have by then, so that batches are
one or two steps old; the importance ratio against its log-probabilities makes up for that.

In the end every version that was sampled from is compared with what the trainer had at that step,
every version is rebuilt from the store and compared too, and a table tells what each step cost.
Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from digests import digest_of
from objective import clipped_gain, group_advantages
from policy import (
    Policy,
    fetch_smollm2,
    load_smollm2,
    load_tokenizer,
    make_small,
    token_log_probs,
    with_model,
)
from report import closing_report
from task import Sums
from torch import Tensor, nn

from thinwire.torch import Ticket, TorchPublisher

HERE = Path(__file__).resolve().parent
GRADIENT_NORM_LIMIT = 1.0
MICRO_BATCH = 16


@dataclass(frozen=True)
class Settings:
    """Of a run. `max_staleness`: how many versions old the weights of a batch may be."""

    is_small: bool
    steps: int
    questions: int
    group_size: int
    learning_rate: float
    max_staleness: int = 2
    warmup_steps: int = 3
    pretrain_steps: int = 400
    seed: int = 0


FULL = Settings(False, steps=30, questions=6, group_size=8, learning_rate=1e-5)
QUICK = Settings(True, steps=24, questions=12, group_size=8, learning_rate=5e-4)


@dataclass
class StepRecord:
    """What is known of a step; `digest` is of the weights after it, when they were published."""

    step: int
    digest: str
    ticket: Ticket
    publish_s: float
    reward: float = float("nan")
    ratio: float = float("nan")
    batch: dict[str, Any] = field(default_factory=dict)

    @property
    def staleness(self) -> int:
        """How many steps the trainer was ahead of the weights that its batch was sampled with."""
        return self.step - 1 - int(self.batch["step"])


class Sampler:
    """The sampler's process. At most `max_staleness - 1` requests are open at a time.

    A request made while step n is trained is answered with version n - 1 at the earliest, and its
    batch used for step n + 1.
    """

    def __init__(self, url: str, folder: Path, settings: Settings) -> None:
        arguments = [url, str(folder), str(settings.group_size), str(settings.seed)]
        flags = ["--small"] if settings.is_small else []
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "sampler.py"), *arguments, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._settings = settings
        self._asked = 0
        self.dropped = 0

    def ask(self) -> None:
        """Request one more batch."""
        count = self._settings.questions
        assert self._process.stdin is not None
        print(json.dumps([self._asked, self._asked * count, count]), file=self._process.stdin)
        self._process.stdin.flush()
        self._asked += 1

    def take(self, step: int) -> dict[str, Any]:
        """The next batch that is fresh enough for this step; asks for as many as are taken."""
        while True:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the sampler ended with {self._process.wait()}")
            batch: dict[str, Any] = json.loads(line)
            self.ask()
            if step - 1 - batch["step"] <= self._settings.max_staleness:
                return batch
            self.dropped += 1

    def close(self) -> None:
        """No more requests; wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.read()
        self._process.wait(timeout=120)


class Trainer:
    """FP32 weights and AdamW; forward and backward in BF16. One update per batch."""

    def __init__(self, model: Any, end_token: int, settings: Settings) -> None:
        self.model = model
        self._end_token = end_token
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, step: int, groups: list[dict[str, Any]]) -> float:
        """Learn from one batch; returns the mean importance ratio of its tokens."""
        rewards = torch.tensor([group["rewards"] for group in groups])
        advantages = group_advantages(rewards)
        rows = [
            (group["prompt"], tokens, log_probs, advantage)
            for group, of_group in zip(groups, advantages.tolist(), strict=True)
            for tokens, log_probs, advantage in zip(
                group["completions"], group["log_probs"], of_group, strict=True
            )
            if advantage != 0  # a group of equal rewards teaches nothing
        ]
        ratios: list[Tensor] = []
        for start in range(0, len(rows), MICRO_BATCH):
            loss, found = self._loss(rows[start : start + MICRO_BATCH])
            torch.autograd.backward(loss / rewards.numel())
            ratios.append(found)
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_LIMIT)
        for group in self._optimizer.param_groups:
            warmup = min(1.0, step / self._settings.warmup_steps)
            group["lr"] = self._settings.learning_rate * warmup
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.cat(ratios).mean()) if ratios else float("nan")

    def _loss(self, rows: list[tuple[list[int], list[int], list[float], float]]) -> Any:
        """The summed loss of some completions, and the importance ratios of their tokens."""
        longest = max(len(prompt) + len(completion) for prompt, completion, _, _ in rows)
        shortest_prompt = min(len(prompt) for prompt, _, _, _ in rows)
        # Padding is on the right, where causal attention cannot see it.
        tokens = torch.full((len(rows), longest), self._end_token)
        old, is_chosen = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (prompt, completion, log_probs, _) in enumerate(rows):
            end = len(prompt) + len(completion)
            tokens[row, :end] = torch.tensor(prompt + completion)
            old[row, len(prompt) : end] = torch.tensor(log_probs)
            is_chosen[row, len(prompt) : end] = True
        kept = longest - shortest_prompt
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(tokens, logits_to_keep=kept + 1).logits[:, :-1]
        new = token_log_probs(logits, tokens[:, -kept:])
        is_chosen = is_chosen[:, -kept:]
        ratio = (new - old[:, -kept:]).exp()
        advantages = torch.tensor([advantage for _, _, _, advantage in rows])
        gain = clipped_gain(ratio, advantages) * is_chosen
        return -(gain.sum(dim=1) / is_chosen.sum(dim=1)).sum(), ratio.detach()[is_chosen]


def publish(publisher: TorchPublisher, model: nn.Module, step: int) -> StepRecord:
    """Publish the weights of a step, and note their digest by means of our own."""
    digest = digest_of(model.named_parameters())
    start_s = time.perf_counter()
    ticket = publisher.publish(step)
    return StepRecord(step, digest, ticket, time.perf_counter() - start_s)


def train(policy: Policy, url: str, work: Path, settings: Settings) -> list[StepRecord]:
    """The run: returns a record of each step, from 0, the weights that it began with."""
    trainer = Trainer(policy.model, policy.end_token, settings)
    with TorchPublisher(
        policy.model, url, folder=work / "trainer", files=work / "files", when_busy="block"
    ) as publisher:
        records = [publish(publisher, policy.model, 0)]
        sampler = Sampler(url, work / "live", settings)
        for _ in range(max(1, settings.max_staleness - 1)):
            sampler.ask()
        for step in range(1, settings.steps + 1):
            start_s = time.perf_counter()
            batch = sampler.take(step)
            wait_s = time.perf_counter() - start_s
            ratio = trainer.step(step, batch["groups"])
            record = publish(publisher, policy.model, step)
            record.batch, record.ratio = batch, ratio
            record.reward = statistics.fmean(r for g in batch["groups"] for r in g["rewards"])
            records.append(record)
            print(
                f"step {step:3}  reward {record.reward:.3f}  sampled with step {batch['step']:3} "
                f"({record.staleness} old)  ratio {ratio:.3f}  publish {record.publish_s:.3f} s  "
                f"waited {wait_s:.1f} s of {time.perf_counter() - start_s:.1f} s  "
                f"{batch['groups'][0]['text']!r}",
                flush=True,
            )
        sampler.close()
        print(f"{sampler.dropped} batches dropped as older than {settings.max_staleness} versions")
    return records


def make_policy(work: Path, models: Path, settings: Settings) -> tuple[Policy, Settings]:
    """The policy to be trained, and the settings that suit it; its small files go into `files`."""
    files = work / "files"
    if not settings.is_small and not fetch_smollm2(models):
        print("SmolLM2 CANNOT BE HAD here (see pip's message): a small decoder instead", flush=True)
        settings = QUICK
    tokenizer, end_token = load_tokenizer(models, settings.is_small)
    if settings.is_small:
        task = Sums(settings.seed + 1)  # other questions than those of the run
        lessons = [task.question(index) for index in range(2000)]
        model = make_small(lessons, settings.pretrain_steps, settings.seed)
    else:
        model = load_smollm2(models)
        tokenizer.save_pretrained(files)
    model.config.save_pretrained(files)
    return with_model(model.train(), tokenizer, end_token, settings.is_small), settings


def main() -> None:
    """The run, then the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small decoder, in a minute")
    parser.add_argument("--steps", type=int, help="how many")
    parser.add_argument("--url", help="the stream; a folder in --work unless given; must be new")
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench" / "grpo")
    parser.add_argument("--json", type=Path, help="write the closing table here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the sampler has the other core
    start_s = time.monotonic()
    run = options.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    (run / "files").mkdir(parents=True)
    chosen = QUICK if options.quick else FULL
    policy, settings = make_policy(run, options.work / "smollm2", chosen)
    settings = replace(settings, steps=options.steps or settings.steps)
    url = options.url or (run / "store").as_uri()
    print(f"{policy.name}, {settings}", flush=True)
    print(f"ready after {time.monotonic() - start_s:.0f} s; the stream is {url}", flush=True)
    records = train(policy, url, run, settings)
    trained_s = time.monotonic() - start_s
    is_right = closing_report(records, url, run / "replay", options.json)
    print(f"{time.monotonic() - start_s:.0f} s, {trained_s:.0f} s of them before the report")
    if not is_right:
        sys.exit(1)


if __name__ == "__main__":
    main()
