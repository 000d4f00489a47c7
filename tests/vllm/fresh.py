"""What a vLLM that was started from a model's folder answers: the oracle of these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .server import SETTINGS

_PROGRAM = Path(__file__).with_name("fresh_loads.py")


class Output(NamedTuple):
    """Tokens, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


class FreshLoads:
    """Loads a model afresh in a vLLM of one rank, in a process of its own, and asks it.

    The oracle of these tests: every model is loaded from its folder by vLLM, none is ever updated.
    """

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "fresh-loads.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            env={**os.environ, **SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._generated: dict[tuple[Path, str, int], list[Output]] = {}

    def generated(self, model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[Output]:
        """Each prompt's ``count`` greedy tokens."""
        key = (model, json.dumps(prompts), count)
        if key not in self._generated:
            answer = self._ask(model, prompts, count, [])
            self._generated[key] = [Output(*output) for output in answer["generated"]]
        return self._generated[key]

    def scores(self, model: Path, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each text, the log-probability of every token but the first."""
        scores: list[list[float]] = self._ask(model, [], 1, texts)["scores"]
        return scores

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, model: Path, prompts: Any, count: int, texts: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"model": str(model), "prompts": prompts, "generate": count, "texts": texts}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process of fresh loads ended; see {self._log.name}"
        answer: dict[str, Any] = json.loads(line)
        return answer
