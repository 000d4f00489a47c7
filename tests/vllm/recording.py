"""What a driver asks of an engine, in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.engines.vllm import VLLM

_STEPS = ("state", "attach", "stage", "pause", "apply", "undo", "empty_caches", "set_label")
_STEPS += ("meet", "resume", "prove")


class RecordedEngine(VLLM):
    """Calls ``told`` with each step as it begins."""

    def __init__(self, endpoint: str, told: Callable[[str], None], **options: Any) -> None:
        super().__init__(endpoint, **options)
        for name in _STEPS:
            setattr(self, name, self._recorded(name, getattr(self, name), told))

    @staticmethod
    def _recorded(name: str, step: Any, told: Callable[[str], None]) -> Any:
        def call(*arguments: Any) -> Any:
            told(name)
            return step(*arguments)

        return call
