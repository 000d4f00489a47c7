"""Where batches come from: every sampler is asked, over its OpenAI endpoint, as fast as it answers.

A thread for each sampler takes the next question, has it answered a number of times, scores the
answers and hands them over with the version that they were sampled with. A sampler that does not
answer gives its question back. Which samplers there are is a file of JSON, looked at all the time:
they come and go.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from policy import Policy
from task import Sums

ASK_TIMEOUT_S = 20.0
LOOK_S = 0.5
RETRY_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    """A sampler; `kind` is "serve" or "vllm"."""

    name: str
    region: str
    kind: str
    url: str


def write_endpoints(path: Path, endpoints: list[Endpoint]) -> None:
    """Tell who there is."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps([asdict(endpoint) for endpoint in endpoints]))
    new.replace(path)


def read_endpoints(path: Path) -> list[Endpoint]:
    """Who there is."""
    if not path.exists():
        return []
    return [Endpoint(**found) for found in json.loads(path.read_text())]


class Between(Exception):
    """An answer that an update met on its way belongs to no version."""


class Collector:
    """Asks all samplers.

    Args:
        endpoints: The file that says who there is.
        policy: Prompts and token counts.
        task: Questions and their scores.
        group_size: Answers to each question.
        token: The samplers' bearer token.
        step_of: The trainer's step of a label, None where it knows no such version.
    """

    def __init__(
        self,
        endpoints: Path,
        policy: Policy,
        task: Sums,
        group_size: int,
        token: str,
        step_of: Callable[[str], int | None],
    ) -> None:
        self._path = endpoints
        self._policy, self._task, self._group_size = policy, task, group_size
        self._headers = {"Authorization": f"Bearer {token}"}
        self._step_of = step_of
        self._questions: queue.Queue[int] = queue.Queue()
        self._groups: queue.Queue[dict[str, Any]] = queue.Queue()
        self._asked = 0
        self._known: set[str] = set()
        self.dropped = 0
        self.unknown: list[str] = []
        threading.Thread(target=self._look, daemon=True).start()

    def ask(self, count: int) -> None:
        """So many questions more."""
        for _ in range(count):
            self._questions.put(self._asked)
            self._asked += 1

    def take(self, count: int, step: int, max_staleness: int) -> list[dict[str, Any]]:
        """So many groups that are fresh enough for this step; asks for as many as are taken."""
        groups: list[dict[str, Any]] = []
        while len(groups) < count:
            group = self._groups.get()
            self.ask(1)
            if step - 1 - group["step"] <= max_staleness:
                groups.append(group)
            else:
                self.dropped += 1
        return groups

    def _look(self) -> None:
        while True:
            for endpoint in read_endpoints(self._path):
                if endpoint.name not in self._known:
                    self._known.add(endpoint.name)
                    threading.Thread(target=self._serve, args=(endpoint,), daemon=True).start()
            time.sleep(LOOK_S)

    def _serve(self, endpoint: Endpoint) -> None:
        with httpx.Client(
            base_url=endpoint.url, headers=self._headers, trust_env=False, timeout=ASK_TIMEOUT_S
        ) as client:
            while True:
                if not self._is_there(client):
                    time.sleep(RETRY_S)
                    continue
                number = self._questions.get()
                try:
                    self._groups.put(self._group(client, endpoint, number))
                except (httpx.HTTPError, Between, KeyError, TypeError, ValueError):
                    self._questions.put(number)
                    time.sleep(RETRY_S)

    def _is_there(self, client: httpx.Client) -> bool:
        """Before a question is taken: whoever is gone must not keep one."""
        try:
            return client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _group(self, client: httpx.Client, endpoint: Endpoint, number: int) -> dict[str, Any]:
        entry = self._task.question(number)
        prompt = self._policy.tokenizer.encode(self._policy.prompt_of(entry))
        body = {
            "model": "policy",
            "prompt": prompt,
            "n": self._group_size,
            "max_tokens": self._policy.completion_tokens,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        start_s = time.time()
        before = self._label(client, endpoint)
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        label = answer["weight_version"] if before is None else self._label(client, endpoint)
        if label is None or (before is not None and before != label):
            raise Between
        step = self._step_of(label)
        if step is None:
            self.unknown.append(f"{endpoint.name}: {label}")
            raise Between
        choices = answer["choices"]
        texts = [
            self._policy.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
            for choice in choices
        ]
        return {
            "prompt": prompt,
            "completions": [choice["token_ids"] for choice in choices],
            "log_probs": [choice["logprobs"]["token_logprobs"] for choice in choices],
            "rewards": [self._task.score(text, entry) for text in texts],
            "text": texts[0],
            "sampler": endpoint.name,
            "label": label,
            "step": step,
            "took_s": time.time() - start_s,
        }

    def _label(self, client: httpx.Client, endpoint: Endpoint) -> str | None:
        """The label that vLLM shows; `thinwire serve` puts its own into every answer."""
        if endpoint.kind != "vllm":
            return None
        return str(client.get("/weight_info").raise_for_status().json()["weight_version"])
