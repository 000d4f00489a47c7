"""zstd at level 1, the entropy stage of several peers."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from thinwire.bench.peer import MissingExtraError

_LEVEL = 1


def load_zstd() -> Any:
    """Python's own zstd module, or its backport before 3.14. Raises MissingExtraError."""
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"this row needs {module}: {error}") from error


class ZstdOne:
    """Compress and decompress whole buffers at level 1."""

    def __init__(self) -> None:
        self._zstd = load_zstd()

    def compress(self, data: Any) -> bytes:
        """One frame that holds ``data`` (any contiguous buffer of bytes)."""
        frame: bytes = self._zstd.compress(data, _LEVEL)
        return frame

    def decompress(self, frame: bytes) -> bytes:
        """What ``compress`` was given."""
        data: bytes = self._zstd.decompress(frame)
        return data
