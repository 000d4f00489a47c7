"""A stream of model versions, an engine that follows it, and what that engine answers."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import thinwire
from thinwire.engines.driver import Driver
from thinwire.engines.engine import Policy, label_of
from thinwire.engines.vllm import VLLM
from thinwire.stream.version import Version

from .fresh import Output
from .server import VllmServer

# Of several lengths; within the vocabularies of 500 and of 512 tokens.
PROMPTS = [[5, 6, 7, 8, 9], [100, 90, 80], [*range(300, 340)]]
TOKENS = 8
RESET = Policy(cache="reset")


class Rollout:
    """A stream in a folder, and the model folder of every version of it."""

    def __init__(self, folder: Path, first: Path) -> None:
        self.folder = folder
        self.store = folder / "stream"
        self.url = self.store.as_uri()
        self.newest = first
        self.models: dict[str, Path] = {}
        self._publisher = thinwire.Publisher(self.url, folder / "baseline")
        self.publish(first)

    def publish(self, model: Path) -> Version:
        version = self._publisher.publish(model, step=len(self.models))
        self.models[label_of(version)] = self.newest = model
        return version

    def change(self, share: float = 0.003) -> Version:
        """Publish the newest version with a share of every tensor's elements changed."""
        number = len(self.models)
        return self.publish(changed(self.newest, self.folder / f"model{number}", number, share))

    def restart(self, model: Path) -> Version:
        """Publish a model as the first version of a new lineage."""
        self._publisher.close()
        self._publisher = thinwire.Publisher(self.url, self.folder / "baseline", new_lineage=True)
        return self.publish(model)

    def close(self) -> None:
        self._publisher.close()

    def driver(self, server: VllmServer, policy: Policy = RESET, **options: Any) -> Driver:
        ways: Sequence[str] = options.pop("ways", ())
        return Driver(
            options.pop("stream", self.url),
            options.pop("engine", None) or VLLM(server.endpoint, ways=ways),
            self.folder / "host",
            policy=policy,
            **options,
        )


class Generated(NamedTuple):
    """An answer of ``/inference/v1/generate``."""

    output: Output
    spans: list[tuple[int, int, str]]
    """First token, token after the last, and version, as the engine tells them."""
    cached: int
    """Tokens of the prompt that were found in the prefix cache."""


def changed(model: Path, out: Path, seed: int, share: float) -> Path:
    """A copy in which a share of each tensor's elements is off by up to a half."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out)
    path = out / "model.safetensors"
    tensors = load_file(path)
    random = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        words = tensor.view(torch.int16).reshape(-1)
        count = max(1, int(words.numel() * share))
        # The top bit of the fraction: no exponent changes, so that nothing becomes infinite.
        words[torch.randperm(words.numel(), generator=random)[:count]] ^= 1 << 6
    save_file(tensors, path, metadata={"format": "pt"})
    return out


def generate(server: VllmServer, prompt: list[int], count: int = TOKENS) -> Generated:
    answer = server.post("/inference/v1/generate", generate_body(prompt, count))
    return generated_of(answer)


def generate_body(prompt: list[int], count: int = TOKENS) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": count, "logprobs": 0, "ignore_eos": True}
    return {"token_ids": prompt, "sampling_params": sampling}


def generated_of(answer: Any) -> Generated:
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    output = Output(choice["token_ids"], [at["logprob"] for at in content])
    spans = [(span["start"], span["end"], span["version"]) for span in choice["weight_versions"]]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Generated(output, spans, details.get("cached_tokens") or 0)


def generating(
    threads: Executor, server: VllmServer, prompt: list[int], count: int
) -> Future[Generated]:
    """A generation of which the first token is there, and the rest still comes."""
    has_begun = threading.Event()
    asked = threads.submit(_generate_streaming, server, prompt, count, has_begun.set)
    while not has_begun.wait(0.01):
        assert not asked.done(), asked.result()
    return asked


def _generate_streaming(
    server: VllmServer, prompt: list[int], count: int, on_token: Callable[[], None]
) -> Generated:
    tokens: list[int] = []
    content: list[Any] = []
    last: Any = None
    body = {**generate_body(prompt, count), "stream": True}
    for chunk in server.stream("/inference/v1/generate", body):
        if chunk["choices"]:
            last = chunk["choices"][0]
            tokens += last["token_ids"]
            content += last["logprobs"]["content"] if last["logprobs"] else []
            on_token()
    return generated_of(
        {"choices": [{**last, "token_ids": tokens, "logprobs": {"content": content}}]}
    )


def complete(server: VllmServer, prompt: list[int], count: int = TOKENS) -> Output:
    return completed_of(server.post("/v1/completions", complete_body(prompt, count)))


def complete_body(prompt: list[int], count: int = TOKENS) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def completed_of(answer: Any) -> Output:
    choice = answer["choices"][0]
    return Output(choice["token_ids"], choice["logprobs"]["token_logprobs"])
