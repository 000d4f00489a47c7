"""Inside vLLM's worker: a digest of its own parameters, under the checkpoint's names.

Named with `--worker-extension-cls canonical.CanonicalDigest` and asked by `/collective_rpc`. It
knows how vLLM fuses a Llama's weights, and nothing of thinwire.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from digests import digest_of
from torch import Tensor


class CanonicalDigest:
    """A method for vLLM's worker."""

    model_runner: Any

    def canonical_digest(self) -> dict[str, str]:
        """BLAKE3 as `digests.digest_of` takes it of the trainer's weights."""
        model = self.model_runner.model
        config = self.model_runner.model_config.hf_text_config
        return {"digest": digest_of(unfused(model.named_parameters(), config))}


def unfused(parameters: Any, config: Any) -> Iterator[tuple[str, Tensor]]:
    """One rank's parameters as a checkpoint of a Llama has them."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = [config.num_attention_heads * head, *[config.num_key_value_heads * head] * 2]
    for name, weight in parameters:
        if ".qkv_proj." in name:
            for part, piece in zip("qkv", weight.split(rows), strict=True):
                yield name.replace("qkv_proj", f"{part}_proj"), piece
        elif ".gate_up_proj." in name:
            for part, piece in zip(("gate", "up"), weight.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj"), piece
        elif name.endswith("embed_tokens.weight"):
            yield name, weight[: config.vocab_size]
        else:
            yield name, weight
