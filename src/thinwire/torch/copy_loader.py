"""Has an engine load from a host's copy of the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.errors import EngineError
from thinwire.torch.index_map import Int64s
from thinwire.torch.stored import values_of
from thinwire.torch.ways import Loader, Patch


class CopyLoader:
    """Calls what an engine can do, and says what failed.

    Args:
        loader: What the engine can do.

    Attributes:
        loader: What the engine can do.
        load_s_per_byte: What loading everything took, when that was done last.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.load_s_per_byte = 0.0

    def load(self, copy: Checkpoint, names: Sequence[str]) -> None:
        """Load some tensors in place.

        Raises:
            EngineError: The engine's loader failed.
        """
        if not names:
            return
        # Where two share a place, the one that comes later in the checkpoint stays.
        chosen = set(names)
        ordered = [name for name in copy.tensors if name in chosen]
        try:
            with torch.no_grad():
                self.loader.load((name, _tensor_of(copy, name)) for name in ordered)
        except Exception as error:
            raise EngineError(
                f"the engine's loader failed: {type(error).__name__}: {error}"[:500],
                hint="Is the engine's model the one of this stream?",
            ) from error
        self.loader.synchronize()

    def load_all(self, copy: Checkpoint) -> float:
        """Load everything in place; returns the seconds it took.

        Raises:
            EngineError: As :meth:`load`.
        """
        start_s = time.perf_counter()
        self.load(copy, list(copy.tensors))
        load_s = time.perf_counter() - start_s
        self.load_s_per_byte = load_s / max(1, sum(t.data.size for t in copy.tensors.values()))
        return load_s

    def reload(self, copy: Checkpoint) -> None:
        """Have everything loaded and processed as after a start.

        Raises:
            EngineError: The engine's reload failed.
        """
        assert self.loader.reload is not None
        try:
            with torch.no_grad():
                self.loader.reload((name, _tensor_of(copy, name)) for name in copy.tensors)
        except Exception as error:
            raise EngineError(
                f"the engine's reload failed: {type(error).__name__}: {error}"[:500],
                hint="Restart the engine",
            ) from error
        self.loader.synchronize()

    def patch(self, patches: Sequence[Patch]) -> None:
        """Load changed words; without waiting for the device.

        Raises:
            EngineError: The engine's own function failed.
        """
        if not patches:
            return
        assert self.loader.patch is not None
        try:
            self.loader.patch(patches)
        except Exception as error:
            raise EngineError(f"the engine's patches failed: {error}"[:500]) from error


def patches_of(copy: Checkpoint, places: Mapping[str, Int64s | None]) -> list[Patch]:
    """Changed words of the copy: those at some positions by tensor; None: all."""
    patches = []
    for name, positions in places.items():
        value = _tensor_of(copy, name).reshape(-1)
        at = np.arange(value.numel(), dtype=np.int64) if positions is None else positions
        index = torch.from_numpy(at)
        patches.append(Patch(name, copy.tensors[name].shape, index, value[index]))
    return patches


def _tensor_of(copy: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of the copy, borrowed from the mapped file: for reading only."""
    return values_of(name, copy.tensors[name]).reshape(copy.tensors[name].shape)
