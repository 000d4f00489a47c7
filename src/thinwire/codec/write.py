"""Tensor pairs in, a container out: planned, then coded chunk by chunk on threads, in order."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from thinwire.codec import _native, zstd
from thinwire.codec.chunk import (
    MAX_TABLES,
    EncodedChunk,
    Spec,
    encode_chunk,
    encode_full_chunk,
)
from thinwire.codec.container import (
    TRAILER,
    Attachment,
    AttachmentRecord,
    GroupRecord,
    Index,
    TableRecord,
    TensorRecord,
    pack_head,
    pack_tables,
    unpack_table,
)
from thinwire.codec.digest import DIGEST_RUN_BYTES, combine, tensor_digest, xxh3_64
from thinwire.codec.dtypes import DType, byte_count, dtype_named
from thinwire.codec.plan import (
    Pair,
    Unit,
    check_pairs,
    coded_dtypes,
    kind_of,
    plan_units,
    unit_bytes,
)
from thinwire.codec.tables import fit_tables
from thinwire.codec.threads import map_in_order
from thinwire.errors import InvalidArgument

__all__ = [
    "Attachment",
    "CodedTensor",
    "DeltaSummary",
    "Facts",
    "Pair",
    "code_unit",
    "write_coded",
    "write_delta",
]


@dataclass(frozen=True, kw_only=True)
class DeltaSummary:
    """What was written.

    Attributes:
        file_bytes: Bytes of the whole container.
        raw_bytes: Bytes of the new tensors.
        changed_count: Changed words in tensors that both sides hold.
        tensor_count: Tensors in the index.
    """

    file_bytes: int
    raw_bytes: int
    changed_count: int
    tensor_count: int


class Facts(NamedTuple):
    """What coding a chunk, or a member of a group, found."""

    changed_count: int
    base_digest: int
    new_digest: int


class Coded(NamedTuple):
    """What became of a unit of work."""

    unit: Unit
    chunk: EncodedChunk
    members: Sequence[Facts]  # of the tensor, or of each in a group


def write_delta(
    out: BinaryIO,
    pairs: Iterable[Pair],
    attachments: Sequence[Attachment] = (),
    *,
    spec: Spec | None = None,
    workers: int = 1,
    spool_dir: str | os.PathLike[str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> DeltaSummary:
    """Write a container to ``out``, which is only appended to.

    The same pairs give the same bytes whatever ``workers`` and the processor are. Nobody may write
    to the arrays meanwhile. Memory beyond them is a few chunks per worker, and the sections, which
    wait because the index precedes them.

    Args:
        out: Where to write; never read or moved.
        pairs: Tensors in the order of the index.
        attachments: Small files, in order.
        spec: What to ask of the encoder.
        workers: Threads, at least 1.
        spool_dir: A folder where the sections wait in a temporary file; None: in memory.
        on_bytes: Called in order with the raw bytes of each piece of work done.

    Raises:
        InvalidArgument: Two tensors of one name, arrays that do not fit dtype and shape, or a
            setting out of range. Nothing was written.
        LimitExceeded: More than a reader would take; see :mod:`thinwire.codec.container`.
        OSError: ``out`` or the temporary file cannot be written.
    """
    spec = _checked_spec(spec or Spec())
    pairs = list(pairs)
    check_pairs(pairs)
    with _spool(spool_dir) as spool:
        index, found = _code_tensors(pairs, spool, spec, workers, on_bytes)
        digests: list[int] = []
        for pair, record in zip(pairs, index.tensors, strict=True):
            digests += _settle(pair, record, found[pair.name])
        raw_bytes = sum(pair.new.size for pair in pairs if pair.new is not None)
        return _finish(out, index, digests, attachments, spool, spec, raw_bytes)


class CodedTensor(NamedTuple):
    """A tensor in base and new whose chunks were coded elsewhere.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
        facts: What coding each chunk found; a member of a group has one entry, whose digests are
            those of the tensor.
        sections: The section of each chunk, drawn when it is written; of a member of a group none.
        group: The number of its group; None: it has chunks of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    facts: Sequence[Facts]
    sections: Iterable[bytes]
    group: int | None


