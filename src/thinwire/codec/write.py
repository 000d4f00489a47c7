"""Tensor pairs in, a container out: planned, then coded chunk by chunk on threads, in order."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, TypeVar, cast

import numpy as np

from thinwire.codec import _native, zstd
from thinwire.codec.chunk import (
    MAX_TABLES,
    TABLE_BYTES,
    EncodedChunk,
    Spec,
    aligned,
    encode_chunk,
    encode_full_chunk,
    native_codec,
)
from thinwire.codec.container import (
    MAX_NAME_BYTES,
    TRAILER,
    AttachmentRecord,
    GroupRecord,
    Index,
    Kind,
    TensorRecord,
    pack_head,
    pack_tables,
    unpack_table,
)
from thinwire.codec.digest import (
    CHUNK_WORDS,
    DIGEST_RUN_BYTES,
    combine,
    tensor_digest,
    xxh3_64,
)
from thinwire.codec.dtypes import DType, byte_count, dtype_named
from thinwire.errors import InvalidArgument, TensorMismatch

# Tensors below this share a chunk: on its own, each would pay for the end of a range coder.
SMALL_WORDS = 1 << 16
GROUP_WORDS = 1 << 18
# Words looked at to fit the rate tables of a dtype, spread evenly over all tensors.
SAMPLE_WORDS = 1 << 20
SAMPLE_SOURCES = 64
_RUN_WORDS = 1 << 10
_SPOOL_BYTES = 32 << 20

_T = TypeVar("_T")
_R = TypeVar("_R")


class Pair(NamedTuple):
    """One tensor of base and new checkpoint: contiguous uint8 arrays, None where it is absent.

    With both, dtype and shape hold for both. Without a base the tensor is carried in full, without
    a new one it is recorded as removed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    base: np.ndarray | None
    new: np.ndarray | None


class Attachment(NamedTuple):
    """A small file that travels with the tensors; ``data`` None: equal to the base's file."""

    name: str
    kind: str
    data: bytes | None
    size: int
    digest: int


class DeltaSummary(NamedTuple):
    """What was written."""

    file_bytes: int
    raw_bytes: int  # of the new tensors
    changed_count: int  # words, in tensors that both sides hold
    tensor_count: int


class _Unit(NamedTuple):
    """What one task codes: a chunk of a large tensor, or a group of small ones."""

    pairs: Sequence[Pair]
    start: int  # bytes, in a large tensor
    end: int


class _Coded(NamedTuple):
    unit: _Unit
    chunk: EncodedChunk
    members: Sequence[tuple[int, int, int]]  # changed, base digest, new digest of each in a group


