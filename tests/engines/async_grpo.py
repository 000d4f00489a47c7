"""TRL's own AsyncGRPOTrainer on the CPU, with thinwire as its weight transfer.

Two things are not TRL's: rollouts, which are random, and the attention kernel, which TRL has for
GPUs only. Run as a module under torchrun (`URL MODEL FOLDER`), it is one rank of a job.
"""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from thinwire.engines.trl import ThinwireWeightTransfer

from .witness import Witness

STEPS = 3


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
    """Causal attention, run by run, as TRL asks of its kernel."""
    runs = []
    for q0, q1, k0, k1 in zip(
        starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True
    ):
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=softmax_scale)
        runs.append(mixed.transpose(0, 1))
    return torch.cat(runs)


class Rollouts(queue.Queue):  # type: ignore[type-arg, unused-ignore]
    """Never empty; each sample is made with the version that the trainer told last."""

    version = 0
    count = 0

    def get(self, *_: Any, **__: Any) -> Any:
        draws = np.random.default_rng(self.count)
        self.count += 1
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=draws.integers(2, 32, 8),
            completion_mask=np.array([0] * 4 + [1] * 4),
            old_log_probs=np.full(8, -3.4, np.float32),
            advantage=(-1.0) ** self.count,
            model_version=self.version,
            group_id=self.count // 2,
            metrics={"reward": 0.0},
        )


class Worker:
    """A rollout worker that notes which version was there when it was told of it."""

    def __init__(self, sender: ThinwireWeightTransfer) -> None:
        self.rollout_buffer = Rollouts()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.seen: list[tuple[int, int]] = []
        self._sender = sender

    def start(self) -> None:
        assert self._sender.head is not None  # the cold sync came first

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        self.rollout_buffer.version = model_version
        head = self._sender.head
        self.seen.append((model_version, 0 if head is None else head.version))

    def check_health(self, stale_after_s: float) -> None:
        pass


def train(url: str, model: Path, tokenizer: Any, out: Path) -> tuple[Worker, Witness, Any]:
    """A whole training; returns what was noted, and the transfer."""
    kernel = SimpleNamespace(flash_attn_varlen_func=attend)
    packing._flash_attn = lambda: kernel
    # It asks CUDA for the device's name.
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    sender = ThinwireWeightTransfer(url, files=model, step=lambda: trainer.state.global_step)
    worker, witness = Worker(sender), Witness()
    trainer = AsyncGRPOTrainer(
        model=str(model),
        reward_funcs=lambda **_: [0.0],
        args=AsyncGRPOConfig(
            output_dir=str(out),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            token_budget=0,
            learning_rate=1e-2,
            weight_sync_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"prompt": "w2"}],
        processing_class=tokenizer,
        callbacks=[witness],
        rollout_worker=worker,
        weight_transfer=sender,
    )
    trainer.train()
    return worker, witness, sender


def main(url: str, model: Path, folder: Path) -> None:
    """One rank: the first writes the whole weights of every step, and what its worker saw."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    worker, witness, _ = train(url, model, tokenizer, folder / "out")
    if torch.distributed.get_rank() == 0:
        assert worker.seen == [(number, number) for number in range(1, STEPS + 2)]
        for step, weights in witness.weights.items():
            save_file(weights, folder / f"{step}.safetensors")
    else:
        assert not worker.seen
    assert torch.distributed.get_world_size() == 2


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
