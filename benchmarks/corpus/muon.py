"""Muon: momentum whose direction is made orthogonal, for the 2-D weights inside the layers.

After Jordan et al. (2024), with the step size of Moonlight (Liu et al., 2025): an orthogonal
(R, C) matrix has a root mean square of 1/sqrt(max(R, C)), so times 0.2 * sqrt(max(R, C)) it moves
a weight about as far as AdamW does and one learning rate fits both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
ADAMW_LIKE_RMS = 0.2
NEWTON_SCHULZ_ROUNDS = 5
# The quintic of Jordan et al.: it trades exact convergence to 1 for speed and takes singular
# values between about 0.005 and 1 into about 0.7-1.2 within five rounds.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix_RC: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly: U V^T of the SVD, in FP32."""
    a, b, c = QUINTIC
    x = matrix_RC.float()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:  # the smaller Gram matrix is cheaper
        x = x.T
    x = x / (x.square().sum().sqrt() + 1e-7)  # the Frobenius norm bounds the largest singular value
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay as in AdamW. 2-D weights only."""

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for weight_RC in group["params"]:
                if weight_RC.ndim != 2:
                    raise ValueError(f"Muon takes matrices, got shape {tuple(weight_RC.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients; `closure` is part of torch's signature and refused."""
        if closure is not None:
            raise ValueError("Muon does not re-evaluate the loss")
        for group in self.param_groups:
            for weight_RC in group["params"]:
                self._update(weight_RC, group)

    def _update(self, weight_RC: Tensor, group: dict[str, Any]) -> None:
        if weight_RC.grad is None:
            return
        state = self.state[weight_RC]
        momentum_RC = state.setdefault("momentum", torch.zeros_like(weight_RC))
        momentum_RC.mul_(MOMENTUM).add_(weight_RC.grad)
        direction_RC = orthogonalise(weight_RC.grad + MOMENTUM * momentum_RC)
        step_size = group["lr"] * ADAMW_LIKE_RMS * math.sqrt(max(weight_RC.shape))
        weight_RC.mul_(1 - group["lr"] * group["weight_decay"])
        weight_RC.sub_(direction_RC, alpha=step_size)
