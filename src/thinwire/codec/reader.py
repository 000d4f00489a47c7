"""An opened container: what it holds and where, verified when it was opened."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from thinwire.codec import zstd
from thinwire.codec.chunk import method_name
from thinwire.codec.container import (
    TRAILER,
    Attachment,
    Head,
    Kind,
    TableRecord,
    TensorRecord,
    digests_of,
    group_members,
    pack_tables,
    parse_head,
    section_starts,
)
from thinwire.codec.digest import CHUNK_WORDS, EMPTY_DIGEST, file_digest, xxh3_64
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.codec.selection import closure
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    InvalidArgument,
    ThinwireError,
    from_os_error,
)


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a delta, as the index describes it.

    ``payload_bytes`` is that of its own sections; a tensor of a group has none (see ``group``).
    ``methods`` names how its chunks are coded.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    changed_count: int
    byte_count: int
    payload_bytes: int
    methods: tuple[str, ...]
    group: int | None
    base_digest: int | None
    new_digest: int | None


class DeltaReader:
    """A container whose head and trailer were verified when it was opened.

    Open with :meth:`open`, close with :meth:`close` or ``with``. ``tensors`` holds those that were
    asked for, in the order of the index.
    """

    def __init__(
        self,
        data: memoryview,
        source: str,
        only: Collection[str] | None = None,
        check_trailer: bool = True,
    ) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.source = source
        head = parse_head(data, len(data))
        self._identity = bytes(self._data[32:40]).hex()
        if check_trailer:
            body = self._data[: head.file_bytes - TRAILER.size]
            if file_digest(body) != TRAILER.unpack_from(data, body.size)[0]:
                raise ChecksumMismatch(
                    f"{source} is not what its trailer says", hint="Fetch the delta again"
                )
            self._identity += bytes(self._data[body.size :]).hex()
        self._index = head.index
        self._file_bytes = head.file_bytes
        self.version = head.version
        self._tables = {t.dtype: pack_tables(head.index, t.dtype) for t in head.index.tables}
        self._members = group_members(head.index)
        self._first_group_section = sum(len(record.sizes) for record in head.index.tensors)
        # Offsets only: an index may name millions of sections.
        self._starts = np.array(section_starts(head.index), np.int64) + head.sections_start
        names = None if only is None else closure(head.index, only)
        self._records = {
            record.name: record
            for record in head.index.tensors
            if names is None or record.name in names
        }
        self.tensors: dict[str, TensorEntry] = {}
        self._read_entries(head)
        self.attachments: list[Attachment] = []
        self._attachment_sections: dict[str, np.ndarray] = {}
        self._read_attachments(head)

    @classmethod
    def open(
        cls,
        source: bytes | bytearray | memoryview | os.PathLike[str] | str,
        *,
        only: Collection[str] | None = None,
        check_trailer: bool = True,
    ) -> Self:
        """Open a container in memory, or map a file.

        Args:
            source: The file, or its bytes.
            only: Read these tensors and those that share a group with one of them; names that the
                container lacks are ignored. None: all.
            check_trailer: Digest the whole file. False where the caller has verified the bytes
                otherwise, or holds a part of them: the file then has its full size, and only what
                :func:`thinwire.codec.selection.needed_ranges` names for ``only`` is ever read.

        Raises:
            FormatError: It is not a sound container; the kind says how.
            StoreError: The file cannot be read.
        """
        if isinstance(source, bytes | bytearray | memoryview):
            try:
                view = memoryview(source).cast("B")
            except TypeError as error:
                raise InvalidArgument(f"the payload is not contiguous: {error}") from None
            return cls(view, "the delta", only, check_trailer)
        path = Path(source)
        try:
            with path.open("rb") as file:
                empty = os.fstat(file.fileno()).st_size == 0
                mapped = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise from_os_error(error, "cannot read", path) from error
        try:
            view = memoryview(b"" if mapped is None else mapped)
            delta = cls(view, str(path), only, check_trailer)
        except ThinwireError as error:
            error.context.setdefault("path", str(path))
            error.args = (f"{path}: {error.message}",)
            error.message = error.args[0]
            raise
        return delta

    def close(self) -> None:
        """Let go of the data; the map of a file ends with its last reference."""
        self._data = np.empty(0, np.uint8)
        self._attachment_sections = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def identity(self) -> str:
        """The digests of head and file: two deltas with the same one have the same bytes.

        Without the check of the trailer, the digest of the head alone: that names every tensor's
        digests, so two deltas with the same one do the same.
        """
        return self._identity

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole container."""
        return self._file_bytes

    @property
    def steps(self) -> tuple[list[int], list[int]]:
        """Changes down and up by octave of their size in steps: 1, 2-3, 4-7, ..."""
        down, up = self._index.steps or ([], [])
        return list(down), list(up)

    @property
    def group_bytes(self) -> list[int]:
        """Payload bytes of each group of small tensors."""
        return [group.size for group in self._index.groups]

    def attachment_data(self, attachment: Attachment) -> bytes:
        """The bytes of an attachment that the container carries, verified.

        Raises:
            InvalidArgument: It is not carried; it equals the base's.
            ChecksumMismatch: The bytes are not what their digest says.
        """
        section = self._attachment_sections.get(attachment.name)
        if section is None:
            raise InvalidArgument(f"attachment {attachment.name!r} is not carried in the delta")
        what = f"attachment {attachment.name!r}"
        data = zstd.decompress(section.data, attachment.size, what)
        if xxh3_64(data) != attachment.digest:
            raise ChecksumMismatch(f"{what} is not what its digest says")
        return data

    def is_carried(self, attachment: Attachment) -> bool:
        """Whether the container holds the attachment's bytes; else it equals the base's file."""
        return attachment.name in self._attachment_sections

    def stored_bytes(self, attachment: Attachment) -> int | None:
        """Bytes that the attachment takes in the container; None where it is not carried."""
        section = self._attachment_sections.get(attachment.name)
        return None if section is None else section.size

    @property
    def tables(self) -> list[TableRecord]:
        """The rate tables, in order."""
        return list(self._index.tables)

    def _section_at(self, number: int) -> np.ndarray:
        start, end = self._starts[number : number + 2]
        return self._data[start:end]

    def _read_entries(self, head: Head) -> None:
        at = section = 0
        self._first_section: dict[str, int] = {}
        for record in head.index.tensors:
            digests = head.digests[at : at + digests_of(record.kind)]
            at += len(digests)
            size = byte_count(record.dtype, record.shape)
            # Without a chunk nothing else would look at them.
            has_chunk = size > 0 or record.group is not None
            if not has_chunk and any(digest != EMPTY_DIGEST for digest in digests):
                raise Corrupt(f"tensor {record.name!r} is empty, but its digest is of something")
            self._first_section[record.name] = section
            section += len(record.sizes)
            if record.name not in self._records:
                continue
            if record.group is not None:
                methods = self._methods(range(1), first=self._group_section(record.group))
            else:
                sized = (number for number, size in enumerate(record.sizes) if size)
                methods = self._methods(sized, first=self._first_section[record.name])
            self.tensors[record.name] = TensorEntry(
                name=record.name,
                dtype=record.dtype,
                shape=tuple(record.shape),
                kind=record.kind,
                changed_count=record.changed,
                byte_count=size,
                payload_bytes=sum(record.sizes),
                methods=methods,
                group=record.group,
                base_digest=None if record.kind == "full" else digests[0],
                new_digest=None if record.kind == "removed" else digests[-1],
            )

    def _methods(self, numbers: Iterable[int], first: int) -> tuple[str, ...]:
        sections = (self._section_at(first + number) for number in numbers)
        return tuple(sorted({method_name(int(data[0])) for data in sections if data.size}))

    def _read_attachments(self, head: Head) -> None:
        records = head.index.attachments
        digests = head.digests[len(head.digests) - len(records) :]
        carried = [record for record in records if record.stored is not None]
        first = len(self._starts) - 1 - len(carried)
        for number, record in enumerate(carried, first):
            self._attachment_sections[record.name] = self._section_at(number)
        self.attachments = [
            Attachment(record.name, record.kind, None, record.size, digest)
            for record, digest in zip(records, digests, strict=True)
        ]

    def _units(
        self, only: Collection[str] | None = None
    ) -> Iterator[tuple[list[TensorRecord], int]]:
        """What is decoded as one, of all tensors or as far as those of ``only`` need it."""
        for record in self._records.values():
            if record.group is None and record.kind != "removed":
                if only is not None and record.name not in only:
                    continue
                for chunk in range(self._chunk_count(record)):
                    yield [record], chunk
        for members in self._members:
            # All of its members are in the records, or none.
            if not members or members[0].name not in self._records:
                continue
            if only is None or any(record.name in only for record in members):
                yield members, 0

    def _chunk_count(self, record: TensorRecord) -> int:
        """Of a tensor that stands alone; 0 for an empty one, and 1 for a member of a group."""
        if record.group is not None:
            return 1
        return -(-self.tensors[record.name].byte_count // self._chunk_bytes(record.dtype))

    def _chunk_bytes(self, dtype: str) -> int:
        return CHUNK_WORDS * dtype_named(dtype).word_bytes

    def _span(self, record: TensorRecord, chunk: int) -> slice:
        chunk_bytes = self._chunk_bytes(record.dtype)
        size = self.tensors[record.name].byte_count
        return slice(chunk * chunk_bytes, min(size, (chunk + 1) * chunk_bytes))

    def _group_section(self, group: int) -> int:
        return self._first_group_section + group

    def _section(self, record: TensorRecord, chunk: int) -> np.ndarray:
        if record.group is not None:
            return self._section_at(self._group_section(record.group))
        if not record.sizes:  # an empty tensor
            return np.empty(0, np.uint8)
        return self._section_at(self._first_section[record.name] + chunk)

    def _table(self, dtype: str) -> bytes:
        return self._tables.get(dtype, b"")