class SameTensor(NamedTuple):
    """A tensor that is equal in base and new; nothing of it travels but its digest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: int


def write_coded(
    out: BinaryIO,
    tensors: Sequence[CodedTensor | SameTensor],
    groups: Sequence[tuple[str, bytes]],
    tables: Sequence[TableRecord],
    attachments: Sequence[Attachment] = (),
    *,
    steps: np.ndarray,
    spec: Spec | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
) -> DeltaSummary:
    """As :func:`write_delta`, of tensors that were coded elsewhere, by :func:`code_unit`.

    Args:
        out: Where to write; never read or moved.
        tensors: In the order of the index.
        groups: Of each group of small tensors its dtype and its section.
        tables: The tables that the sections were coded with; what no section uses is left out.
        attachments: Small files, in order.
        steps: Changes down and up by octave of their size: int64 of shape (2, 64).
        spec: What was asked of the encoder.
        spool_dir: A folder where the sections wait in a temporary file; None: in memory.

    Raises:
        LimitExceeded: More than a reader would take; see :mod:`thinwire.codec.container`.
        OSError: ``out`` or the temporary file cannot be written.
    """
    index = Index([])
    digests: list[int] = []
    class_coded: set[str] = set()
    raw_bytes = 0
    with _spool(spool_dir) as spool:
        for tensor in tensors:
            record = TensorRecord(tensor.name, tensor.dtype, list(tensor.shape))
            index.tensors.append(record)
            raw_bytes += byte_count(tensor.dtype, tensor.shape)
            if isinstance(tensor, SameTensor):
                record.kind = "same"
                digests.append(tensor.digest)
                continue
            record.group = tensor.group
            is_changed = any(found.changed_count for found in tensor.facts)
            for section in tensor.sections if tensor.group is None and is_changed else ():
                _put_section(spool, section, tensor.dtype, class_coded)
                record.sizes.append(len(section))
            digests += _settle_both(record, tensor.facts)
        for dtype, section in groups:
            _put_section(spool, section, dtype, class_coded)
            index.groups.append(GroupRecord(dtype, len(section)))
        index.tables = [table for table in tables if table.dtype in class_coded]
        if steps.any():
            index.steps = _plain_steps(steps)
        return _finish(out, index, digests, attachments, spool, spec or Spec(), raw_bytes)


def _put_section(spool: BinaryIO, section: bytes, dtype: str, class_coded: set[str]) -> None:
    """Write a section, and note the dtypes whose tables some section uses."""
    spool.write(section)
    if section and section[0] < MAX_TABLES:
        class_coded.add(dtype)


def _finish(
    out: BinaryIO,
    index: Index,
    digests: list[int],
    attachments: Sequence[Attachment],
    spool: BinaryIO,
    spec: Spec,
    raw_bytes: int,
) -> DeltaSummary:
    """Add the attachments behind the tensors' sections, and write all of it to ``out``."""
    for attachment in attachments:
        stored = None
        if attachment.data is not None:
            packed = zstd.compress(attachment.data, max(spec.zstd_level, 9))
            stored = len(packed)
            spool.write(packed)
        index.attachments.append(
            AttachmentRecord(attachment.name, attachment.kind, attachment.size, stored)
        )
        digests.append(attachment.digest)
    section_bytes = spool.tell()
    head = pack_head(index, digests, section_bytes)
    _assemble(out, head, spool)
    return DeltaSummary(
        file_bytes=len(head) + section_bytes + TRAILER.size,
        raw_bytes=raw_bytes,
        changed_count=sum(record.changed for record in index.tensors),
        tensor_count=len(index.tensors),
    )


def _spool(folder: str | os.PathLike[str] | None) -> BinaryIO:
    if folder is None:
        return io.BytesIO()
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


def _code_tensors(
    pairs: Sequence[Pair],
    spool: BinaryIO,
    spec: Spec,
    workers: int,
    on_bytes: Callable[[int], None] | None,
) -> tuple[Index, dict[str, list[Facts]]]:
    """Write the sections of all tensors to ``spool``; returns their index and what was found."""
    records = [TensorRecord(p.name, p.dtype, list(p.shape), kind=kind_of(p)) for p in pairs]
    record_of = {record.name: record for record in records}
    dtypes = coded_dtypes(pairs)
    index = Index(records)
    index.tables = [unpack_table(name, t) for name in dtypes for t in fit_tables(name, pairs)]
    tables = {name: pack_tables(index, name) for name in dtypes}
    single, groups = plan_units(pairs)
    index.groups = [GroupRecord(group[0].dtype) for group in groups]
    for number, group in enumerate(groups):
        for pair in group:
            record_of[pair.name].group = number

    def code(unit: Unit) -> Coded:
        return code_unit(unit, tables.get(unit.pairs[0].dtype, b""), spec)

    steps = np.zeros((2, 64), np.int64)
    found: dict[str, list[Facts]] = {record.name: [] for record in records}
    class_coded: set[str] = set()  # dtypes whose tables some chunk uses
    units = [*single, *(Unit(group, 0, 0) for group in groups)]
    for number, coded in enumerate(map_in_order(code, units, workers)):
        data = coded.chunk.data
        _put_section(spool, data, coded.unit.pairs[0].dtype, class_coded)
        for row, counts in zip(steps, coded.chunk.steps, strict=True):
            row[: len(counts)] += np.asarray(counts, np.int64)
        if number < len(single):
            record_of[coded.unit.pairs[0].name].sizes.append(len(data))
        else:
            index.groups[number - len(single)].size = len(data)
        for pair, facts in zip(coded.unit.pairs, coded.members, strict=True):
            found[pair.name].append(facts)
        if on_bytes:
            on_bytes(unit_bytes(coded.unit))
    index.tables = [table for table in index.tables if table.dtype in class_coded]
    if steps.any():
        index.steps = _plain_steps(steps)
    return index, found


