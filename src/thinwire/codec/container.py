"""The container's head: header, index, digests. Bytes in, checked records out, no tensor touched.

Layout of a file (all numbers little-endian; docs/format.md is the full description)::

    header 40 bytes | index (zstd of JSON) | digests (8 bytes each) | sections | trailer 8 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from thinwire.codec import zstd
from thinwire.codec.chunk import MAX_TABLES, TABLE_BYTES
from thinwire.codec.digest import CHUNK_WORDS, xxh3_64
from thinwire.codec.dtypes import MAX_TENSOR_BYTES, byte_count, dtype_named
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    FormatError,
    LimitExceeded,
    Truncated,
    Unsupported,
)

MAGIC = b"\x89TWD\r\n\x1a\n"
VERSION = 1
HEADER = struct.Struct("<8sHHIIIQQ")
TRAILER = struct.Struct("<Q")
INDEX_LEVEL = 6

MAX_INDEX_BYTES = 1 << 26
# JSON of regular names packs well, but a bomb packs better; up to INDEX_FREE_BYTES nobody minds.
MAX_INDEX_RATIO = 300
INDEX_FREE_BYTES = 1 << 20
# Four million chunks are four trillion words.
MAX_SECTIONS = 1 << 22
MAX_GROUPS = 1 << 16
MAX_ATTACHMENTS = 1 << 16
# A zstd block of at most 2**17 bytes takes at least 4: no section can hold more than this.
MAX_SECTION_RATIO = 1 << 15
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 1 << 10
MAX_GROUP_WORDS = CHUNK_WORDS
MAX_ATTACHMENT_BYTES = 1 << 30

Kind = Literal["delta", "same", "full", "removed"]


class TensorRecord(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One tensor of the index.

    ``sizes``: bytes of each of its chunks of 2**20 words; a small tensor has none and lies in
    ``group``. ``changed``: changed words, known for "delta" only.
    """

    name: str
    dtype: str
    shape: list[int]
    kind: Kind = "delta"
    changed: int = 0
    sizes: list[int] = []
    group: int | None = None


