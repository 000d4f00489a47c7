"""A causal language model of transformers, with its tokenizer if there is one."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinwire.engines.transformers.protocol import ApiError, Asked, Limits, Options
from thinwire.errors import InvalidArgument, NotFound

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Encoder:
    """Turns texts into token ids; from any thread.

    transformers' fast tokenizers change themselves while they encode, and fail where another thread
    uses them then: so this one has its own copy, for one thread at a time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()

    def ids_of(self, text: str) -> list[int]:
        """A prompt's tokens, with the special ones that the model begins with."""
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def chat_ids_of(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a chat, up to where the answer begins.

        Raises:
            ApiError: There is no template, or it refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template", "no_chat_template")
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:
                # Templates refuse what they do not like by raising, anything.
                reason = str(error)[:300]
                raise ApiError(
                    400, f"the chat template refused it: {reason}", "invalid_value"
                ) from error
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class Loaded(NamedTuple):
    """What was loaded.

    Attributes:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer, for decoding; None: prompts are token ids.
        encoder: The same for encoding.
        eos_ids: Tokens that end an answer.
    """

    model: Any
    tokenizer: Any
    encoder: Encoder | None
    eos_ids: frozenset[int]

    @property
    def context_tokens(self) -> int | None:
        """How many tokens the model was made for, if it says so."""
        config = self.model.config.get_text_config()
        found = getattr(config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""
        return int(self.model.get_input_embeddings().weight.shape[0])


def load(folder: Path, *, dtype: str, device: str) -> Loaded:
    """Load a model from a folder; code that comes with it is never run.

    Raises:
        InvalidArgument: transformers cannot load it.
        NotFound: There is no such folder.
    """
    if not folder.is_dir():
        # transformers would take the path for a name on a hub.
        raise NotFound(
            f"there is no folder {folder}", hint="Give a model's folder", path=str(folder)
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise InvalidArgument(f"{dtype!r} is no dtype", hint="Give bfloat16, float32 or auto")
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = None
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=kind, use_safetensors=True, **safe
        )
        if any((folder / name).exists() for name in _TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **safe)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise InvalidArgument(
            f"transformers cannot load {folder}: {error}",
            hint="It needs a config.json of a model that transformers knows; a publisher gives it "
            "along (files=)",
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    encoder = None if tokenizer is None else Encoder(tokenizer)
    return Loaded(model, tokenizer, encoder, _eos_ids(model, tokenizer))


def prompt_ids(asked: Asked, loaded: Loaded, limits: Limits) -> list[list[int]]:
    """The prompts of a request as token ids.

    Raises:
        ApiError: There is no tokenizer for a text, or one is too long or unknown to the model.
    """
    found = []
    for prompt in asked.prompts:
        ids = _ids_of(asked, prompt, loaded)
        if not ids:
            raise ApiError(400, "a prompt has no tokens", "invalid_value", param="prompt")
        wanted = max(1, asked.options.max_tokens)
        if len(ids) + wanted > limits.context_tokens:
            raise ApiError(
                400,
                f"a prompt of {len(ids)} tokens and an answer of {wanted} are more than "
                f"{limits.context_tokens}",
                "context_length_exceeded",
                param="prompt",
            )
        if min(ids) < 0 or max(ids) >= loaded.vocabulary:
            raise ApiError(
                400,
                f"token ids are from 0 to {loaded.vocabulary - 1}",
                "invalid_value",
                param="prompt",
            )
        found.append(ids)
    if asked.options.stops and loaded.tokenizer is None:
        raise ApiError(400, "without a tokenizer there is no text to stop at", "no_tokenizer")
    return found


def options_for(asked: Asked, ids: list[int], limits: Limits) -> Options:
    """The options of one prompt: an answer of no given length is cut to what the prompt leaves."""
    wanted = asked.options.max_tokens
    if wanted > 0:
        return asked.options
    return asked.options._replace(max_tokens=min(-wanted, limits.context_tokens - len(ids)))


def _ids_of(asked: Asked, prompt: Any, loaded: Loaded) -> list[int]:
    if asked.kind == "completion" and isinstance(prompt, list):
        return prompt
    if loaded.encoder is None:
        raise ApiError(
            400,
            "this model has no tokenizer: give the prompt as token ids to /v1/completions",
            "no_tokenizer",
            param="prompt",
        )
    if asked.kind == "completion":
        return loaded.encoder.ids_of(prompt)
    return loaded.encoder.chat_ids_of(prompt)


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        found |= set(eos if isinstance(eos, list | tuple) else () if eos is None else (eos,))
    return frozenset(found)
