"""Tokenizers whose tokens are letters, as files that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder: Path, alphabet: str, end: str) -> None:
    """Write the tokenizer's files: a token for each letter, of which ``end`` ends an answer."""
    tokenizer = Tokenizer(
        models.WordLevel(
            {letter: token for token, letter in enumerate(alphabet)}, unk_token=alphabet[0]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end
    ).save_pretrained(folder)
