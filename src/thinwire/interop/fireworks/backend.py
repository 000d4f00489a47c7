"""Two names that code written for Fireworks' package imports, for its annotations and classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from mmap import mmap
from typing import Any, TypeAlias

Checksum: TypeAlias = str
"""An Adler-32, decimal."""


class CompressionBackend(ABC):
    """What codes tensors by one format. thinwire's own formats are functions, and none of these."""

    @abstractmethod
    def compress(self, *, src: Any, dst: Any) -> tuple[Any, Checksum]:
        """The payload of a change, and the checksum of ``dst``."""

    @abstractmethod
    def decompress(self, *, src: Any, compressed_diff: Any, checksum: Checksum) -> Any:
        """The new tensor, verified."""

    @abstractmethod
    def decompress_inplace(self, *, base: mmap, diff: mmap, compression_format: str) -> None:
        """Turn a mapped weights file into the new one."""
