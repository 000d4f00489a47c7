"""What the two processes of the example agree on; `run.py` writes it, `train.py` reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run. `host_copy` is the folder that vLLM's weights are taken from."""

    model: str
    url: str
    engine: str
    host_copy: str
    work: str
    questions: list[tuple[str, str]]
    steps: int
    batch_size: int
    group_size: int
    completion_tokens: int
    learning_rate: float

    @property
    def records(self) -> Path:
        """Where the rollout worker writes down what vLLM answered."""
        return Path(self.work) / "records.jsonl"

    @property
    def report(self) -> Path:
        """Where the closing table goes."""
        return Path(self.work) / "report.json"
