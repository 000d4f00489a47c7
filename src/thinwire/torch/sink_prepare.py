"""A verified delta as what is to be written into a module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from thinwire.codec.delta import Bases, ChunkChanges
from thinwire.codec.delta_set import DeltaSet
from thinwire.errors import TensorMismatch
from thinwire.torch.sink_places import Bound, Published
from thinwire.torch.sink_writes import (
    DenseWrite,
    Load,
    LoaderWrite,
    Writes,
    prepare_changes,
)

Tensors = Mapping[str, StoredTensor]


class Decoded(NamedTuple):
    """What a delta makes of a base, decoded and verified.

    Attributes:
        tensors: All tensors of the result.
        changes: The changed words of those that stay.
        whole: Those that are carried in full.
        is_other: Whether the result has other tensors than the base.
    """

    tensors: Mapping[str, Published]
    changes: Sequence[ChunkChanges]
    whole: Tensors
    is_other: bool

    @classmethod
    def of(cls, delta: DeltaSet, base: Checkpoint, *, workers: int = 1) -> Decoded:
        """Decode and verify everything.

        Raises:
            BaseMismatch, TensorMismatch, FormatError: As :meth:`DeltaSet.changes`.
        """
        entries = {name: e for name, e in delta.tensors.items() if e.kind != "removed"}
        tensors = {name: Published(e.dtype, tuple(e.shape)) for name, e in entries.items()}
        bases = {name: tensor.data for name, tensor in base.tensors.items()}
        changes = list(delta.changes(bases, workers=workers))
        full = {n: np.empty(e.byte_count, np.uint8) for n, e in entries.items() if e.kind == "full"}
        if full:
            delta.apply(bases, lambda entry: full[entry.name], only=full, workers=workers)
        whole = {name: StoredTensor(*tensors[name], data) for name, data in full.items()}
        return cls(tensors, changes, whole, bool(full) or len(entries) < len(delta.tensors))

    def replayed(self, delta: DeltaSet) -> DeltaSet:
        """The same delta, for a folder with the same base, without decoding it a second time.

        Only until the words of the changes are used up.
        """
        return _Replayed(delta, self.changes)


class _Replayed(DeltaSet):
    """A delta whose changes are known; whoever owns the delta closes it."""

    def __init__(self, delta: DeltaSet, changes: Sequence[ChunkChanges]) -> None:
        self.__dict__.update(vars(delta))
        self._changes = changes

    def changes(
        self, bases: Bases, *, only: Collection[str] | None = None, workers: int = 1
    ) -> Iterator[ChunkChanges]:
        """As :meth:`DeltaSet.changes`; nothing is left for threads to do."""
        self.check_bases(bases)
        for change in self._changes:
            if only is None or change.name in only:
                yield change


def writes_for(bound: Bound, decoded: Decoded, *, swaps_on_host: bool = True) -> Writes:
    """What is to be written where.

    Raises:
        TensorMismatch: Tensors that share memory in the module change differently.
    """
    dtypes = {name: published.dtype for name, published in decoded.tensors.items()}
    changes = decoded.changes
    if bound.equal:
        _check_equal(bound, changes, decoded.whole)
        changes = [change for change in changes if change.name not in bound.equal]
    writes, word_count = prepare_changes(bound, dtypes, changes, swaps_on_host=swaps_on_host)
    for name, tensor in decoded.whole.items():
        if name not in bound.equal:
            writes.append(DenseWrite(bound, name, tensor))
    return Writes(writes, word_count)


def loads_for(load: Load, decoded: Decoded, base: Checkpoint) -> Writes:
    """What a loader is to be given: whole tensors in which something changes."""
    new = _Changed(base.tensors, decoded.changes, decoded.whole)
    old = {name: base.tensors[name] for name in new if name in base.tensors}
    return Writes([LoaderWrite(load, old, new)] if new else [], 0)


def published_of(tensors: Tensors) -> dict[str, Published]:
    """What tensors are."""
    return {name: Published(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def aliases_in(
    files: Mapping[str, SafetensorsFile], tensors: Mapping[str, Published]
) -> dict[str, str]:
    """Names that are tied, each to the one that is published: what headers say besides."""
    return {
        alias: kept
        for file in files.values()
        for alias, kept in file.metadata.items()
        if kept in tensors and alias not in tensors
    }


def check_same(bound: Bound, tensors: Tensors) -> None:
    """Raise TensorMismatch unless tensors that share memory in the module are equal."""
    for other, kept in bound.equal.items():
        if not np.array_equal(tensors[other].data, tensors[kept].data):
            raise _untied(other, kept)


class _Changed(Mapping[str, StoredTensor]):
    """Whole tensors as changes make them, each made when it is asked for."""

    def __init__(self, base: Tensors, changes: Sequence[ChunkChanges], whole: Tensors) -> None:
        self._base = base
        self._whole = whole
        self._changes: dict[str, list[ChunkChanges]] = {name: [] for name in whole}
        for change in changes:
            self._changes.setdefault(change.name, []).append(change)

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def __getitem__(self, name: str) -> StoredTensor:
        if name in self._whole:
            return self._whole[name]
        old = self._base[name]
        data = old.data.copy()
        for change in self._changes[name]:
            words = data.reshape(-1, change.word_bytes)[change.first_word :]
            words[change.positions] = change.words.reshape(-1, change.word_bytes)
        return old._replace(data=data)


def _check_equal(bound: Bound, changes: Sequence[ChunkChanges], whole: Tensors) -> None:
    """Tensors that share memory in the module must change alike."""
    found: dict[str, list[ChunkChanges]] = {}
    for change in changes:
        found.setdefault(change.name, []).append(change)
    for other, kept in bound.equal.items():
        one, two = whole.get(other), whole.get(kept)
        if one is not None or two is not None:
            is_alike = one is not None and two is not None and np.array_equal(one.data, two.data)
        else:
            is_alike = _joined(found.get(other, [])) == _joined(found.get(kept, []))
        if not is_alike:
            raise _untied(other, kept)


def _joined(changes: Sequence[ChunkChanges]) -> tuple[bytes, bytes]:
    """Positions and words of one tensor, however they are cut into chunks."""
    at = b"".join((c.positions.astype(np.int64) + c.first_word).tobytes() for c in changes)
    return at, b"".join(c.words.tobytes() for c in changes)


def _untied(other: str, kept: str) -> TensorMismatch:
    return TensorMismatch(
        f"{other!r} and {kept!r} share memory in the module and hold different weights in the "
        "stream",
        hint="Untie them in the module",
        tensor=other,
    )
