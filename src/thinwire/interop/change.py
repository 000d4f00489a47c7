"""A new version seen from its base, one tensor at a time: what every writer of this room takes.

It may come from another system's delta, from a delta of thinwire's, or from two checkpoints; a
writer does not see which, and never holds more than a few tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import map_file
from thinwire.checkpoint.plan import base_file_view, plan_result
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.delta_set import OpenDelta
from thinwire.interop.foreign import ForeignDelta
from thinwire.interop.unnamed import map_reserved


class Change(Protocol):
    """A base and what becomes of it. Threads may ask for tensors at the same time.

    Attributes:
        base: The base, opened.
        layout: The new version's weights files by name, each with its tensors in order.
        touched: The tensors that may differ from the base's; every other one is as there.
        file_names: The new version's other files.
    """

    base: Checkpoint
    layout: Mapping[str, Sequence[str]]
    touched: Collection[str]
    file_names: Collection[str]

    def new_tensor(self, name: str) -> StoredTensor:
        """A tensor of the new version, verified; of those that are not touched, the base's."""

    def read_file(self, name: str) -> memoryview:
        """The bytes of one of ``file_names``."""

    def check_unchanged(self) -> None:
        """Find out whether all that was read is one state: before what was made of it is used.

        Raises:
            InvalidArgument: A checkpoint was written to meanwhile.
        """


class CheckpointChange:
    """The change between two opened checkpoints; see :class:`Change`.

    Attributes:
        new: The new one.
    """

    def __init__(self, base: Checkpoint, new: Checkpoint) -> None:
        self.base = base
        self.layout: Mapping[str, Sequence[str]] = {
            name: list(file.tensors) for name, file in new.weights.items()
        }
        self.touched: Collection[str] = new.tensors.keys()
        self.file_names: Collection[str] = new.files.keys()
        self.new = new

    def new_tensor(self, name: str) -> StoredTensor:
        """See :class:`Change`."""
        return self.new.tensors[name]

    def read_file(self, name: str) -> memoryview:
        """See :class:`Change`."""
        return map_file(self.new.files[name]).data

    def check_unchanged(self) -> None:
        """See :class:`Change`."""
        self.base.check_unchanged()
        self.new.check_unchanged()


class ForeignChange:
    """What another system's delta makes of an opened checkpoint; see :class:`Change`.

    Raises:
        TensorMismatch: The delta does not fit the base. Also where it names a tensor that the base
            lacks: none of these formats says into which file a new one would go.
    """

    def __init__(self, base: Checkpoint, delta: ForeignDelta) -> None:
        self.base = base
        self.layout: Mapping[str, Sequence[str]] = {
            name: list(file.tensors) for name, file in base.weights.items()
        }
        self.touched: Collection[str] = delta.tensors.keys()
        self.file_names: Collection[str] = base.files.keys() | delta.files.keys()
        self._delta = delta
        delta.check_base(base)

    def new_tensor(self, name: str) -> StoredTensor:
        """See :class:`Change`."""
        old = self.base.tensors[name]
        return self._delta.new_tensor(name, old) if name in self.touched else old

    def read_file(self, name: str) -> memoryview:
        """See :class:`Change`."""
        return map_file(self._delta.files.get(name) or self.base.files[name]).data

    def check_unchanged(self) -> None:
        """See :class:`Change`."""
        self.base.check_unchanged()


class DeltaChange:
    """What an opened delta of thinwire's makes of an opened checkpoint; see :class:`Change`.

    The new tensors are decoded together, once, into an unnamed file through which they are mapped:
    no model is held in memory, and it takes the disk space of what the delta touches.

    Args:
        base: The checkpoint.
        delta: The delta; it stays open.
        spool_dir: Where the unnamed file goes; made where it is missing.
        workers: Threads.

    Raises:
        ApplyError, FormatError: The delta does not fit the base, or is unsound.
        StoreError: The disk is full.
    """

    def __init__(
        self, base: Checkpoint, delta: OpenDelta, spool_dir: Path, *, workers: int = 1
    ) -> None:
        plan = plan_result(base, delta)
        self.base = base
        self.layout: Mapping[str, Sequence[str]] = {
            file.name: list(file.header.spans) for file in plan.weights
        }
        touched = {
            name: entry for name, entry in delta.tensors.items() if entry.kind in ("delta", "full")
        }
        self.touched: Collection[str] = touched.keys()
        self.file_names: Collection[str] = [file.name for file in plan.files]
        self._delta = delta
        self._files = {file.name: file for file in plan.files}
        self._new: dict[str, StoredTensor] = {}
        size = sum(entry.byte_count for entry in touched.values())
        mapped = map_reserved(spool_dir, size)
        start = 0
        for name, entry in touched.items():
            data = mapped[start : start + entry.byte_count]
            self._new[name] = StoredTensor(entry.dtype, tuple(entry.shape), data)
            start += entry.byte_count
        bases = {name: tensor.data for name, tensor in base.tensors.items()}
        delta.apply(
            bases, lambda entry: self._new[entry.name].data, only=self.touched, workers=workers
        )

    def new_tensor(self, name: str) -> StoredTensor:
        """See :class:`Change`."""
        return self._new[name] if name in self._new else self.base.tensors[name]

    def read_file(self, name: str) -> memoryview:
        """See :class:`Change`."""
        file = self._files[name]
        if file.from_base:
            return base_file_view(self.base, file.attachment).data
        return memoryview(self._delta.attachment_data(file.attachment))

    def check_unchanged(self) -> None:
        """See :class:`Change`."""
        self.base.check_unchanged()
