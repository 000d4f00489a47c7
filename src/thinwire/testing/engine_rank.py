"""One rank of the engine in memory: real parameters, changed by what real ranks run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.engines.engine import Update
from thinwire.engines.host import FOLDER_NAME, places_path
from thinwire.engines.places import read_places
from thinwire.errors import EngineDetached, EngineError
from thinwire.torch.attached import AttachedModel
from thinwire.torch.dtypes import torch_dtype
from thinwire.torch.index_map import Int64s
from thinwire.torch.live import named_tensors
from thinwire.torch.ways import Loader, Staged


class _Shard(torch.nn.Module):
    """A rank's share: rows of each tensor, matrices transposed."""

    def __init__(self, copy: Checkpoint, rank: int, rank_count: int) -> None:
        super().__init__()
        self._rank, self._rank_count = rank, rank_count
        self._numbers = {name: number for number, name in enumerate(copy.tensors)}
        for name, stored in copy.tensors.items():
            value = self._cut(torch.zeros(stored.shape, dtype=torch_dtype(stored.dtype)))
            self.register_buffer(f"p{self._numbers[name]}", value.contiguous().clone())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by name."""
        held = dict(self.named_buffers())
        for name, value in weights:
            held[f"p{self._numbers[name]}"].copy_(self._cut(value))

    def _cut(self, value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0 or value.shape[0] < self._rank_count:
            return value
        part = value.tensor_split(self._rank_count)[self._rank]
        return part.t() if part.dim() == 2 else part


class MemoryRank:
    """What runs in one worker.

    Args:
        copy: What it is started from.
        rank: Its number.
        rank_count: How many there are.

    Attributes:
        module: Its share of the model.
    """

    def __init__(self, copy: Checkpoint, rank: int, rank_count: int) -> None:
        self.module = _Shard(copy, rank, rank_count)
        self.module.load_weights(_values(copy))
        self._identity = f"memory {rank} of {rank_count}"
        self._attached: AttachedModel | None = None
        self._label = ""
        self._staged: tuple[Update, Staged, Checkpoint] | None = None
        self._applied: tuple[str, str, Staged] | None = None

    def attach(self, update: Update) -> None:
        """Find the index map and come to the host's copy."""
        self._label, self._staged, self._applied = "", None, None
        copy = Checkpoint.open(update.folder, ignore_subfolders=True)
        attached = AttachedModel(
            named_tensors(self.module),
            Loader(identity=self._identity, load=self.module.load_weights),
            update.folder / FOLDER_NAME / "maps",
            # Tiny models are loaded whole sooner than changed: which cannot be taken back.
            ("map",),
        )
        attached.attach(copy)
        if attached.differing_count(copy):
            raise EngineError("words differ after attaching")
        self._attached, self._label = attached, update.label

    def stage(self, update: Update) -> None:
        """Prepare an update."""
        self._staged = None
        if self._attached is None or not self._label:
            raise EngineDetached("this rank was not attached, or was started again")
        if update.base and update.base != self._label:
            raise EngineDetached(f"the update starts from {update.base}, not from {self._label}")
        copy = Checkpoint.open(update.folder, ignore_subfolders=True)
        places = _places(update) if update.base else None
        self._staged = update, self._attached.stage(copy, places), copy

    def apply(self, update: Update) -> None:
        """Change the weights."""
        if self._staged is None or self._staged[0].token != update.token:
            raise EngineError("this update was not staged on this rank")
        assert self._attached is not None
        _, staged, copy = self._staged
        self._applied = (update.token, self._label, staged)
        self._staged, self._label = None, ""
        self._attached.apply(staged, copy)
        self._label = update.label

    def has_applied(self, update: Update) -> bool:
        """Whether an update was begun here."""
        return self._applied is not None and self._applied[0] == update.token

    def undo(self, update: Update) -> None:
        """Take an update back, where it was begun here."""
        if self._applied is None or self._applied[0] != update.token:
            if not self._label:
                raise EngineError("what this rank holds is not known")
            return
        assert self._attached is not None
        _, before, staged = self._applied
        if not self._attached.undo(staged):
            raise EngineError("this update cannot be taken back")
        self._label, self._applied = before, None

    def prove(self, update: Update) -> bool | None:
        """Compare what it holds with the host's copy."""
        if self._attached is None or self._label != update.label:
            raise EngineDetached(f"this rank holds {self._label or 'no known version'}")
        copy = Checkpoint.open(update.folder, ignore_subfolders=True)
        count = self._attached.differing_count(copy)
        return None if count is None else count == 0


def _values(copy: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name, stored in copy.tensors.items():
        value = torch.zeros(stored.shape, dtype=torch_dtype(stored.dtype))
        if value.numel():
            value.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(stored.data.copy()))
        yield name, value


def _places(update: Update) -> dict[str, Int64s | None]:
    found: dict[str, Int64s | None] = {}
    for name, first, positions in read_places(places_path(update.folder, update.token)):
        if positions is None:
            found[name] = None
            continue
        earlier = found.get(name, np.empty(0, np.int64))
        if earlier is not None:
            found[name] = np.union1d(earlier, positions.astype(np.int64) + first)
    return found