class GroupRecord(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Small tensors of one dtype, coded as one chunk in the order of the index."""

    dtype: str
    size: int = 0


class TableRecord(msgspec.Struct, forbid_unknown_fields=True):
    """How often weights of each class change, and how often by one step."""

    dtype: str
    top: int
    rate: list[int]
    one: list[int]


class AttachmentRecord(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A small file beside the tensors; without ``stored`` it equals the base's."""

    name: str
    kind: str
    size: int
    stored: int | None = None


class Attachment(NamedTuple):
    """A small file that travels with the tensors; ``data`` None: equal to the base's file."""

    name: str
    kind: str
    data: bytes | None
    size: int
    digest: int


class Index(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Everything about a container but the digests and the sections."""

    tensors: list[TensorRecord]
    tables: list[TableRecord] = []
    groups: list[GroupRecord] = []
    attachments: list[AttachmentRecord] = []
    steps: list[list[int]] = []


@dataclass(frozen=True)
class Head:
    """A verified index with its digests and the place where the sections begin."""

    index: Index
    digests: list[int]
    sections_start: int
    file_bytes: int
    version: int


class Header(NamedTuple):
    """The fixed header's numbers, as they stand there."""

    index_stored_bytes: int
    index_plain_bytes: int
    digest_bytes: int
    file_bytes: int
    head_digest: int


def digests_of(kind: Kind) -> int:
    """How many digests a tensor of this kind has: base then new for "delta", else one."""
    return 2 if kind == "delta" else 1


def pack_head(index: Index, digests: list[int], section_bytes: int) -> bytes:
    """Header, index and digests of a file whose sections have ``section_bytes`` in all.

    Raises:
        FormatError: No reader would take it; the kind says why.
    """
    _check(index, len(digests), section_bytes)
    plain = msgspec.json.encode(index)
    stored = zstd.compress(plain, INDEX_LEVEL)
    check_index_size(len(stored), len(plain))
    packed_digests = np.array(digests, "<u8").tobytes()
    file_bytes = HEADER.size + len(stored) + len(packed_digests) + section_bytes + TRAILER.size
    fields = (MAGIC, VERSION, 0, len(stored), len(plain), len(packed_digests), file_bytes)
    body = stored + packed_digests
    digest = xxh3_64(HEADER.pack(*fields, 0)[: HEADER.size - 8] + body)
    return HEADER.pack(*fields, digest) + body


def unpack_header(data: memoryview) -> Header:
    """Read the fixed header at the start of ``data``; its numbers are checked by nobody yet.

    Raises:
        Truncated: The data end before the header does.
        Unsupported: Another version, or a flag this release does not know.
        FormatError: Not a thinwire delta.
    """
    if bytes(data[: len(MAGIC)]) != MAGIC[: min(len(data), len(MAGIC))]:
        raise FormatError(
            "this is not a thinwire delta: its first bytes are others",
            hint="Check the path; `thinwire inspect` reads .tw files only",
        )
    if len(data) < HEADER.size:
        raise _truncated(HEADER.size, len(data))
    _, version, flags, stored, plain, digest_bytes, file_bytes, digest = HEADER.unpack_from(data)
    if version != VERSION or flags != 0:
        raise Unsupported(
            f"format version {version}, flags {flags:#x}: this release reads version {VERSION} "
            "without flags",
            hint="Upgrade thinwire on the reading side",
            version=version,
            flags=flags,
        )
    return Header(stored, plain, digest_bytes, file_bytes, digest)


def parse_head(data: memoryview, available_bytes: int) -> Head:
    """Check and read the head of a container; ``data`` holds at least the head where it is whole.

    Raises:
        Truncated: The data end before the head, or ``available_bytes`` is less than the file names.
        ChecksumMismatch: Header, index or digests are not what their digest says.
        Unsupported: Another version, or a flag this release does not know.
        LimitExceeded: A size or count beyond the limits above.
        FormatError: Not a thinwire delta, or an index that contradicts itself.
    """
    stored, plain, digest_bytes, file_bytes, digest = unpack_header(data)
    sections_start = HEADER.size + stored + digest_bytes
    if available_bytes < file_bytes or len(data) < sections_start:
        raise _truncated(max(file_bytes, sections_start), available_bytes)
    if available_bytes > file_bytes:
        raise Corrupt(f"{available_bytes - file_bytes} bytes follow the end of the delta")
    body = data[HEADER.size : sections_start]
    if xxh3_64(bytes(data[: HEADER.size - 8]) + bytes(body)) != digest:
        raise ChecksumMismatch(
            "the head of the delta is not what its digest says", hint="Fetch the delta again"
        )
    check_index_size(stored, plain)
    if digest_bytes % 8:
        raise Corrupt("the digests are not whole")
    try:
        index = msgspec.json.decode(zstd.decompress(body[:stored], plain, "the index"), type=Index)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the index is malformed: {error}") from None
    digests = [int(value) for value in np.frombuffer(body[stored:], "<u8")]
    _check(index, len(digests), file_bytes - sections_start - TRAILER.size)
    return Head(index, digests, sections_start, file_bytes, VERSION)


def group_members(index: Index) -> list[list[TensorRecord]]:
    """The tensors of each group, in the order in which they are coded."""
    members: list[list[TensorRecord]] = [[] for _ in index.groups]
    for tensor in index.tensors:
        if tensor.group is not None:
            members[tensor.group].append(tensor)
    return members


def section_sizes(index: Index) -> Iterator[int]:
    """Bytes of each section in file order: chunks of the tensors, groups, attachments."""
    for tensor in index.tensors:
        yield from tensor.sizes
    yield from (group.size for group in index.groups)
    yield from (a.stored for a in index.attachments if a.stored is not None)


def section_starts(index: Index) -> list[int]:
    """Where each section begins, from the first on, with the end of the last one added."""
    return list(accumulate(section_sizes(index), initial=0))


def pack_tables(index: Index, dtype: str) -> bytes:
    """The tables of one dtype as the kernels take them."""
    return b"".join(
        struct.pack("<H", table.top) + bytes(table.rate) + bytes(table.one)
        for table in index.tables
        if table.dtype == dtype
    )


def unpack_table(dtype: str, packed: bytes) -> TableRecord:
    """A record of the table that ``fit`` returned."""
    rates, ones = packed[2:34], packed[34:TABLE_BYTES]
    return TableRecord(dtype, int.from_bytes(packed[:2], "little"), list(rates), list(ones))


def _truncated(expected: int, available: int) -> Truncated:
    return Truncated(
        f"the delta ends after {available} of at least {expected} bytes",
        hint="Fetch the delta again; a copy may still be running",
        expected_bytes=expected,
        available_bytes=available,
    )


def check_index_size(stored: int, plain: int) -> None:
    """Raise LimitExceeded where an index would unpack to more than a reader takes."""
    if plain > MAX_INDEX_BYTES or plain > INDEX_FREE_BYTES + stored * MAX_INDEX_RATIO:
        raise LimitExceeded(f"the index unpacks to {plain} bytes from {stored}")


def _check(index: Index, digest_count: int, section_bytes: int) -> None:
    if len(index.tensors) > MAX_TENSORS:
        raise LimitExceeded(f"{len(index.tensors)} tensors; the limit is {MAX_TENSORS}")
    if len(index.groups) > MAX_GROUPS or len(index.attachments) > MAX_ATTACHMENTS:
        raise LimitExceeded(f"{len(index.groups)} groups, {len(index.attachments)} attachments")
    if sum(len(tensor.sizes) for tensor in index.tensors) > MAX_SECTIONS:
        raise LimitExceeded(f"more than {MAX_SECTIONS} sections")
    names: set[str] = set()
    for tensor in index.tensors:
        _check_name(tensor.name, names)
        _check_tensor(tensor, len(index.groups))
    _check_tables(index)
    _check_groups(index)
    attachment_names: set[str] = set()
    for attachment in index.attachments:
        _check_name(attachment.name, attachment_names)
        limit = MAX_TENSOR_BYTES if attachment.stored is None else MAX_ATTACHMENT_BYTES
        if not 0 <= attachment.size <= limit or (attachment.stored or 0) < 0:
            raise LimitExceeded(f"attachment {attachment.name!r} names {attachment.size} bytes")
    wanted = sum(digests_of(tensor.kind) for tensor in index.tensors) + len(index.attachments)
    if wanted != digest_count:
        raise Corrupt(f"{digest_count} digests where {wanted} belong")
    rows = index.steps
    if len(rows) not in (0, 2) or any(len(row) > 64 or min(row, default=0) < 0 for row in rows):
        raise Corrupt("the step counts are malformed")
    total = section_starts(index)[-1]
    if total != section_bytes:
        raise Corrupt(f"the sections have {section_bytes} bytes where the index names {total}")


def _check_name(name: str, seen: set[str]) -> None:
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise LimitExceeded(f"a name is longer than {MAX_NAME_BYTES} bytes: {name[:60]!r}...")
    if name in seen:
        raise Corrupt(f"the name {name!r} stands twice in the index")
    seen.add(name)


def _check_tensor(tensor: TensorRecord, group_count: int) -> None:
    where = f"tensor {tensor.name!r}"
    size = byte_count(tensor.dtype, tensor.shape)
    words = size // dtype_named(tensor.dtype).word_bytes
    if tensor.changed < 0 or tensor.changed > words:
        raise Corrupt(f"{where} has {words} words and names {tensor.changed} changed")
    if any(size < 0 for size in tensor.sizes):
        raise Corrupt(f"{where} has a section of negative size")
    if tensor.group is not None:
        if (
            not 0 <= tensor.group < group_count
            or tensor.sizes
            or tensor.kind not in ("delta", "same")
        ):
            raise Corrupt(f"{where} lies in a group that cannot hold it")
        return
    carries = tensor.kind in ("delta", "full")
    if len(tensor.sizes) != (-(-words // CHUNK_WORDS) if carries else 0):
        raise Corrupt(f"{where} has {words} words in {len(tensor.sizes)} sections")
    if tensor.kind == "full" and 0 in tensor.sizes:
        raise Corrupt(f"{where} is carried in full with an empty section")
    if tensor.kind == "full" and size > sum(tensor.sizes) * MAX_SECTION_RATIO:
        raise LimitExceeded(f"{where} would unpack to {size} bytes from {sum(tensor.sizes)}")


def _check_tables(index: Index) -> None:
    counts: dict[str, int] = {}
    for table in index.tables:
        counts[table.dtype] = counts.get(table.dtype, 0) + 1
        if counts[table.dtype] > MAX_TABLES:
            raise LimitExceeded(f"more than {MAX_TABLES} tables for {table.dtype}")
        if not 0 <= table.top <= dtype_named(table.dtype).field_mask:
            raise Corrupt(f"a table for {table.dtype} begins at field {table.top}")
        for row in (table.rate, table.one):
            if len(row) != 32 or not all(0 <= value <= 255 for value in row):
                raise Corrupt(f"a table for {table.dtype} is malformed")


def _check_groups(index: Index) -> None:
    for number, (group, members) in enumerate(zip(index.groups, group_members(index), strict=True)):
        row = dtype_named(group.dtype)
        if group.size < 0 or any(tensor.dtype != group.dtype for tensor in members):
            raise Corrupt(f"group {number} is malformed")
        if sum(byte_count(t.dtype, t.shape) for t in members) > MAX_GROUP_WORDS * row.word_bytes:
            raise LimitExceeded(f"group {number} holds more than {MAX_GROUP_WORDS} words")
