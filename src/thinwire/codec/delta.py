"""New tensors from base tensors and an opened container, verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from thinwire.codec.chunk import decode_changes, decode_chunk, decode_in_place
from thinwire.codec.container import TensorRecord
from thinwire.codec.digest import combine, tensor_digest, xxh3_64
from thinwire.codec.dtypes import DType, dtype_named
from thinwire.codec.reader import DeltaReader, TensorEntry
from thinwire.codec.write import map_in_order
from thinwire.errors import (
    BaseMismatch,
    ChecksumMismatch,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
)

__all__ = ["Bases", "Changes", "Delta", "TensorEntry"]

Bases = Mapping[str, np.ndarray]


class Changes(NamedTuple):
    """The changed words of one chunk of one tensor."""

    name: str
    first_word: int
    positions: np.ndarray  # uint32, rising, from first_word on
    words: np.ndarray  # uint8, word_bytes for each position


class Delta(DeltaReader):
    """An opened delta, ready to be applied.

    Bases are contiguous uint8 arrays by tensor name; they are only read. Methods may be called from
    several threads.
    """

    def apply(
        self,
        bases: Bases,
        out_for: Callable[[TensorEntry], np.ndarray],
        *,
        workers: int = 1,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Write every new tensor, verified, into the uint8 array that ``out_for`` gives for it.

        The arrays may not overlap a base. After an error their content is undefined.

        Raises:
            BaseMismatch: A base holds other weights; names the tensor and both digests.
            TensorMismatch: A base is missing or has another size.
            FormatError: The container contradicts itself.
        """
        outs: dict[str, np.ndarray] = {}
        digests: dict[str, list[int | None]] = {}

        def work(unit: tuple[list[TensorRecord], int]) -> list[tuple[str, int | None, int]]:
            members, chunk = unit
            if len(members) == 1 and members[0].group is None:
                record = members[0]
                span = self._span(record, chunk)
                digest = self._decode_span(record, bases, span, chunk, outs[record.name][span])
                return [(record.name, digest, span.stop - span.start)]
            return self._decode_group(members, bases, outs)

        units = list(self._units())
        for entry in self.tensors.values():
            if entry.kind != "removed":
                outs[entry.name] = self._checked_out(entry, out_for(entry))
                digests[entry.name] = []
                self._check_base(entry, bases)
        for results in map_in_order(work, units, workers):
            for name, digest, size in results:
                digests[name].append(digest)
                entry = self.tensors[name]
                whole = -(-entry.byte_count // self._chunk_bytes(entry.dtype)) or 1
                if entry.group is not None or len(digests[name]) == whole:
                    self._check_digests(entry, digests.pop(name), bases)
                if on_bytes:
                    on_bytes(size)

    def changes(self, bases: Bases) -> Iterator[Changes]:
        """The changed words of all "delta" tensors, chunk by chunk; bases are untouched.

        A tensor is verified after its last chunk was yielded: act on nothing before the iterator
        has ended.

        Raises:
            As :meth:`apply`.
        """
        for entry in self.tensors.values():
            if entry.kind in ("delta", "same"):
                self._check_base(entry, bases)
        for members, chunk in self._units():
            if members[0].group is not None:
                yield from self._group_changes(members, bases)
                continue
            record = members[0]
            entry = self.tensors[record.name]
            if record.kind == "full":
                continue
            span = self._span(record, chunk)
            if record.kind == "same":
                if span.stop == entry.byte_count:
                    self._check_digests(entry, [None], bases)
                continue
            if chunk == 0:
                digests: list[int | None] = []
            base = bases[record.name][span]
            row = dtype_named(record.dtype)
            found = decode_changes(
                row, self._table(record.dtype), base, self._section(record, chunk)
            )
            digests.append(found[2] if found else None)
            if found is None or span.stop == entry.byte_count:
                self._check_digests(entry, digests, bases)
            if found is not None and found[0].size:
                first_word = span.start // row.word_bytes
                yield Changes(record.name, first_word, found[0], found[1])

    def apply_in_place(self, name: str, base: np.ndarray) -> None:
        """Turn the base of one "delta" or "same" tensor into the new tensor, all or nothing.

        Remembers what it overwrites (6 bytes a changed BF16 weight) until the digest was seen to
        match.

        Raises:
            BaseMismatch, FormatError: As :meth:`apply`; the base is as it was.
            InvalidArgument: The tensor lies in a group, or is carried in full.
        """
        entry, record = self.tensors[name], self._records[name]
        self._check_base(entry, {name: base})
        row = dtype_named(record.dtype)
        if record.kind == "same":
            self._check_digests(entry, [None], {name: base})
            return
        if record.kind != "delta" or (
            record.group is not None and len(self._members[record.group]) > 1
        ):
            raise InvalidArgument(f"tensor {name!r} cannot be changed in place on its own")
        undo: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        digests: list[int | None] = []
        try:
            for chunk in range(max(1, len(record.sizes))):
                span = self._span(record, chunk)
                words = base[span]
                section = self._section(record, chunk)
                positions, old, digest = decode_in_place(
                    row, self._table(record.dtype), words, section
                )
                undo.append((words, positions, old))
                digests.append(digest)
            if None in digests or combine(d for d in digests if d is not None) != entry.new_digest:
                raise ChecksumMismatch(f"tensor {name!r} did not decode to what its digest says")
        except ThinwireError:
            for words, positions, old in undo:
                words.reshape(-1, row.word_bytes)[positions] = old.reshape(-1, row.word_bytes)
            self._check_digests(entry, [None], {name: base})
            raise

    def _decode_span(
        self, record: TensorRecord, bases: Bases, span: slice, chunk: int, out: np.ndarray
    ) -> int | None:
        if span.stop == 0:
            return None if record.kind == "same" else xxh3_64(out)
        row = dtype_named(record.dtype)
        if record.kind == "same":
            return self._copy(row, bases[record.name][span], out)
        base = None if record.kind == "full" else bases[record.name][span]
        return decode_chunk(row, self._table(record.dtype), base, self._section(record, chunk), out)

    def _copy(self, row: DType, base: np.ndarray, out: np.ndarray) -> int | None:
        return decode_chunk(row, b"", base, np.empty(0, np.uint8), out)

    def _decode_group(
        self, members: Sequence[TensorRecord], bases: Bases, outs: Mapping[str, np.ndarray]
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
            outs[record.name][:] = new[start : start + size]
            start += size
            own = None if digest is None else tensor_digest(row.name, outs[record.name])
            results.append((record.name, own, size))
        return results

    def _group_changes(self, members: Sequence[TensorRecord], bases: Bases) -> Iterator[Changes]:
        outs = {record.name: np.empty_like(bases[record.name]) for record in members}
        for name, digest, _ in self._decode_group(members, bases, outs):
            self._check_digests(self.tensors[name], [digest], bases)
        word_bytes = dtype_named(members[0].dtype).word_bytes
        for name, new in outs.items():
            old_words, new_words = (a.reshape(-1, word_bytes) for a in (bases[name], new))
            positions = np.flatnonzero((old_words != new_words).any(axis=1)).astype("<u4")
            if positions.size:
                yield Changes(name, 0, positions, new_words[positions].reshape(-1))

    def _checked_out(self, entry: TensorEntry, out: np.ndarray) -> np.ndarray:
        if out.dtype != np.uint8 or out.size != entry.byte_count:
            raise InvalidArgument(
                f"tensor {entry.name!r}: out has {out.size} bytes where {entry.byte_count} belong"
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
        if base.size != entry.byte_count:
            raise TensorMismatch(
                f"tensor {entry.name!r} has {base.size} bytes in the base; the delta was made from "
                f"{entry.dtype} of shape {list(entry.shape)}, {entry.byte_count} bytes",
                hint="Apply the delta to the checkpoint it was made from",
                tensor=entry.name,
            )

    def _check_digests(
        self, entry: TensorEntry, digests: Sequence[int | None], bases: Bases
    ) -> None:
        """Raise unless the digests of a tensor's chunks give its new digest.

        ``[None]`` asks for the base's own digest: after a failure it tells a wrong base from
        wrong bytes.
        """
        known = [digest for digest in digests if digest is not None]
        if len(known) == len(digests) and self._combined(entry, known) == entry.new_digest:
            return
        if entry.base_digest is not None:
            actual = tensor_digest(entry.dtype, bases[entry.name])
            if actual != entry.base_digest:
                raise BaseMismatch(
                    f"tensor {entry.name!r}: the base has digest {actual:016x}, the delta was made "
                    f"from {entry.base_digest:016x}",
                    hint="Apply the delta to the checkpoint it was made from; nothing was changed",
                    tensor=entry.name,
                    expected_digest=f"{entry.base_digest:016x}",
                    actual_digest=f"{actual:016x}",
                )
            if entry.kind == "same" or list(digests) == [None]:
                return
        raise ChecksumMismatch(
            f"tensor {entry.name!r} does not decode to what its digest says, yet its base is right",
            hint="Fetch the delta again",
            tensor=entry.name,
        )

    def _combined(self, entry: TensorEntry, digests: Sequence[int]) -> int:
        # Tensors of a group, and empty ones, come with their own digest.
        if entry.group is not None:
            return digests[0]
        return combine(digests if entry.byte_count else ())
