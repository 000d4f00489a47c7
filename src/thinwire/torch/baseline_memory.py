"""Where a rank's baseline lies: in memory, pinned where there is a GPU, or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from thinwire.checkpoint.disk import create_mapped
from thinwire.publish.baseline import Allocate, in_memory

BaselineMemory = Literal["memory", "disk"]


def allocator(kind: BaselineMemory, folder: Path) -> Allocate:
    """What makes room for a baseline.

    Args:
        kind: "memory", or "disk": a memory-mapped file.
        folder: Where the file goes.
    """
    if kind == "disk":
        return _on_disk(folder / "baseline")
    return _pinned if torch.cuda.is_available() else in_memory


def _on_disk(path: Path) -> Allocate:
    """A file without a name: gone with the process, whatever ends it."""

    def allocate(size_bytes: int) -> Any:
        path.unlink(missing_ok=True)
        view = create_mapped(path, max(1, size_bytes))
        path.unlink()
        return view[:size_bytes]

    return allocate


def _pinned(size_bytes: int) -> Any:
    """Memory that a GPU can copy to without the host's help."""
    if size_bytes == 0:
        return in_memory(0)
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
