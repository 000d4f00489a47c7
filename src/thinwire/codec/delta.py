"""New tensors from base tensors and an opened container, verified."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from thinwire.codec import _native
from thinwire.codec.chunk import decode_changes, decode_chunk
from thinwire.codec.container import TensorRecord
from thinwire.codec.digest import combine, tensor_digest
from thinwire.codec.dtypes import dtype_named
from thinwire.codec.reader import DeltaReader, TensorEntry
from thinwire.codec.threads import map_in_order
from thinwire.errors import (
    BaseMismatch,
    ChecksumMismatch,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
)

__all__ = ["Bases", "ChunkChanges", "Delta", "TensorEntry", "apply_all", "changes_of_all"]

Bases = Mapping[str, np.ndarray]
OutFor = Callable[[TensorEntry], np.ndarray | None]
Unit = tuple[list[TensorRecord], int]  # a tensor's chunk by number, or a group and 0


class ChunkChanges(NamedTuple):
    """The changed words of one chunk of one tensor."""

    name: str
    first_word: int
    positions: np.ndarray  # uint32, rising, from first_word on
    words: np.ndarray  # uint8, word_bytes for each position
    word_bytes: int


class _Found(NamedTuple):
    """What a unit holds for one tensor; without a digest it could not be decoded."""

    delta: Delta
    record: TensorRecord
    chunk: int
    digest: int | None
    change: ChunkChanges | None


class Delta(DeltaReader):
    """An opened delta, ready to be applied.

    Bases are contiguous uint8 arrays by tensor name; they are only read. Methods may be called from
    several threads.
    """

    def apply(
        self,
        bases: Bases,
        out_for: OutFor,
        *,
        only: Collection[str] | None = None,
        workers: int = 1,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Write every new tensor, verified, into the uint8 array that ``out_for`` gives for it.

        The arrays may not overlap a base. For None the tensor is only verified. After an error the
        content of the arrays is undefined.

        Args:
            bases: The base of every tensor of kind "delta" or "same".
            out_for: Where a tensor goes; not asked about those that were removed.
            only: Leave out the tensors that are not among these; None: all.
            workers: Threads, at least 1.
            on_bytes: Called with the raw bytes of each piece of work done.

        Raises:
            BaseMismatch: A base holds other weights; names the tensor and both digests.
            TensorMismatch: A base is missing or has another size.
            FormatError: The container contradicts itself.
        """
        apply_all([self], bases, out_for, only=only, workers=workers, on_bytes=on_bytes)

    def changes(
        self, bases: Bases, *, only: Collection[str] | None = None, workers: int = 1
    ) -> Iterator[ChunkChanges]:
        """The changed words of all "delta" tensors, chunk by chunk; bases are untouched.

        A tensor is verified after its last chunk was yielded: act on nothing before the iterator
        has ended. With ``only``, tensors that are neither among these nor share a group with one
        of them are left out. ``workers`` threads decode; what they found waits for its turn, three
        chunks for each of them at most.

        Raises:
            As :meth:`apply`.
        """
        yield from changes_of_all([self], bases, only=only, workers=workers)

    def check_bases(self, bases: Bases) -> None:
        """Check that every base is there and has the right size; their bits are not looked at.

        Raises:
            TensorMismatch: A base is missing or has another size.
            InvalidArgument: A base is not a contiguous uint8 array.
        """
        for entry in self.tensors.values():
            self._check_base(entry, bases)

    def apply_in_place(self, bases: Bases) -> None:
        """Turn the bases into the new tensors, all or nothing: errors leave them as they were.

        Everything is decoded and verified first (that takes 6 bytes of memory a changed BF16
        weight), then written in one go that nothing interrupts. Readers may see old and new mixed
        while it lasts: keep them out.

        Raises:
            BaseMismatch, TensorMismatch, FormatError: As :meth:`apply`.
            InvalidArgument: A tensor is carried in full or was removed: it has no place.
        """
        for entry in self.tensors.values():
            if entry.kind in ("full", "removed"):
                raise InvalidArgument(
                    f"tensor {entry.name!r} is new or was removed: it cannot be changed in place",
                    hint="Use apply",
                    tensor=entry.name,
                )
            self._check_base(entry, bases)
            if not bases[entry.name].flags.writeable:
                raise InvalidArgument(f"the base of tensor {entry.name!r} is read-only")
        found = list(self.changes(bases))
        _native.swap_words(
            [
                (bases[c.name][c.first_word * c.word_bytes :], c.positions, c.words, c.word_bytes)
                for c in found
            ]
        )

    def _decode_span(
        self, record: TensorRecord, bases: Bases, span: slice, chunk: int, out: np.ndarray
    ) -> int | None:
        base = None if record.kind == "full" else bases[record.name][span]
        row = dtype_named(record.dtype)
        return decode_chunk(row, self._table(record.dtype), base, self._section(record, chunk), out)

    def _decode_group(
        self, members: Sequence[TensorRecord], bases: Bases, outs: Mapping[str, np.ndarray | None]
    ) -> list[tuple[str, int | None, int]]:
        row = dtype_named(members[0].dtype)
        base = np.concatenate([bases[record.name] for record in members])
        new = np.empty_like(base)
        section = self._section(members[0], 0)
        digest = decode_chunk(row, self._table(row.name), base, section, new)
        results: list[tuple[str, int | None, int]] = []
        start = 0
        for record in members:
            size = self.tensors[record.name].byte_count
            words = new[start : start + size]
            start += size
            out = outs.get(record.name)
            if out is not None:
                out[:] = words
            own = None if digest is None else tensor_digest(row.name, words)
            results.append((record.name, own, size))
        return results

    def _found_in(self, unit: Unit, bases: Bases) -> list[_Found]:
        """What changes in one unit; nothing where the tensor is carried in full."""
        members, chunk = unit
        record = members[0]
        if record.group is not None:
            return list(self._found_in_group(members, bases))
        if record.kind == "full":
            return []
        span = self._span(record, chunk)
        row = dtype_named(record.dtype)
        section = self._section(record, chunk)
        found = decode_changes(row, self._table(row.name), bases[record.name][span], section)
        if found is None:
            return [_Found(self, record, chunk, None, None)]
        positions, words, digest = found
        change = None
        if positions.size:
            first_word = span.start // row.word_bytes
            change = ChunkChanges(record.name, first_word, positions, words, row.word_bytes)
        return [_Found(self, record, chunk, digest, change)]

    def _found_in_group(self, members: Sequence[TensorRecord], bases: Bases) -> Iterator[_Found]:
        row = dtype_named(members[0].dtype)
        base = np.concatenate([bases[record.name] for record in members])
        found = decode_changes(row, self._table(row.name), base, self._section(members[0], 0))
        positions, words = found[:2] if found else (np.empty(0, "<u4"), np.empty(0, np.uint8))
        changed = words.reshape(-1, row.word_bytes)
        base.reshape(-1, row.word_bytes)[positions] = changed
        ends = np.cumsum([self.tensors[record.name].byte_count for record in members])
        starts = np.concatenate([[0], ends[:-1]])
        cuts = np.searchsorted(positions, np.concatenate([[0], ends // row.word_bytes]))
        for number, record in enumerate(members):
            new = base[starts[number] : ends[number]]
            digest = tensor_digest(row.name, new) if found else None
            own = slice(cuts[number], cuts[number + 1])
            change = None
            if own.start < own.stop:
                first_word = np.uint32(starts[number] // row.word_bytes)
                own_words = changed[own].reshape(-1)
                at = positions[own] - first_word
                change = ChunkChanges(record.name, 0, at, own_words, row.word_bytes)
            yield _Found(self, record, 0, digest, change)

    def _checked_out(self, entry: TensorEntry, out: np.ndarray | None) -> np.ndarray | None:
        if out is None:
            return None
        if not _is_plain(out) or not out.flags.writeable or out.size != entry.byte_count:
            raise InvalidArgument(
                f"tensor {entry.name!r}: out is not a writable, contiguous array of uint8 with "
                f"{entry.byte_count} bytes"
            )
        return out

    def _check_base(self, entry: TensorEntry, bases: Bases) -> None:
        if entry.kind not in ("delta", "same"):
            return
        base = bases.get(entry.name)
        if base is None:
            raise TensorMismatch(
                f"tensor {entry.name!r} is missing in the base",
                hint="Apply the delta to the checkpoint it was made from",
                tensor=entry.name,
            )
        if not _is_plain(base):
            raise InvalidArgument(
                f"the base of tensor {entry.name!r} is not a contiguous uint8 array"
            )
        if base.size != entry.byte_count:
            raise TensorMismatch(
                f"tensor {entry.name!r} has {base.size} bytes in the base; the delta was made from "
                f"{entry.dtype} of shape {list(entry.shape)}, {entry.byte_count} bytes",
                hint="Apply the delta to the checkpoint it was made from",
                tensor=entry.name,
            )

    def _matches(self, entry: TensorEntry, digests: Sequence[int | None]) -> bool:
        """Whether the digests of all its chunks give a tensor's new digest."""
        known = [digest for digest in digests if digest is not None]
        if len(known) < len(digests):
            return False
        # A tensor of a group comes with its own digest.
        return (known[0] if entry.group is not None else combine(known)) == entry.new_digest

    def _check_digests(
        self, entry: TensorEntry, digests: Sequence[int | None], bases: Bases
    ) -> None:
        if not self._matches(entry, digests):
            self._blame_bases(self._wrong_bytes(entry), bases)
            raise self._wrong_bytes(entry)

    def _wrong_bytes(self, entry: TensorEntry) -> ChecksumMismatch:
        return ChecksumMismatch(
            f"tensor {entry.name!r} does not decode to what its digest says, yet its base is right",
            hint="Fetch the delta again",
            tensor=entry.name,
        )

    def _blame_bases(self, error: ThinwireError, bases: Bases) -> None:
        """Raise BaseMismatch if a wrong base explains ``error``, which names its tensor.

        A group is decoded from the bases of all its members, so each of them is looked at.
        """
        entry = self.tensors.get(error.context.get("tensor", ""))
        if entry is None:
            suspects = list(self.tensors)
        elif entry.group is not None:
            suspects = [record.name for record in self._members[entry.group]]
        else:
            suspects = [entry.name]
        for name in suspects:
            expected = self.tensors[name].base_digest
            if expected is None or name not in bases:
                continue
            actual = tensor_digest(self.tensors[name].dtype, bases[name])
            if actual != expected:
                is_new = actual == self.tensors[name].new_digest
                raise BaseMismatch(
                    f"{f'tensor {name!r}' if name else 'the array'}: the base has digest "
                    f"{actual:016x}, the delta was made from {expected:016x}",
                    hint="That is what the delta makes of it: it was applied already, or base and "
                    "new were swapped when it was made; nothing was changed"
                    if is_new
                    else "Apply the delta to the checkpoint it was made from; nothing was changed",
                    tensor=name,
                    expected_digest=f"{expected:016x}",
                    actual_digest=f"{actual:016x}",
                ) from error


def apply_all(
    deltas: Sequence[Delta],
    bases: Bases,
    out_for: OutFor,
    *,
    only: Collection[str] | None = None,
    workers: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """As :meth:`Delta.apply`, of several deltas whose tensors are disjoint, on the same threads."""
    # All bases first: a hostile shape must not cost memory where no base has it.
    for delta in deltas:
        delta.check_bases(bases)
    runs = [_Run(delta, bases, out_for, only) for delta in deltas]
    tasks = [(run, unit) for run in runs for unit in run.units]
    for run, results in map_in_order(
        lambda task: (task[0], task[0].decode(task[1])), tasks, workers
    ):
        for name, digest, size in results:
            if run.settle(name, digest) and on_bytes:
                on_bytes(size)


def changes_of_all(
    deltas: Sequence[Delta],
    bases: Bases,
    *,
    only: Collection[str] | None = None,
    workers: int = 1,
) -> Iterator[ChunkChanges]:
    """As :meth:`Delta.changes`, of several deltas of disjoint tensors, on the same threads."""
    for delta in deltas:
        delta.check_bases(bases)
    tasks = ((delta, unit) for delta in deltas for unit in delta._units(only))
    digests: list[int | None] = []
    for results in map_in_order(lambda task: task[0]._found_in(task[1], bases), tasks, workers):
        for delta, record, chunk, digest, change in results:
            if chunk == 0:
                digests = []
            digests.append(digest)
            # One that is missing will not come right with those that follow.
            if digest is None or chunk + 1 == delta._chunk_count(record):
                delta._check_digests(delta.tensors[record.name], digests, bases)
            if change is not None:
                yield change


class _Run:
    """One delta being applied: where its tensors go, and the digests found so far."""

    def __init__(
        self, delta: Delta, bases: Bases, out_for: OutFor, only: Collection[str] | None
    ) -> None:
        self.units = list(delta._units(only))
        self._delta = delta
        self._bases = bases
        self._outs: dict[str, np.ndarray | None] = {}
        self._digests: dict[str, list[int | None]] = {}
        for entry in delta.tensors.values():
            if entry.kind != "removed" and (only is None or entry.name in only):
                self._outs[entry.name] = delta._checked_out(entry, out_for(entry))
                self._digests[entry.name] = []

    def decode(self, unit: Unit) -> list[tuple[str, int | None, int]]:
        """Write the tensors of one unit; returns their names, digests and sizes."""
        members, chunk = unit
        record = members[0]
        if record.group is not None:
            return self._delta._decode_group(members, self._bases, self._outs)
        span = self._delta._span(record, chunk)
        out = self._outs[record.name]
        target = np.empty(span.stop - span.start, np.uint8) if out is None else out[span]
        digest = self._delta._decode_span(record, self._bases, span, chunk, target)
        return [(record.name, digest, span.stop - span.start)]

    def settle(self, name: str, digest: int | None) -> bool:
        """Verify a tensor once its last chunk is there; False for one that was left out."""
        if name not in self._digests:
            return False
        digests = self._digests[name]
        digests.append(digest)
        if len(digests) == self._delta._chunk_count(self._delta._records[name]):
            self._delta._check_digests(self._delta.tensors[name], digests, self._bases)
        return True


def _is_plain(array: np.ndarray) -> bool:
    return array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous
