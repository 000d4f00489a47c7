"""TRL's rollout worker, which asks vLLM for what each token was sampled with, and writes it down.

One method is replaced: TRL asks /v1/completions, whose answers do not say which weights made them.
/inference/v1/generate says it token by token. Everything else is TRL's, in its own process.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from thinwire.engines import record
from thinwire.engines.answers import from_vllm


class RecordingLoop(_AsyncRolloutLoop):  # type: ignore[misc, unused-ignore]
    """Adds a record of each completion to a file."""

    def __init__(self, *, records: Path, **options: Any) -> None:
        super().__init__(**options)
        self._records = records

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        payload = {
            "token_ids": list(prompt_ids),
            "return_token_ids": True,  # the prompt's, too: a record then is all that it takes
            "sampling_params": {
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "logprobs": 0,
                "seed": random.getrandbits(63),
            },
        }
        answer = await self._retry(
            lambda: self._post("/inference/v1/generate", payload, self.request_timeout),
            max_attempts=30,
            label="vllm /inference/v1/generate",
        )
        (found,) = from_vllm(answer)
        record.append(self._records, [found])
        # Never None: TRL's loss needs one for each token.
        return list(found.tokens), [float(value or 0.0) for value in found.log_probs]


class RecordingWorker(AsyncRolloutWorker):  # type: ignore[misc, unused-ignore]
    """Takes one more option than TRL's: ``records``, a file."""

    _loop_cls = RecordingLoop


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """As reasoning-gym scores a sum: 1 for the bare number, its share of a longer answer."""
    texts = [messages[-1]["content"].strip() for messages in completions]
    return [
        1.0 if text == wanted else len(wanted) / len(text) if wanted in text else 0.0
        for text, wanted in zip(texts, answer, strict=True)
    ]
