"""Servers that tests share: one at a time, as two would wait for each other's processor time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from .server import VllmServer

# For the versions told with each token, and for what was found in the prefix cache.
_ARGUMENTS = ("--enable-scale-out", "--enable-prompt-tokens-details")

# oneDNN keeps compiled kernels for every shape of a batch that it met, some 100 KiB each: memory
# grows for hundreds of requests, and what an update might leave behind cannot be told from it.
_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}


class Servers:
    """One server at a time, started when it is first asked for, and again where it ended."""

    def __init__(self, models: Mapping[int, Path], folder: Path) -> None:
        self._models = models
        self._folder = folder
        self._ranks = 0
        self._server: VllmServer | None = None

    def of_ranks(self, ranks: int) -> VllmServer:
        """The server of so many ranks; it serves anything, but is not paused."""
        server = self._server
        if server is None or self._ranks != ranks or not server.is_healthy():
            self._stop()
            server = VllmServer(
                self._models[ranks],
                self._folder,
                tensor_parallel=ranks,
                arguments=_ARGUMENTS,
                environment=_ENVIRONMENT,
            )
            self._server, self._ranks = server.__enter__(), ranks
        server.post("/resume")
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None