def write_delta(
    out: BinaryIO,
    pairs: Iterable[Pair],
    attachments: Sequence[Attachment] = (),
    *,
    spec: Spec | None = None,
    workers: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> DeltaSummary:
    """Write a container to ``out``, which is only appended to.

    The same pairs give the same bytes whatever ``workers`` and the processor are. Memory beyond the
    arrays is a few chunks per worker; sections wait in a temporary file, since the index precedes
    them.

    Args:
        out: Where to write; never read or moved.
        pairs: Tensors in the order of the index.
        attachments: Small files, in order.
        spec: What to ask of the encoder.
        workers: Threads, at least 1.
        on_bytes: Called in order with the raw bytes of each piece of work done.

    Raises:
        InvalidArgument: Two tensors of one name, arrays that do not fit dtype and shape, or a
            setting out of range. Nothing was written.
    """
    spec = _checked_spec(spec or Spec())
    pairs = list(pairs)
    _check_pairs(pairs)
    records = [TensorRecord(p.name, p.dtype, list(p.shape), kind=_kind(p)) for p in pairs]
    record_of = {record.name: record for record in records}
    index = Index(records)
    index.tables = [
        unpack_table(name, packed)
        for name in _coded_dtypes(pairs)
        for packed in fit_tables(name, pairs)
    ]
    tables = {name: pack_tables(index, name) for name in _coded_dtypes(pairs)}
    single, groups = _plan(pairs)
    index.groups = [GroupRecord(group[0].dtype) for group in groups]
    for number, group in enumerate(groups):
        for pair in group:
            record_of[pair.name].group = number

    def code(unit: _Unit) -> _Coded:
        return _code_unit(unit, tables.get(unit.pairs[0].dtype, b""), spec)

    down, up = np.zeros(64, np.int64), np.zeros(64, np.int64)
    found: dict[str, list[tuple[int, int, int]]] = {record.name: [] for record in records}
    class_coded: set[str] = set()  # dtypes whose tables some chunk uses
    units = [*single, *(_Unit(group, 0, 0) for group in groups)]
    with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        for number, coded in enumerate(map_in_order(code, units, workers)):
            spool.write(coded.chunk.data)
            if coded.chunk.data and coded.chunk.data[0] < MAX_TABLES:
                class_coded.add(coded.unit.pairs[0].dtype)
            down[: len(coded.chunk.steps[0])] += np.asarray(coded.chunk.steps[0], np.int64)
            up[: len(coded.chunk.steps[1])] += np.asarray(coded.chunk.steps[1], np.int64)
            if number < len(single):
                record_of[coded.unit.pairs[0].name].sizes.append(len(coded.chunk.data))
            else:
                index.groups[number - len(single)].size = len(coded.chunk.data)
            for pair, facts in zip(coded.unit.pairs, coded.members, strict=True):
                found[pair.name].append(facts)
            if on_bytes:
                on_bytes(_unit_bytes(coded.unit))
        digests: list[int] = []
        for pair, record in zip(pairs, records, strict=True):
            digests += _settle(pair, record, found[pair.name])
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
        index.tables = [table for table in index.tables if table.dtype in class_coded]
        if down.any() or up.any():
            index.steps = [_trimmed(down), _trimmed(up)]
        section_bytes = spool.tell()
        head = pack_head(index, digests, section_bytes)
        _assemble(out, head, cast(BinaryIO, spool))
    return DeltaSummary(
        len(head) + section_bytes + TRAILER.size,
        sum(pair.new.size for pair in pairs if pair.new is not None),
        sum(record.changed for record in records),
        len(records),
    )


def fit_tables(dtype: str, pairs: Sequence[Pair]) -> list[bytes]:
    """Packed rate tables of one dtype, fitted to an even sample of about ``SAMPLE_WORDS`` words.

    The counts are kept apart for up to ``SAMPLE_SOURCES`` runs of neighbouring chunks, which may
    differ in scale.
    """
    row = dtype_named(dtype)
    both = [p for p in pairs if p.dtype == dtype and p.base is not None and p.new is not None]
    chunks = _sample_chunks(both, CHUNK_WORDS * row.word_bytes)
    total_words = sum(base.size for base, _ in chunks) // row.word_bytes
    stride = max(1, total_words // SAMPLE_WORDS)
    source_count = min(SAMPLE_SOURCES, len(chunks))
    counts = np.zeros((source_count, 3, row.field_mask + 1), np.uint64)
    codec = native_codec(row, b"")
    runs_before = 0
    for number, (base, new) in enumerate(chunks):
        source = number * source_count // len(chunks)
        first = -runs_before % stride
        codec.sample(aligned(row, base), aligned(row, new), first, stride, counts[source])
        runs_before += -(-base.size // (_RUN_WORDS * row.word_bytes))
    packed = bytes(_native.fit(counts, total_words))
    return [packed[at : at + TABLE_BYTES] for at in range(0, len(packed), TABLE_BYTES)]


def _sample_chunks(pairs: Sequence[Pair], chunk_bytes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Base and new of the chunks to sample: large tensors first, then all small ones."""
    ordered = sorted(pairs, key=lambda pair: _words(pair) < SMALL_WORDS)
    chunks = []
    for pair in ordered:
        assert pair.base is not None
        assert pair.new is not None
        for start in range(0, pair.base.size, chunk_bytes):
            end = start + chunk_bytes
            chunks.append((pair.base[start:end], pair.new[start:end]))
    return chunks


def map_in_order(function: Callable[[_T], _R], items: Sequence[_T], workers: int) -> Iterator[_R]:
    """Like ``map`` on ``workers`` threads with a bounded number of results waiting."""
    if workers < 1:
        raise InvalidArgument(f"workers is {workers}", hint="Choose 1 or more")
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[_R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _checked_spec(spec: Spec) -> Spec:
    if not 1 <= spec.zstd_level <= 19:
        raise InvalidArgument(f"zstd_level is {spec.zstd_level}", hint="Choose 1 to 19")
    if spec.instructions not in ("", *_native.instruction_sets()):
        raise InvalidArgument(
            f"instructions {spec.instructions!r} do not run here",
            hint=f"Choose one of {', '.join(_native.instruction_sets())}",
        )
    return spec


def _check_pairs(pairs: Sequence[Pair]) -> None:
    names: set[str] = set()
    for pair in pairs:
        if pair.name in names:
            raise InvalidArgument(f"two tensors are named {pair.name!r}")
        names.add(pair.name)
        if len(pair.name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
            raise InvalidArgument(f"a tensor's name is longer than {MAX_NAME_BYTES} bytes")
        expected = byte_count(pair.dtype, pair.shape)
        for side, array in (("base", pair.base), ("new", pair.new)):
            if array is not None and (array.dtype != np.uint8 or array.size != expected):
                raise TensorMismatch(
                    f"tensor {pair.name!r}: {side} has {array.size} bytes where {pair.dtype} of "
                    f"shape {list(pair.shape)} takes {expected}",
                    tensor=pair.name,
                )
        if pair.base is None and pair.new is None:
            raise InvalidArgument(f"tensor {pair.name!r} has neither base nor new")


def _kind(pair: Pair) -> Kind:
    if pair.new is None:
        return "removed"
    return "full" if pair.base is None else "delta"


def _words(pair: Pair) -> int:
    return byte_count(pair.dtype, pair.shape) // dtype_named(pair.dtype).word_bytes


def _coded_dtypes(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(p.dtype for p in pairs if _kind(p) == "delta"))


def _plan(pairs: Sequence[Pair]) -> tuple[list[_Unit], list[list[Pair]]]:
    """The chunks of tensors that stand alone, and the groups of small ones."""
    single: list[_Unit] = []
    groups: list[list[Pair]] = []
    open_groups: dict[str, tuple[list[Pair], int]] = {}
    for pair in pairs:
        if pair.new is None:
            continue
        words = _words(pair)
        if pair.base is not None and words < SMALL_WORDS:
            members, total = open_groups.get(pair.dtype, ([], 0))
            if not members:
                groups.append(members)
            members.append(pair)
            total += words
            open_groups[pair.dtype] = ([], 0) if total >= GROUP_WORDS else (members, total)
            continue
        chunk_bytes = CHUNK_WORDS * dtype_named(pair.dtype).word_bytes
        for start in range(0, pair.new.size, chunk_bytes):
            single.append(_Unit([pair], start, min(start + chunk_bytes, pair.new.size)))
    return single, groups


def _unit_bytes(unit: _Unit) -> int:
    if unit.end:
        return unit.end - unit.start
    return sum(pair.new.size for pair in unit.pairs if pair.new is not None)


def _code_unit(unit: _Unit, tables: bytes, spec: Spec) -> _Coded:
    row = dtype_named(unit.pairs[0].dtype)
    if unit.end == 0:
        return _code_group(unit, row, tables, spec)
    pair = unit.pairs[0]
    assert pair.new is not None
    new = pair.new[unit.start : unit.end]
    if pair.base is None:
        data, digest = encode_full_chunk(row, new, spec)
        return _Coded(unit, EncodedChunk(data, 0, 0, digest, ((), ())), [(0, 0, digest)])
    chunk = encode_chunk(row, tables, pair.base[unit.start : unit.end], new, spec)
    return _Coded(unit, chunk, [(chunk.changed_count, chunk.base_digest, chunk.new_digest)])


def _code_group(unit: _Unit, row: DType, tables: bytes, spec: Spec) -> _Coded:
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
        members.append((int(count), base_digest, new_digest))
    return _Coded(unit, chunk, members)


def _settle(pair: Pair, record: TensorRecord, facts: Sequence[tuple[int, int, int]]) -> list[int]:
    """Write what the chunks of a tensor found into its record; returns its digests."""
    if pair.new is None:
        assert pair.base is not None
        return [tensor_digest(pair.dtype, pair.base)]
    if record.group is not None:
        record.changed, base_digest, new_digest = facts[0]
    else:
        record.changed = sum(changed for changed, _, _ in facts)
        base_digest = combine(base for _, base, _ in facts)
        new_digest = combine(new for _, _, new in facts)
    if pair.base is None:
        return [new_digest]
    if record.changed == 0:
        record.kind = "same"
        record.sizes = []
        return [base_digest]
    return [base_digest, new_digest]


def _trimmed(counts: np.ndarray) -> list[int]:
    return [int(n) for n in np.trim_zeros(counts, "b")]


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
