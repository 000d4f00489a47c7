"""BF16 checkpoints as Hugging Face folders, and how much changed between two of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo import Policy


def bf16_weights(module: nn.Module) -> dict[str, Tensor]:
    """A BF16 copy of every weight by name; tied weights appear once, as the format asks."""
    return {
        name: weight.detach().to(torch.bfloat16, copy=True)
        for name, weight in module.named_parameters()
    }


def write_checkpoint(policy: Policy, weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    policy.write_side_files(folder)


def changed_share(old: dict[str, Tensor], new: dict[str, Tensor]) -> float:
    """Share of elements, 0 to 1, whose bits differ."""
    changed_count = sum(
        int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in old
    )
    return changed_count / sum(weight.numel() for weight in new.values())
