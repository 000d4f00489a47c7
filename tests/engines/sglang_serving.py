"""Small model folders, a contract server on a free port, and clients that never stop asking."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from thinwire.engines.engine import Timer, Update
from thinwire.stream.version import Version
from thinwire.testing.sglang_scheduler import token_of
from thinwire.testing.sglang_server import running

SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.norm.weight": (16,),
}


def write_model(folder: Path, seed: int, dtype: Any = ml_dtypes.bfloat16) -> Path:
    """A model's folder; every tensor depends on ``seed``."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


def update_to(folder: Path, number: int) -> Update:
    """An update to what is in a folder, called version ``number``."""
    version = Version(
        version=number,
        step=number,
        lineage="0" * 16,
        kind="anchor",
        manifest=f"{number:064x}"[::-1],
        weights="",
        layout="",
        payload_bytes=0,
        raw_bytes=0,
        word_count=0,
        changed_count=0,
        created_ms=0,
    )
    return Update(version=version, folder=folder, token=f"t{number}", base="", changed_count=0)


def soon(timeout_s: float = 10.0) -> Timer:
    return Timer(timeout_s, "a test's step")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@contextmanager
def server(folder: Path, *arguments: str, port: int = 0) -> Iterator[str]:
    with running(folder, port or free_port(), *arguments) as endpoint:
        yield endpoint


def client() -> httpx.Client:
    # Nothing here is https, and what checks it is slow to make.
    return httpx.Client(trust_env=False, verify=False, timeout=30)


def ask_test(endpoint: str, **changes: Any) -> dict[str, Any]:
    """Set faults, or (with none) ask what the server counts."""
    with client() as http:
        method = "POST" if changes else "GET"
        data: dict[str, Any] = http.request(method, f"{endpoint}/test", json=changes or None).json()
        return data


def calls(endpoint: str) -> list[str]:
    """The control routes that were called, in their order, without the questions."""
    questions = {"/server_info", "/model_info", "/get_server_info", "/get_model_info"}
    return [path for path in ask_test(endpoint)["calls"] if path not in questions | {"/generate"}]


@dataclasses.dataclass
class Answer:
    """One answer as a client saw it.

    Attributes:
        prompt: What was asked.
        tokens: What came.
        labels: The weight version told with each token, by its place.
        finish: Why it ended; "lost" where the connection broke.
    """

    prompt: str
    tokens: list[str] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)
    finish: str = ""

    def runs(self, digests: dict[str, str]) -> list[tuple[str, str]]:
        """The labels of the weights, and of the KV's weights, of each run of tokens.

        Raises:
            AssertionError: A token is of no known version, or not of the version told with it.
        """
        found: list[tuple[str, str]] = []
        for place, (token, label) in enumerate(zip(self.tokens, self.labels, strict=True)):
            matching = [
                kv
                for kv, digest in digests.items()
                if token_of(digests[label], digest, self.prompt, place) == token
            ]
            assert matching, f"token {place} of {self} is not of {label}: a mix"
            if not found or found[-1] != (label, matching[0]):
                found.append((label, matching[0]))
        return found


def ask(endpoint: str, prompt: str, count: int, answer: Answer | None = None) -> Answer:
    """Stream one answer."""
    answer = answer or Answer(prompt)
    body = {"text": prompt, "sampling_params": {"max_new_tokens": count}, "stream": True}
    try:
        with (
            client() as http,
            http.stream("POST", f"{endpoint}/generate", json=body) as stream,
        ):
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[len("data: ") :])
                answer.tokens = event["text"].split()
                meta = event["meta_info"]
                answer.labels += [meta["weight_version"]] * (
                    len(answer.tokens) - len(answer.labels)
                )
                answer.finish = (meta["finish_reason"] or {"type": ""})["type"]
    except httpx.HTTPError:
        answer.finish = "lost"
    return answer


class Clients:
    """Threads that ask one thing after another until the block ends."""

    def __init__(self, endpoint: str, count: int, tokens: int) -> None:
        self.answers: list[Answer] = []
        self._endpoint = endpoint
        self._tokens = tokens
        self._is_ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._is_ending.set()
        if kind is not None:
            return
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a request is never answered"

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._is_ending.is_set():
            # Few prompts, asked again and again: their prefixes are in the cache. Of different
            # lengths: there is no moment in which all have ended.
            prompt, count = f"prompt {(number + turn) % 3}", self._tokens + 3 * number
            self.answers.append(ask(self._endpoint, prompt, count))
            turn += 1
