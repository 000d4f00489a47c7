"""The small decoder of `--quick`, as a folder that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

import torch
from letters import save_tokenizer
from policy import ALPHABET, END_TOKEN
from transformers import LlamaConfig, LlamaForCausalLM, logging


def make_small(folder: Path) -> Path:
    """Random weights: what letters it says is chance, and a digit is right now and then."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32: vLLM's kernel for CPUs takes none of 16
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_TOKEN,
        pad_token_id=END_TOKEN,
    )
    save_tokenizer(folder, ALPHABET, ALPHABET[END_TOKEN])
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
