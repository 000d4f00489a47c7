"""A small decoder-only transformer: the Llama architecture, written plainly.

Tensor names, shapes and the config are those of a Hugging Face Llama, so a written checkpoint
loads with `AutoModelForCausalLM`. Shape letters: B sequences, T tokens, V vocabulary, D hidden
size, H query heads, K key/value heads, E head size, F feed-forward size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RMS_EPSILON = 1e-5
ROPE_THETA = 10_000.0
INIT_STD = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder; the defaults give 2.2 M parameters."""

    vocabulary_size: int
    end_token: int
    hidden_size: int = 256
    feed_forward_size: int = 704
    layer_count: int = 3
    head_count: int = 4
    key_value_head_count: int = 2
    max_tokens: int = 64

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.head_count

    def to_hugging_face(self) -> dict[str, object]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": self.end_token,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.feed_forward_size,
            "max_position_embeddings": self.max_tokens,
            "mlp_bias": False,
            "num_attention_heads": self.head_count,
            "num_hidden_layers": self.layer_count,
            "num_key_value_heads": self.key_value_head_count,
            "rms_norm_eps": RMS_EPSILON,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": True,
            "vocab_size": self.vocabulary_size,
        }


class RMSNorm(nn.Module):
    """Scale every token vector to unit root mean square, then by a learned weight of shape D."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, RMS_EPSILON)


def rotary_angles(token_count: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, both of shape (T, E)."""
    frequency = ROPE_THETA ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angle_TE = torch.outer(torch.arange(token_count, dtype=torch.float32), frequency).repeat(1, 2)
    return angle_TE.cos(), angle_TE.sin()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each pair (e, e + E/2) by its angle, as Hugging Face lays the pairs out."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE


class Attention(nn.Module):
    """Causal attention with rotary positions; each key/value head serves H/K query heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        width = config.hidden_size
        key_value_width = config.key_value_head_count * config.head_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, key_value_width, bias=False)
        self.v_proj = nn.Linear(width, key_value_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        def split_heads(y_BTX: Tensor) -> Tensor:
            return y_BTX.view(*y_BTX.shape[:2], -1, self.head_size).transpose(1, 2)

        query_BHTE = rotate(split_heads(self.q_proj(x_BTD)), cos_TE, sin_TE)
        key_BKTE = rotate(split_heads(self.k_proj(x_BTD)), cos_TE, sin_TE)
        value_BKTE = split_heads(self.v_proj(x_BTD))
        mixed_BHTE = F.scaled_dot_product_attention(
            query_BHTE, key_BKTE, value_BKTE, is_causal=True, enable_gqa=True
        )
        mixed_BTD: Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).flatten(2))
        return mixed_BTD


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.down_proj = nn.Linear(config.feed_forward_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return y_BTD


class Layer(nn.Module):
    """One block: attention, then feed-forward, each normalised first and added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TE, sin_TE)
        y_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return y_BTD


class Body(nn.Module):
    """Embedding, layers and final norm: the part Hugging Face names `model`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layer_count))
        self.norm = RMSNorm(config.hidden_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        cos_TE, sin_TE = rotary_angles(tokens_BT.shape[1], self.config.head_size)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TE, sin_TE)
        y_BTD: Tensor = self.norm(x_BTD)
        return y_BTD


class Decoder(nn.Module):
    """Tokens (B, T) in, logits (B, T, V) out. The output matrix is the embedding (tied)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=INIT_STD)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # As in GPT-2: keeps the sum over the residual stream at unit scale.
                weight.data.mul_(1 / math.sqrt(2 * config.layer_count))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.model(tokens_BT)
        return F.linear(x_BTD, self.model.embed_tokens.weight)
