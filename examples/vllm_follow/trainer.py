"""The trainer: SmolLM2 learns sums; every step is published.

    python examples/vllm_follow/trainer.py MODEL URL STEPS SECONDS

A step is AdamW on FP32 weights; what is published are its BF16 weights. It waits so that versions
come at least SECONDS apart, because a real trainer takes longer for a step than this one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch

from thinwire.torch import TorchPublisher

LEARNING_RATE = 2e-5


def lesson(draws: random.Random) -> str:
    """A sum as the model is to write it."""
    a, b = draws.randrange(10), draws.randrange(10)
    return f"{a} + {b} = {a + b}\n"


def main(model_folder: Path, url: str, steps: int, seconds: float) -> None:
    """Train and publish; prints a line of JSON for each version."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    draws = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    with TorchPublisher(model, url, files=model_folder) as publisher:
        for step in range(steps + 1):
            start_s = time.monotonic()
            if step:
                text = "".join(lesson(draws) for _ in range(12))
                tokens = tokenizer(text, return_tensors="pt")["input_ids"]
                loss = model(tokens, labels=tokens).loss
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            version = publisher.publish(step).wait()
            if version is None:
                sys.exit("a version was not published")
            told = {
                "version": version.version,
                "payload_bytes": version.payload_bytes,
                "raw_bytes": version.raw_bytes,
                "changed_count": version.changed_count,
                "word_count": version.word_count,
            }
            print(json.dumps(told), flush=True)
            time.sleep(max(0.0, seconds - (time.monotonic() - start_s)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
