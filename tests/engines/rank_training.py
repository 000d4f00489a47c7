"""One rank of a training, started by torchrun: `rank_training.py ddp|fsdp2 URL MODEL FOLDER`.

Beside what thinwire publishes, rank 0 writes the whole weights of every step into the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from thinwire.engines.trl import ThinwireCallback

STEPS = 3


class GatheringWitness(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Gathers the weights of every step, which thinwire never does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sharded: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        whole = {}
        for name, tensor in kwargs["model"].named_parameters():
            full = tensor
            if isinstance(tensor, DTensor):
                full = tensor.full_tensor()
                if tensor.to_local().numel() < full.numel():
                    self.sharded.add(name)
            whole[name] = full.detach().to(torch.bfloat16).contiguous()
        if state.is_world_process_zero:
            save_file(whole, self._folder / f"{state.global_step}.safetensors")

    on_step_end = on_train_begin


def load(kind: str, folder: str) -> Any:
    if kind == "ddp":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    config = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=config
    )


def main(kind: str, url: str, model_folder: str, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 32, (64, 8), generator=generator)
    witness = GatheringWitness(folder)
    Trainer(
        model=load(kind, model_folder),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[ThinwireCallback(url, when_busy="block", deadline_s=60.0), witness],
    ).train()
    assert bool(witness.sharded) == (kind != "ddp")
    print("sharded:", sorted(witness.sharded))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
