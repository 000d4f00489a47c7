"""The policy: a decoder of 0.1 M weights, taught for half a minute how the game is written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from alphabet import ALPHABET, END, END_TOKEN, encode
from game import START, Game, mark
from letters import save_tokenizer
from policy import token_log_probs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

# How well the games are played that it learns from: so badly that there is much to gain.
_CARE = 0.6
_MISSPELLING = 0.05
_LESSONS = 32
_RATE = 5e-3


def make_player(words: Sequence[str], steps: int, seed: int) -> Any:
    """The policy in FP32, taught for so many steps; the same seed gives the same one."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ALPHABET),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=96,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END_TOKEN,
            pad_token_id=END_TOKEN,
        )
    )
    draws = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _RATE * min(1, (step + 1) / 30) * (1 - step / steps)
        tokens, is_guess = pad([_lesson(words, draws) for _ in range(_LESSONS)])
        log_probs = token_log_probs(model(tokens).logits[:, :-1], tokens[:, 1:])
        torch.autograd.backward(-log_probs[is_guess[:, 1:]].mean())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def save_files(model: Any, folder: Path) -> None:
    """What a sampler needs beside the weights."""
    model.config.save_pretrained(folder)
    save_tokenizer(folder, ALPHABET, END)


def pad(texts: Sequence[tuple[list[int], list[range]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of one length, and which of their tokens are the policy's.

    Args:
        texts: The tokens of each, and where in them the policy's lines are.
    """
    longest = max(len(tokens) for tokens, _ in texts)
    # Padding is on the right, where causal attention cannot see it.
    padded = torch.full((len(texts), longest), END_TOKEN)
    is_chosen = torch.zeros(padded.shape, dtype=torch.bool)
    for row, (tokens, lines) in enumerate(texts):
        padded[row, : len(tokens)] = torch.tensor(tokens)
        for line in lines:
            is_chosen[row, line.start : line.stop] = True
    return padded, is_chosen


def _lesson(words: Sequence[str], draws: random.Random) -> tuple[list[int], list[range]]:
    """A game by a careless player: often the guess is one that the answers rule out."""
    secret = draws.choice(words)
    game, left = Game(secret, words), list(words)
    text, lines = START + END, []
    while not game.done:
        guess = draws.choice(left if draws.random() < _CARE else words)
        if draws.random() < _MISSPELLING:
            guess = "".join(draws.sample(guess, len(guess)))
        lines.append(range(len(text), len(text) + len(guess) + 1))
        text += guess + END
        outcome = game.step(guess)
        if guess in words:
            left = [word for word in left if mark(guess, word) == outcome.observation]
        if not outcome.done:
            text += outcome.observation + END
    return encode(text), lines
