"""What a trainer's weights were at each step, noted without thinwire."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .making import Tensors, rounded


class Witness(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes the weights at every step, by itself."""

    def __init__(self) -> None:
        self.weights: dict[int, Tensors] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = rounded(kwargs["model"])

    on_step_end = on_train_begin
