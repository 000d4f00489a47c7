"""What GRPO maximises, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

CLIP_RANGE = 0.2
ADVANTAGE_EPSILON = 1e-4


def group_advantages(rewards: Tensor) -> Tensor:
    """How much better each reward is than the others of its group; a row is a group."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + ADVANTAGE_EPSILON)


def clipped_gain(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The gain of each token, by PPO's clipping.

    Args:
        ratio: Importance ratios of tokens against the policy that sampled them: [rows, tokens].
        advantages: Of each row.
    """
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    return torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
