"""A new version seen from its base, one tensor at a time: what every writer of this room takes.

It may come from another system's delta, from a delta of thinwire's, or from two checkpoints; a
writer does not see which, and never holds more than a few tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import ByteArray, map_file, os_errors, reserve
from thinwire.checkpoint.plan import base_file_view, plan_result
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.delta_set import OpenDelta
from thinwire.codec.dtypes import byte_count
from thinwire.codec.write import Pair
from thinwire.errors import TensorMismatch
from thinwire.interop.foreign import ForeignDelta

_NO_BYTES = np.empty(0, np.uint8)


class Change(Protocol):
    """A base and what becomes of it.

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
        mapped = _unnamed_map(spool_dir, size)
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


def _unnamed_map(folder: Path, size_bytes: int) -> ByteArray:
    """A writable view of a new file that has no name, and goes with the view."""
    with os_errors("cannot write in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not size_bytes:
            return _NO_BYTES
        with TemporaryFile(dir=folder) as file:
            reserve(file.fileno(), size_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint8)


@contextmanager
def spooled_pairs(change: Change, folder: Path) -> Iterator[list[Pair]]:
    """All tensors of both sides for thinwire's own encoder.

    New tensors wait in an unnamed file in ``folder``, through which they are mapped: no model is
    held in memory.

    Raises:
        StoreError: The disk is full.
        ThinwireError: What the change raises.
    """
    with os_errors("cannot write in", folder), TemporaryFile(dir=folder) as spool:
        spans: dict[str, tuple[int, StoredTensor]] = {}
        size = 0
        for names in change.layout.values():
            for name in names:
                if name in change.touched:
                    new = change.new_tensor(name)
                    spool.write(new.data.data)
                    spans[name] = size, new._replace(data=_NO_BYTES)
                    size += new.data.size
        spool.flush()
        mapped = (
            np.frombuffer(mmap.mmap(spool.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
            if size
            else _NO_BYTES
        )
        yield list(_pairs(change, spans, mapped))


def _pairs(
    change: Change, spans: Mapping[str, tuple[int, StoredTensor]], mapped: ByteArray
) -> Iterator[Pair]:
    held: set[str] = set()
    for names in change.layout.values():
        for name in names:
            held.add(name)
            old = change.base.tensors.get(name)
            if name not in spans:
                assert old is not None
                yield Pair(name, old.dtype, old.shape, old.data, old.data)
                continue
            start, new = spans[name]
            data = mapped[start : start + byte_count(new.dtype, new.shape)]
            fits = old is not None and (old.dtype, old.shape) == (new.dtype, new.shape)
            yield Pair(name, new.dtype, new.shape, old.data if old and fits else None, data)
    for name, old in change.base.tensors.items():
        if name not in held:
            yield Pair(name, old.dtype, old.shape, old.data, None)


def changed_tensors(change: Change) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Name, base and new tensor of each tensor whose bits differ, in the order of the layout.

    For formats that know tensors by name alone: which must be the same on both sides.

    Raises:
        TensorMismatch: Tensors came or went, or changed dtype or shape.
    """
    names = [name for names in change.layout.values() for name in names]
    gone = change.base.tensors.keys() - set(names)
    for name in [*names, *sorted(gone)]:
        old = change.base.tensors.get(name)
        if name in gone or old is None:
            raise _other_layout(name, "came or went")
        if name not in change.touched:
            continue
        new = change.new_tensor(name)
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise _other_layout(name, "changed dtype or shape")
        if not np.array_equal(old.data, new.data):
            yield name, old, new


def _other_layout(name: str, what: str) -> TensorMismatch:
    return TensorMismatch(
        f"tensor {name[:200]!r} {what}: this format has no delta for that",
        hint="Write full weights for this version",
        tensor=name,
    )
