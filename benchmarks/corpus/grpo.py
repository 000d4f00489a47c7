"""GRPO on any policy: sample groups, score them, take one clipped policy-gradient step.

One update per batch of rollouts, so the policy that samples is the policy that learns and the
importance ratio is 1 up to arithmetic. No KL term (as in DAPO, Dr. GRPO and most current recipes):
a reference model would double the memory and, over a few steps at 1e-6, weigh nothing.
Shape letters: N questions, G completions of each (the group), B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muon import Muon
from tasks import Question, Task

CLIP_RANGE = 0.2
GRADIENT_NORM_LIMIT = 1.0
WEIGHT_DECAY = 0.01
# Keeps a group of nearly equal rewards from being blown up to unit variance.
ADVANTAGE_EPSILON = 1e-4


@dataclass(frozen=True)
class Rollouts:
    """Sequences that go through the model together, right-padded.

    `question_indices` and `texts` have B entries; over all batches of a step the sequences lie in
    the order of the questions, G after G. `is_sampled_BT` marks the tokens the policy chose
    (with the end token, without the prompt and padding); `log_probs_BT` is their log-probability
    when they were chosen, 0 elsewhere.
    """

    question_indices: list[int]
    texts: list[str]
    tokens_BT: Tensor
    is_sampled_BT: Tensor
    log_probs_BT: Tensor


class Policy(Protocol):
    """What GRPO and the checkpoint writer ask of a model. Sampling is at temperature 1."""

    @property
    def module(self) -> nn.Module: ...

    def sample(self, questions: Sequence[Question], group_size: int) -> list[Rollouts]: ...

    def logits(self, tokens_BT: Tensor) -> Tensor: ...

    def write_side_files(self, folder: Path) -> None: ...


class MasterWeights:
    """FP32 master weights beside a module that always holds their BF16 rounding.

    This is what a mixed-precision trainer does: rollout and gradient use the BF16 weights, the
    optimizer moves the FP32 ones, and most small moves do not reach the BF16 value at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.working = dict(module.named_parameters())
        self.master = {
            name: weight.detach().to(torch.bfloat16).float()
            for name, weight in self.working.items()
        }
        self.round_into_module()

    @torch.no_grad()
    def round_into_module(self) -> None:
        for name, weight in self.working.items():
            weight.copy_(self.master[name].to(torch.bfloat16))

    def take_gradients(self) -> float:
        """Move the module's gradients to the masters, clip them; returns the norm before."""
        for name, weight in self.working.items():
            self.master[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = nn.utils.clip_grad_norm_(list(self.master.values()), GRADIENT_NORM_LIMIT)
        return float(norm)


@dataclass(frozen=True)
class OptimizerSettings:
    name: str
    learning_rate: float
    beta1: float
    beta2: float
    warmup_steps: int

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up: optimizer step 1 of 5 uses a fifth of the rate. Steps count from 1."""
        return self.learning_rate * min(1.0, step / max(1, self.warmup_steps))


def build_optimizers(
    master: dict[str, Tensor], settings: OptimizerSettings
) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon over the layers' matrices and AdamW over the rest.

    The embedding stays with AdamW: its rows are looked up one by one, so there is no map whose
    directions could be evened out.
    """
    by_muon = {
        name
        for name, weight in master.items()
        if settings.name == "muon" and weight.ndim == 2 and ".layers." in name
    }
    rest = [weight for name, weight in master.items() if name not in by_muon]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=WEIGHT_DECAY,
        )
    ]
    if by_muon:
        matrices = [weight for name, weight in master.items() if name in by_muon]
        optimizers.append(Muon(matrices, lr=settings.learning_rate, weight_decay=WEIGHT_DECAY))
    return optimizers


def group_advantages(rewards_NG: Tensor) -> Tensor:
    """Rewards minus the group's mean, over its standard deviation: shape (N, G)."""
    centred_NG = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    return centred_NG / (rewards_NG.std(dim=1, keepdim=True) + ADVANTAGE_EPSILON)


def token_log_probs(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Log-probability of each token given those before it, shape (B, T); 0 for the first one."""
    log_probs_BTV = logits_BTV[:, :-1].float().log_softmax(dim=-1)
    chosen = log_probs_BTV.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    return F.pad(chosen, (1, 0))


def through_first_end(completions_BT: Tensor, end_token: int) -> Tensor:
    """True up to and including the first end token: what comes after is not the completion."""
    is_end_BT = (completions_BT == end_token).int()
    return is_end_BT.cumsum(dim=1) - is_end_BT == 0


def clipped_loss(
    new_BT: Tensor, old_BT: Tensor, advantages_B: Tensor, is_sampled_BT: Tensor
) -> Tensor:
    """The loss of each sequence, shape (B,): mean over its sampled tokens of the clipped term."""
    ratio_BT = (new_BT - old_BT).exp()
    advantages_B1 = advantages_B[:, None]
    gain_BT = torch.minimum(
        ratio_BT * advantages_B1,
        ratio_BT.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantages_B1,
    )
    return -(gain_BT * is_sampled_BT).sum(dim=1) / is_sampled_BT.sum(dim=1)


@dataclass(frozen=True)
class StepReport:
    """Of one step: mean reward, mean length in tokens, gradient norm before clipping, and how
    many groups had any spread of rewards (the others teach nothing)."""

    reward: float
    completion_tokens: float
    gradient_norm: float
    groups_with_spread: int


class GRPOTrainer:
    """Holds the policy, its master weights and its optimizers; `step` does one RL step."""

    def __init__(
        self, policy: Policy, task: Task, settings: OptimizerSettings, group_size: int
    ) -> None:
        self.policy = policy
        self.task = task
        self.settings = settings
        self.group_size = group_size
        self.weights = MasterWeights(policy.module)
        self.optimizers = build_optimizers(self.weights.master, settings)

    def step(self, step: int, questions: Sequence[Question]) -> StepReport:
        """Sample a group per question, score it and update the weights once."""
        with torch.no_grad():
            batches = self.policy.sample(questions, self.group_size)
        rewards = [
            self.task.score(text, questions[index])
            for batch in batches
            for text, index in zip(batch.texts, batch.question_indices, strict=True)
        ]
        rewards_NG = torch.tensor(rewards).view(len(questions), self.group_size)
        advantages_of_batches = torch.split_with_sizes(
            group_advantages(rewards_NG).flatten(), [len(batch.texts) for batch in batches]
        )
        for batch, advantages_B in zip(batches, advantages_of_batches, strict=True):
            new_BT = token_log_probs(self.policy.logits(batch.tokens_BT), batch.tokens_BT)
            losses_B = clipped_loss(new_BT, batch.log_probs_BT, advantages_B, batch.is_sampled_BT)
            torch.autograd.backward(losses_B.sum() / len(rewards))

        gradient_norm = self.weights.take_gradients()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate_at(step)
            optimizer.step()
        self.weights.round_into_module()
        return StepReport(
            reward=statistics.fmean(rewards),
            completion_tokens=sum(int(batch.is_sampled_BT.sum()) for batch in batches)
            / len(rewards),
            gradient_norm=gradient_norm,
            groups_with_spread=int((rewards_NG.std(dim=1) > 0).sum()),
        )
