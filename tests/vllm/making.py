"""Tiny random Llamas that a real vLLM loads: configuration, BF16 weights and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Enough text for a few hundred merges: prompts of several tokens, not of bytes.
_TEXT = (
    "a trainer makes new weights and a sampler must follow it: each version is a whole number, "
    "each delta turns a base into what came next, and a stream keeps them in order. "
    "the store holds objects, the manifest names them, the follower fetches, decodes, checks and "
    "applies; between two steps few weights change, so a delta is small and the pause is short. "
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen. "
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris."
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_END, _PAD = "<end>", "<pad>"


def tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    is_tied: bool = True,
    vocab_size: int = 512,
    hidden_size: int = 128,
    layer_count: int = 2,
) -> Path:
    """A model folder; two query heads share a key head, and BF16 is what is saved.

    Weights spread wider than a fresh Llama's: one changed version must show in log-probabilities.
    There are four heads, and vLLM's attention for CPUs knows none smaller than 32: ``hidden_size``
    is 128 at least.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layer_count,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(vocab_size).save_pretrained(folder)
    return folder


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [_TEXT],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_END, _PAD],  # in the order of the configuration's ids
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=256,
    )