def _plain_steps(steps: np.ndarray) -> list[list[int]]:
    return [[int(n) for n in np.trim_zeros(row, "b")] for row in steps]


def _checked_spec(spec: Spec) -> Spec:
    if not 1 <= spec.zstd_level <= 19:
        raise InvalidArgument(f"zstd_level is {spec.zstd_level}", hint="Choose 1 to 19")
    if spec.instructions not in ("", *_native.instruction_sets()):
        raise InvalidArgument(
            f"instructions {spec.instructions!r} do not run here",
            hint=f"Choose one of {', '.join(_native.instruction_sets())}",
        )
    return spec


def code_unit(unit: Unit, tables: bytes, spec: Spec) -> Coded:
    """Code a chunk of a tensor, or a group of small ones, with the packed tables of its dtype."""
    row = dtype_named(unit.pairs[0].dtype)
    if unit.end == 0:
        return _code_group(unit, row, tables, spec)
    pair = unit.pairs[0]
    assert pair.new is not None
    new = pair.new[unit.start : unit.end]
    if pair.base is None:
        data, digest = encode_full_chunk(row, new, spec)
        return Coded(unit, EncodedChunk(data, 0, 0, digest, ((), ())), [Facts(0, 0, digest)])
    chunk = encode_chunk(row, tables, pair.base[unit.start : unit.end], new, spec)
    return Coded(unit, chunk, [Facts(chunk.changed_count, chunk.base_digest, chunk.new_digest)])


def _code_group(unit: Unit, row: DType, tables: bytes, spec: Spec) -> Coded:
    bases = [pair.base for pair in unit.pairs if pair.base is not None]
    news = [pair.new for pair in unit.pairs if pair.new is not None]
    base, new = np.concatenate(bases), np.concatenate(news)
    chunk = encode_chunk(row, tables, base, new, spec)
    differs = (base != new).reshape(-1, row.word_bytes).any(axis=1)
    changed_before = np.concatenate([[0], np.cumsum(differs)])
    ends = np.cumsum([array.size // row.word_bytes for array in news])
    starts = np.concatenate([[0], ends[:-1]])
    changed = changed_before[ends] - changed_before[starts]
    members = []
    for pair, old, now, count in zip(unit.pairs, bases, news, changed, strict=True):
        base_digest = tensor_digest(pair.dtype, old)
        new_digest = tensor_digest(pair.dtype, now) if count else base_digest
        members.append(Facts(int(count), base_digest, new_digest))
    return Coded(unit, chunk, members)


def _settle(pair: Pair, record: TensorRecord, facts: Sequence[Facts]) -> list[int]:
    """Write what the chunks of a tensor found into its record; returns its digests."""
    if pair.new is None:
        assert pair.base is not None
        return [tensor_digest(pair.dtype, pair.base)]
    if pair.base is None:
        return [combine(new for _, _, new in facts)]
    return _settle_both(record, facts)


def _settle_both(record: TensorRecord, facts: Sequence[Facts]) -> list[int]:
    """Likewise of a tensor that is in base and new."""
    if record.group is not None:
        record.changed, base_digest, new_digest = facts[0]
    else:
        record.changed = sum(changed for changed, _, _ in facts)
        base_digest = combine(base for _, base, _ in facts)
        new_digest = combine(new for _, _, new in facts)
    if record.changed == 0:
        record.kind = "same"
        record.sizes = []
        return [base_digest]
    return [base_digest, new_digest]


def _assemble(out: BinaryIO, head: bytes, spool: BinaryIO) -> None:
    spool.seek(0)
    digests = []
    piece = head
    while piece:
        piece += spool.read(max(0, DIGEST_RUN_BYTES - len(piece)))
        out.write(piece[:DIGEST_RUN_BYTES])
        digests.append(xxh3_64(piece[:DIGEST_RUN_BYTES]))
        piece = piece[DIGEST_RUN_BYTES:] or spool.read(DIGEST_RUN_BYTES)
    out.write(TRAILER.pack(combine(digests)))
