"""The trainer: GRPO over whole sessions, on rollouts that are a few versions old.

It publishes after every step and goes on at once. Rollouts are taken as they come; those with a
turn that is older than `max_staleness` versions are dropped and counted, and if too few are fresh,
the trainer waits for more. What a version's age does to the policy is made up for, token by token,
by the importance ratio against the sampler's own log-probabilities, clipped as PPO does.
"""

from __future__ import annotations

import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from alphabet import decode
from digests import digest_of
from objective import CLIP_RANGE, clipped_gain, group_advantages
from player import pad
from policy import token_log_probs
from processes import end
from rollouts import Group, Session
from torch import nn

from thinwire.torch import Ticket, TorchPublisher

HERE = Path(__file__).resolve().parent
GRADIENT_NORM_LIMIT = 1.0
MICRO_BATCH = 64
ROLLOUT_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a run.

    Attributes:
        word_count: Of how many words the secret is one.
        steps: How many updates.
        groups: Groups that a step learns from.
        group_size: Sessions of a group.
        concurrent_groups: Groups that are played at once.
        learning_rate: AdamW's.
        teach_steps: Supervised steps before the run.
        max_staleness: How many versions older than the trainer's a turn may be.
        required_rise: Of the mean reward, from the first to the last steps; None: not judged.
        warmup_steps: Over which the learning rate rises.
        seed: Of the weights and the lessons.
    """

    word_count: int
    steps: int
    groups: int
    group_size: int
    concurrent_groups: int
    learning_rate: float
    teach_steps: int
    max_staleness: int
    required_rise: float | None
    warmup_steps: int = 6
    seed: int = 0


@dataclass
class Batch:
    """What a step learns from: `ages` are those of the turns, in versions."""

    groups: list[Group] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    dropped_count: int = 0
    wait_s: float = 0.0

    @property
    def reward(self) -> float:
        """The mean over all sessions."""
        return statistics.fmean(one.reward for group in self.groups for one in group.sessions)


@dataclass
class StepRecord:
    """What is known of a step; `digest` is of the weights after it, when they were published."""

    step: int
    digest: str
    ticket: Ticket
    publish_s: float
    batch: Batch = field(default_factory=Batch)
    ratios: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    step_s: float = 0.0


class Rollouts:
    """The rollouts' process, and the groups that it has played.

    Args:
        environment: The environment's address.
        sampler: The sampler's.
        model: The model's name there.
        settings: Of the run.
        log: What the process prints beside groups.
    """

    def __init__(
        self, environment: str, sampler: str, model: str, settings: Settings, log: Path
    ) -> None:
        counts = [str(settings.concurrent_groups), str(settings.group_size)]
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "rollouts.py"), environment, sampler, model, *counts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            start_new_session=True,
        )
        self._settings = settings
        self._played: queue.Queue[Group | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        # Enough for all players and one batch that waits: what is played ahead only grows old.
        self._ask(settings.concurrent_groups + settings.groups)

    def take(self, step: int) -> Batch:
        """As many groups as a step needs, none with a turn that is too old for it."""
        batch, start_s = Batch(), time.perf_counter()
        while len(batch.groups) < self._settings.groups:
            group = self._next()
            self._ask(1)
            # Version n is what step n - 1 made, so the trainer is at the version of its number.
            ages = [step - version_of(turn.version) for turn in turns_of([group])]
            if max(ages) > self._settings.max_staleness:
                batch.dropped_count += 1
                continue
            batch.groups.append(group)
            batch.ages += ages
        batch.wait_s = time.perf_counter() - start_s
        return batch

    def close(self) -> None:
        """End it."""
        end(self._process)
        self._log.close()

    def _next(self) -> Group:
        try:
            group = self._played.get(timeout=ROLLOUT_TIMEOUT_S)
        except queue.Empty:
            group = None
        if group is None:
            raise RuntimeError(f"no more rollouts come: see {self._log.name}, and the other logs")
        return group

    def _ask(self, count: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n" * count)
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._played.put(msgspec.json.decode(line, type=Group))
        self._played.put(None)


class Trainer:
    """FP32 weights and AdamW; one update for each batch."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, step: int, groups: Sequence[Group]) -> torch.Tensor:
        """Learn from one batch; returns the importance ratio of each token."""
        rewards = torch.tensor([[one.reward for one in group.sessions] for group in groups])
        advantages = group_advantages(rewards).flatten()
        sessions = [session for group in groups for session in group.sessions]
        token_count = sum(len(turn.tokens) for turn in turns_of(groups))
        ratios = []
        for start in range(0, len(sessions), MICRO_BATCH):
            some = slice(start, start + MICRO_BATCH)
            ratio, is_chosen = self._ratios(sessions[some])
            gain = clipped_gain(ratio, advantages[some]) * is_chosen
            torch.autograd.backward(-gain.sum() / token_count)
            ratios.append(ratio.detach()[is_chosen])
        nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_NORM_LIMIT)
        warmup = min(1.0, step / self._settings.warmup_steps)
        self._optimizer.param_groups[0]["lr"] = self._settings.learning_rate * warmup
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.cat(ratios)

    def _ratios(self, sessions: Sequence[Session]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ratios at all places, and at which of them the policy chose a token."""
        lines = [[span_of(turn) for turn in session.turns] for session in sessions]
        tokens, is_chosen = pad(
            [(session.tokens, spans) for session, spans in zip(sessions, lines, strict=True)]
        )
        old = torch.zeros(tokens.shape)
        for row, session in enumerate(sessions):
            for turn, span in zip(session.turns, lines[row], strict=True):
                old[row, span.start : span.stop] = torch.tensor(turn.log_probs)
        new = token_log_probs(self._model(tokens).logits[:, :-1], tokens[:, 1:])
        return (new - old[:, 1:]).exp(), is_chosen[:, 1:]


def train(
    model: Any, publisher: TorchPublisher, rollouts: Rollouts, first: StepRecord, settings: Settings
) -> list[StepRecord]:
    """The run: returns a record of each step, the first one of the weights that it began with."""
    trainer, records = Trainer(model, settings), [first]
    for step in range(1, settings.steps + 1):
        start_s = time.perf_counter()
        batch = rollouts.take(step)
        ratios = trainer.step(step, batch.groups)
        record = publish(publisher, model, step)
        record.batch, record.ratios = batch, ratios
        record.step_s = time.perf_counter() - start_s
        records.append(record)
        print(_line_of(record), flush=True)
    return records


def publish(publisher: TorchPublisher, model: nn.Module, step: int) -> StepRecord:
    """Publish the weights of a step, and note their digest by means of our own."""
    digest = digest_of(model.named_parameters())
    start_s = time.perf_counter()
    ticket = publisher.publish(step)
    return StepRecord(step, digest, ticket, time.perf_counter() - start_s)


def turns_of(groups: Sequence[Group]) -> Iterator[Any]:
    """All turns."""
    return (turn for group in groups for session in group.sessions for turn in session.turns)


def span_of(turn: Any) -> range:
    """Where in its session's tokens a turn is."""
    return range(turn.prompt_count, turn.prompt_count + len(turn.tokens))


def version_of(label: str | None) -> int:
    """The number in a version's label.

    Raises:
        ValueError: A turn has no label, or tokens of two versions.
    """
    if label is None:
        raise ValueError("a turn was not sampled under one version")
    return int(label.partition("-")[0])


def effective_share(ratios: torch.Tensor) -> float:
    """The effective sample size by the importance ratios, as a share of the tokens."""
    return float(ratios.sum() ** 2 / (ratios**2).sum() / len(ratios))


def clipped_share(ratios: torch.Tensor) -> float:
    """Tokens whose ratio is outside of the clip range."""
    return float(((ratios - 1).abs() > CLIP_RANGE).float().mean())


def _line_of(record: StepRecord) -> str:
    batch = record.batch
    text = decode(batch.groups[0].sessions[0].tokens).split()
    return (
        f"step {record.step:3}  reward {batch.reward:.3f}  "
        f"{statistics.fmean(batch.ages):.1f} versions old, {max(batch.ages)} at most, "
        f"{batch.dropped_count} dropped  ratios {float(record.ratios.std()):.3f} apart, "
        f"{effective_share(record.ratios):.3f} effective  "
        f"waited {batch.wait_s:.1f} of {record.step_s:.1f} s  {' '.join(text[1:])}"
    )
