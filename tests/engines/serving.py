"""A server on a small model that follows a stream, and what its answers must be."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog
import torch

from thinwire import Follower, Version
from thinwire.engines.engine import label_of
from thinwire.engines.transformers.serving import Settings, serving
from thinwire.torch import TorchPublisher
from thinwire.web import Listener

VOCABULARY = 64


def llama(seed: int = 0, **config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    facts = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**facts, **config})).eval()


def tokenizer_files(folder: Path, template: str | None = None) -> dict[str, bytes]:
    """A tokenizer whose tokens are bytes: letters that are not ASCII are several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    model = Tokenizer(models.BPE(vocabulary, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.chat_template = template
    folder.mkdir(exist_ok=True)
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@torch.no_grad()
def nudge(model: Any, seed: int, share: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor[chosen] += 0.2 * torch.randn(int(chosen.sum()), generator=generator)


@contextmanager
def served(settings: Settings) -> Iterator[str]:
    """The URL of a server in this process."""
    with serving(settings, structlog.get_logger()) as app:
        listener = Listener(app, "127.0.0.1", 0)
        thread = threading.Thread(target=listener.run)
        thread.start()
        try:
            yield listener.url
        finally:
            listener.stop()
            thread.join(30)


class Fresh:
    """Fresh loads of versions, by their labels."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._models: dict[str, Any] = {}

    def load(self, version: int) -> Any:
        from transformers import AutoModelForCausalLM

        folder = self._folder / f"fresh-{version}"
        with Follower(self._url, folder, lease=False) as follower:
            found: Version = follower.catch_up(version)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._models[label_of(found)] = model
        return model

    def by_label(self, label: str) -> Any:
        if label not in self._models:
            self.load(int(label.partition("-")[0]))
        return self._models[label]

    @torch.no_grad()
    def logprobs(self, label: str, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """What that version gives each of the tokens."""
        ids = torch.tensor([prompt + tokens])
        logits = self.by_label(label)(ids).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def check(self, choice: dict[str, Any]) -> None:
        """Every token's log-probability is the one of the version that it is labelled with."""
        tokens, found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        spans = choice["weight_spans"]
        assert [s["stop"] for s in spans[:-1]] == [s["start"] for s in spans[1:]]
        assert (spans[0]["start"], spans[-1]["stop"]) == (0, len(tokens))
        for span in spans:
            part = slice(span["start"], span["stop"])
            wanted = self.logprobs(span["weight_version"], choice["prompt_token_ids"], tokens)
            torch.testing.assert_close(
                torch.tensor(found[part]), wanted[part], rtol=1e-3, atol=1e-3
            )


def post(url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must have come to its end."""
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that a stream of one choice says piece by piece."""
    choices = [part["choices"][0] for part in parts if part["choices"]]
    return {
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "text": "".join(choice["text"] for choice in choices),
        "finish_reason": choices[-1]["finish_reason"],
        "weight_spans": choices[-1]["weight_spans"],
        "logprobs": {
            "token_logprobs": [
                logprob
                for choice in choices
                if choice["logprobs"]
                for logprob in choice["logprobs"]["token_logprobs"]
            ]
        },
    }


class Trainer:
    """Publishes versions of a model that changes."""

    def __init__(self, url: str, model: Any, files: dict[str, bytes] | None = None) -> None:
        self.model = model
        self._publisher = TorchPublisher(model, url, files=files, maintain=False)
        self.count = 0

    def publish(self) -> Version:
        if self.count:
            nudge(self.model, self.count)
        found = self._publisher.publish(10 * self.count, when_busy="block").wait(60)
        self.count += 1
        assert found is not None
        return found

    def close(self) -> None:
        self._publisher.close()
