"""A tiny Llama, a store with outages, and what followers make of a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from thinwire.errors import Unavailable
from thinwire.follow import Follower
from thinwire.store import StoreWrapper
from thinwire.stream.version import Version

Tensors = dict[str, torch.Tensor]


def tiny_model(seed: int = 0, *, is_tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tokenizer_in(folder: Path) -> Any:
    """A tokenizer of 32 words, saved where the model is."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(32)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0")
    tokenizer.save_pretrained(folder)
    return tokenizer


def rounded(model: torch.nn.Module) -> Tensors:
    """What is to be published of a model: copies, in BF16."""
    return {
        name: tensor.detach().to(torch.bfloat16).clone()
        for name, tensor in model.named_parameters()
    }


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def rebuilt(url: str, folder: Path) -> list[tuple[Version, Tensors]]:
    """Every version of a stream, as a follower makes it."""
    found = []
    with Follower(url, folder) as follower:
        head = follower.stream.tip().head
        for number in range(1, 1 + (head.version if head else 0)):
            version = follower.catch_up(number)
            tensors: Tensors = {}
            for path in sorted(folder.glob("*.safetensors")):
                tensors |= load_file(path)
            found.append((version, {name: tensor.clone() for name, tensor in tensors.items()}))
    return found


class Outage(StoreWrapper):
    """A store that takes no uploads while `is_down`."""

    is_down = False

    def put(self, key: str, data: bytes) -> None:
        self._check(key)
        super().put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self._check(key)
        super().put_file(key, path)

    def _check(self, key: str) -> None:
        if self.is_down:
            raise Unavailable(f"no answer for {key}")
