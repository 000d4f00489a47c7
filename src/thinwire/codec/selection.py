"""Which bytes of a delta a reader of some of its tensors needs: decided from its head alone.

Who fetches a part of a delta reads the header first (``HEADER.size`` bytes), asks
:func:`head_bytes` how far the head reaches, parses it with :func:`parse_partial_head`, fetches what
:func:`needed_ranges` names into a sparse file of the delta's size, and opens that with
``Delta.open(path, only=names, check_trailer=False)``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from thinwire.codec.container import (
    HEADER,
    MAX_ATTACHMENTS,
    MAX_INDEX_BYTES,
    MAX_TENSORS,
    TRAILER,
    Head,
    Index,
    check_index_size,
    parse_head,
    section_sizes,
    unpack_header,
)
from thinwire.errors import Corrupt, LimitExceeded

ByteRange = tuple[int, int]  # half-open, in bytes of the file

# zstd adds less than this to what it cannot pack.
MAX_STORED_INDEX_BYTES = MAX_INDEX_BYTES + (MAX_INDEX_BYTES >> 7)
MAX_DIGEST_BYTES = 8 * (2 * MAX_TENSORS + MAX_ATTACHMENTS)
MAX_HEAD_BYTES = HEADER.size + MAX_STORED_INDEX_BYTES + MAX_DIGEST_BYTES


def head_bytes(first_bytes: bytes | bytearray | memoryview) -> int:
    """Bytes of header, index and digests, told from the first ``HEADER.size`` bytes of a delta.

    Never more than ``MAX_HEAD_BYTES``. The header's digest covers the whole head, so the number is
    not verified yet: :func:`parse_partial_head` does that.

    Raises:
        LimitExceeded: The index or the digests are larger than any that a reader takes.
        Corrupt: The head would be larger than the file, or the digests are not whole.
        Truncated, Unsupported, FormatError: As :func:`parse_head`.
    """
    header = unpack_header(memoryview(first_bytes).cast("B"))
    check_index_size(header.index_stored_bytes, header.index_plain_bytes)
    if header.index_stored_bytes > MAX_STORED_INDEX_BYTES:
        raise LimitExceeded(f"the index takes {header.index_stored_bytes} bytes")
    if header.digest_bytes > MAX_DIGEST_BYTES:
        raise LimitExceeded(f"the digests take {header.digest_bytes} bytes")
    if header.digest_bytes % 8:
        raise Corrupt("the digests are not whole")
    size_bytes = HEADER.size + header.index_stored_bytes + header.digest_bytes
    if size_bytes + TRAILER.size > header.file_bytes:
        raise Corrupt(
            f"the head of the delta takes {size_bytes} bytes of {header.file_bytes}",
            hint="Fetch the delta again",
        )
    return size_bytes


def parse_partial_head(data: bytes | bytearray | memoryview, file_bytes: int | None = None) -> Head:
    """Check and read the head of a delta of which only the first bytes are there.

    Args:
        data: At least the first :func:`head_bytes` bytes.
        file_bytes: The size of the whole file where it is known; None: as the header says.

    Raises:
        Truncated: ``data`` end before the head does, or the file is shorter than its header says.
        FormatError: As :func:`parse_head`.
    """
    view = memoryview(data).cast("B")
    return parse_head(view, unpack_header(view).file_bytes if file_bytes is None else file_bytes)


def closure(index: Index, only: Collection[str]) -> frozenset[str]:
    """The tensors that are decoded when those of ``only`` are: a group is decoded as a whole.

    Names that the delta does not have are ignored.
    """
    wanted = frozenset(only)
    groups = {tensor.group for tensor in index.tensors if tensor.name in wanted} - {None}
    return frozenset(
        tensor.name
        for tensor in index.tensors
        if tensor.name in wanted or (tensor.group is not None and tensor.group in groups)
    )


def needed_ranges(head: Head, only: Collection[str]) -> tuple[frozenset[str], list[ByteRange]]:
    """What to fetch in order to decode the tensors ``only``.

    Returns:
        The tensors that will be decoded (see :func:`closure`), and the bytes that takes: the head,
        the sections of these tensors and of all carried attachments, as half-open ranges of the
        file that rise and do not touch. The trailer is not among them.
    """
    names = closure(head.index, only)
    ranges: list[ByteRange] = [(0, head.sections_start)]
    start = head.sections_start
    for size, is_needed in zip(
        section_sizes(head.index), _section_flags(head.index, names), strict=True
    ):
        if is_needed and size:
            if ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], start + size)
            else:
                ranges.append((start, start + size))
        start += size
    return names, ranges


def _section_flags(index: Index, names: frozenset[str]) -> Iterator[bool]:
    """Whether each section is needed, in the order of :func:`section_sizes`."""
    groups = {tensor.group for tensor in index.tensors if tensor.name in names}
    for tensor in index.tensors:
        yield from (tensor.name in names for _ in tensor.sizes)
    yield from (number in groups for number in range(len(index.groups)))
    yield from (True for attachment in index.attachments if attachment.stored is not None)
