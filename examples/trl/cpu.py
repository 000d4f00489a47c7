"""What TRL 1.16 has for GPUs only, in plain torch; nothing else of it is changed.

AsyncGRPOTrainer runs on a CPU but for three things. It asks CUDA for the device's name, to tell how
busy it is. Its packed rows want an attention kernel that is fetched from a hub. And its rollout
worker wants vLLM to be importable beside the trainer, though it talks HTTP alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing


def replace_gpu_parts() -> None:
    """Put the three in place, for this process."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    async_rollout_worker.is_vllm_available = lambda *_, **__: True


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    _max_q: int,
    _max_k: int,
    *,
    softmax_scale: float,
    **_: Any,
) -> torch.Tensor:
    """Causal attention, run by run, as flash_attn_varlen_func gives it."""
    runs = []
    for q0, q1, k0, k1 in zip(
        starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True
    ):
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        # The queries are the last of the keys.
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=sees, scale=softmax_scale, enable_gqa=True
        )
        runs.append(mixed.transpose(0, 1))
    return torch.cat(runs)
