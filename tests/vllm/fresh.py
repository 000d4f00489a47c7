"""What a vLLM that was started from a model's folder answers: the oracle of these tests."""

from __future__ import annotations

import hashlib
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
    What was loaded and asked before is not asked again: tests begin with the same model and change
    it alike, so that many folders hold the same bytes.
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
        self._folders: dict[str, Path] = {}
        self._generated: dict[tuple[Path, str, int], list[Output]] = {}
        self._scores: dict[tuple[Path, str], list[float]] = {}

    def generated(self, model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[Output]:
        """Each prompt's ``count`` greedy tokens."""
        model = self._first_of_its_bytes(model)
        key = (model, json.dumps(prompts), count)
        if key not in self._generated:
            answer = self._ask(model=str(model), prompts=prompts, generate=count, texts=[])
            self._generated[key] = [Output(*output) for output in answer["generated"]]
        return self._generated[key]

    def scores(self, model: Path, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each text, the log-probability of every token but the first."""
        model = self._first_of_its_bytes(model)
        keys = [(model, json.dumps(text)) for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._scores}
        if new:
            asked = {"prompts": [], "generate": 1, "texts": list(new.values())}
            answer = self._ask(model=str(model), **asked)
            self._scores |= zip(new, answer["scores"], strict=True)
        return [self._scores[key] for key in keys]

    def packed_experts(self) -> list[str]:
        """The numbers from 0 to 29 as vLLM packs the experts of tokens, in each of its dtypes."""
        packed: list[str] = self._ask(pack=[5, 3, 2])["packed"]
        return packed

    def close(self) -> None:
        # Nothing of it is worth the ten seconds that it takes to end by itself.
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _first_of_its_bytes(self, model: Path) -> Path:
        """The first folder that was asked about and holds the same."""
        digest = hashlib.sha256()
        for path in sorted(path for path in model.rglob("*") if path.is_file()):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return self._folders.setdefault(digest.hexdigest(), model)

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process of fresh loads ended; see {self._log.name}"
        answer: dict[str, Any] = json.loads(line)
        return answer
