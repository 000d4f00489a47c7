"""Trainings of two ranks, one after the other: `rank_training.py FOLDER KIND...`.

Each kind, "ddp" or "fsdp2", trains what is in FOLDER/KIND/model and publishes it to a stream beside
it; rank 0 also writes the whole weights of every step into FOLDER/KIND. Ranks are forked, and told
who they are as torchrun tells it: all is imported once, which takes longer than the trainings.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # else each rank imports it at its first step
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from thinwire.engines.trl import ThinwireCallback

STEPS = 3
RANKS = 2


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


def train(kind: str, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 32, (64, 8), generator=generator)
    witness = GatheringWitness(folder)
    url = (folder / "store").as_uri()
    Trainer(
        model=load(kind, str(folder / "model")),
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


def fork(rank: int, port: int, kind: str, folder: Path) -> int:
    """A rank's process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in facts.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        train(kind, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(folder: Path, kinds: list[str]) -> None:
    for kind in kinds:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for pid in [fork(rank, port, kind, folder / kind) for rank in range(RANKS)]:
            if os.waitpid(pid, 0)[1]:
                sys.exit(f"{kind}: a rank failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
