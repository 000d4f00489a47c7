"""The decoder as a policy: its alphabet, a short supervised pre-training, and sampling.

Shape letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decoder import Decoder, DecoderConfig
from grpo import Rollouts, through_first_end, token_log_probs
from tasks import LETTERS, PRETRAIN_STREAM, WORD_LENGTH, Question, SortLetters

END = "."
ALPHABET = LETTERS + ">" + END
END_TOKEN = ALPHABET.index(END)
MAX_COMPLETION_TOKENS = WORD_LENGTH + 2  # the answer, the end, and room to be wrong
PRETRAIN_LEARNING_RATE = 1e-3
PRETRAIN_BATCH = 64
PRETRAIN_LOG_EVERY = 50


def encode(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


class DecoderPolicy:
    """A decoder over `ALPHABET`; forward and backward in FP32 arithmetic on BF16 values."""

    def __init__(self, seed: int, config: DecoderConfig | None = None) -> None:
        torch.manual_seed(seed)
        self.config = config or DecoderConfig(len(ALPHABET), END_TOKEN)
        self.decoder = Decoder(self.config)
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def module(self) -> nn.Module:
        return self.decoder

    def pretrain(self, task: SortLetters, steps: int) -> float:
        """Teach it the answers' form and some of their content; returns the last loss (nats)."""
        optimizer = torch.optim.AdamW(self.decoder.parameters(), lr=PRETRAIN_LEARNING_RATE)
        last_loss = math.nan
        for step in range(steps):
            # Down to zero in a straight line: the policy should end calm, as a base model does.
            optimizer.param_groups[0]["lr"] = PRETRAIN_LEARNING_RATE * (1 - step / steps)
            first = step * PRETRAIN_BATCH
            questions = [
                task.question(index, PRETRAIN_STREAM)
                for index in range(first, first + PRETRAIN_BATCH)
            ]
            tokens_BT = torch.tensor([encode(q.prompt + q.answer + END) for q in questions])
            log_probs_BT = token_log_probs(self.decoder(tokens_BT), tokens_BT)
            # Every prompt has the same length, so there is no padding to leave out.
            loss = -log_probs_BT[:, len(questions[0].prompt) :].mean()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            last_loss = loss.item()
            if step % PRETRAIN_LOG_EVERY == 0:
                print(f"pre-training step {step}: loss {last_loss:.3f}", flush=True)
        return last_loss

    def sample(self, questions: Sequence[Question], group_size: int) -> list[Rollouts]:
        """All groups in one batch. Short enough to run without a key/value cache."""
        indices = [index for index in range(len(questions)) for _ in range(group_size)]
        prompts_BT = torch.tensor([encode(questions[index].prompt) for index in indices])
        prompt_tokens = prompts_BT.shape[1]
        tokens_BT = prompts_BT
        for _ in range(MAX_COMPLETION_TOKENS):
            probs_BV = self.decoder(tokens_BT)[:, -1].softmax(dim=-1)
            next_B1 = torch.multinomial(probs_BV, 1, generator=self.generator)
            tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)

        completions_BT = tokens_BT[:, prompt_tokens:]
        is_sampled_BT = F.pad(through_first_end(completions_BT, END_TOKEN), (prompt_tokens, 0))
        log_probs_BT = token_log_probs(self.decoder(tokens_BT), tokens_BT) * is_sampled_BT
        texts = [decode(row).split(END)[0] for row in completions_BT.tolist()]
        return [Rollouts(indices, texts, tokens_BT, is_sampled_BT, log_probs_BT)]

    def logits(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.decoder(tokens_BT)
        return logits_BTV

    def write_side_files(self, folder: Path) -> None:
        """config.json. There is no tokenizer: token i is `ALPHABET[i]`, recorded in run.json."""
        config = self.config.to_hugging_face()
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
