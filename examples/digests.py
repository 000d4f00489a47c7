"""What the proof of the example rests on: a digest of weights that thinwire has no part in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """BLAKE3 over names, shapes and BF16 bits, in the order of the names."""
    digest = blake3()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        rounded = tensor.detach().to(torch.bfloat16).contiguous()
        digest.update(f"{name} {list(rounded.shape)}\n".encode())
        digest.update(rounded.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def load_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors
