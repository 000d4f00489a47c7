"""The trainer: TRL's AsyncGRPOTrainer on the CPU. `run.py` starts it, in .venv-trl.

    python examples/trl/train.py SETTINGS.json

It never tells vLLM anything of weights: they go into a stream, and what follows the stream brings
vLLM to them. vLLM is asked for rollouts, and for the version that it serves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from cpu import replace_gpu_parts
from datasets import Dataset
from proof import Proof
from rollouts import RecordingWorker, reward
from settings import Settings
from transformers import AutoTokenizer, PrinterCallback, logging
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from thinwire.engines.trl import ThinwireWeightTransfer

# The text as it is, without the roles of a chat: this model then often answers with the number.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer(settings: Settings) -> Any:
    """The model's, with templates that TRL can read completions by."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "",
        "fields": {"content": {"content": "text"}},
    }
    return tokenizer


def make_trainer(settings: Settings, proof: Proof) -> Any:
    """TRL's trainer, with thinwire as its weight transfer."""
    tokenizer = make_tokenizer(settings)
    questions = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": text}], "answer": answer}
            for text, answer in settings.questions
        ]
    )
    options = AsyncGRPOConfig(
        output_dir=f"{settings.work}/out",
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        num_generations=settings.group_size,
        max_completion_length=settings.completion_tokens,
        learning_rate=settings.learning_rate,
        weight_sync_steps=1,
        token_budget=0,
        vllm_server_base_url=settings.engine,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    worker = RecordingWorker(
        records=settings.records,
        model_name=settings.model,
        dataset=questions,
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=settings.group_size,
        # Little in stock: what waits in a queue gets older with each step.
        max_inflight_tasks=settings.group_size,
        queue_maxsize=1,
        score_queue_maxsize=1,
        vllm_server_url=settings.engine,
        max_tokens=settings.completion_tokens,
    )
    transfer = ThinwireWeightTransfer(
        settings.url,
        folder=f"{settings.work}/trainer",
        files=settings.model,
        step=lambda: trainer.state.global_step,
        serving=proof.serving,
    )
    trainer = AsyncGRPOTrainer(
        model=settings.model,
        reward_funcs=reward,
        args=options,
        train_dataset=questions,
        processing_class=tokenizer,
        callbacks=[proof],
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    trainer.remove_callback(PrinterCallback)  # the proof prints what matters here
    proof.model = trainer.model
    return trainer


def main(settings: Settings) -> bool:
    """Train, then say what was found; returns whether all of it is as it should be."""
    torch.set_num_threads(1)  # vLLM has the other core
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    replace_gpu_parts()
    proof = Proof(settings.engine, Path(settings.host_copy), settings.records)
    make_trainer(settings, proof).train()
    proof.close()
    rows = proof.rows()
    settings.report.write_bytes(msgspec.json.encode(rows))  # NaN as null
    return proof.told(rows)


if __name__ == "__main__":
    if not main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)):
        sys.exit(1)
