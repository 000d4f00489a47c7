"""Safetensors files: a strict header parser, a memory-mapped reader, and new headers.

The rules are those of the safetensors library, and stricter where the format's text is: the header
starts with ``{``, no key appears twice, and the tensors cover the data without holes or overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.checkpoint.disk import ByteArray, map_file
from thinwire.checkpoint.strict_json import parse_object
from thinwire.codec.dtypes import byte_count
from thinwire.errors import Corrupt, FormatError, InvalidArgument, LimitExceeded, Truncated

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_EXTENT = 1 << 63

# Readers map files: so the tensors of a new one begin at a multiple of this.
_ALIGNMENT = 8
_FETCH_AGAIN = "Fetch or write the file again"


class Span(NamedTuple):
    """Where a tensor lies: a half-open byte range counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
        bytes: Everything before the data, the 8-byte length included.
        metadata: The free-form ``__metadata__`` strings.
        spans: The tensors by name, in the order of their bytes.
        file_bytes: Size of the whole file.
    """

    bytes: bytes
    metadata: Mapping[str, str]
    spans: Mapping[str, Span]
    file_bytes: int


class StoredTensor(NamedTuple):
    """One tensor of a file: ``data`` is a read-only uint8 view of the mapped file."""

    dtype: str
    shape: tuple[int, ...]
    data: ByteArray


class SafetensorsFile:
    """A memory-mapped safetensors file; it stays mapped for as long as a view of it lives.

    Attributes:
        path: The file.
        header: Its parsed header.
        tensors: The tensors by name, in the order of their bytes.
    """

    def __init__(self, path: Path, header: Header, mapped: ByteArray) -> None:
        self.path = path
        self.header = header
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(span.dtype, span.shape, mapped[span.start : span.stop])
            for name, span in header.spans.items()
        }

    @classmethod
    def open(cls, path: Path | str) -> SafetensorsFile:
        """Map a file and check its whole header.

        Raises:
            FormatError: ``Truncated``, ``Corrupt``, ``Unsupported`` or ``LimitExceeded``; the
                message names the file and the tensor.
            StoreError: The file cannot be read.
        """
        path = Path(path)
        mapped = map_file(path)
        header = parse_header(_leading_header(mapped, path), path)
        if mapped.size < header.file_bytes:
            raise _truncated(path, header.file_bytes, mapped.size)
        if mapped.size > header.file_bytes:
            raise Corrupt(
                f"{path}: {mapped.size - header.file_bytes} bytes follow the last tensor",
                hint=_FETCH_AGAIN,
                file=str(path),
            )
        return cls(path, header, mapped)

    @property
    def header_bytes(self) -> bytes:
        """Everything before the data, the 8-byte length included."""
        return self.header.bytes

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free-form ``__metadata__`` strings."""
        return self.header.metadata


def parse_header(data: bytes, file: object) -> Header:
    """Parse everything before the tensors' bytes; ``file`` is its name for messages.

    Raises:
        FormatError: ``Truncated``, ``Corrupt``, ``Unsupported`` or ``LimitExceeded``.
    """
    text_bytes = _text_bytes(data[:LENGTH_BYTES], len(data), file)
    if len(data) != LENGTH_BYTES + text_bytes:
        raise _fault(file, f"{len(data)} header bytes where the length says {text_bytes} + 8")
    fields = _parse_json(data[LENGTH_BYTES:], file)
    metadata = _parse_metadata(fields.pop("__metadata__", None), file)
    spans = [(name, _parse_span(name, entry, len(data), file)) for name, entry in fields.items()]
    spans.sort(key=lambda item: (item[1].start, item[1].stop))
    stop = len(data)
    for name, span in spans:
        if span.start != stop:
            kind = "overlaps" if span.start < stop else "leaves a hole after"
            raise _fault(file, f"it {kind} the tensor before it", name)
        stop = span.stop
    return Header(data, metadata, dict(spans), stop)


def build_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str],
    file: object = "a new safetensors file",
) -> bytes:
    """Everything before the data of a new file whose tensors follow each other.

    Args:
        tensors: Name, dtype and shape of each.
        metadata: The free-form strings; none: the header does not mention any.
        file: Its name for messages.

    Raises:
        InvalidArgument: A name is not Unicode text, or two are the same.
        LimitExceeded: A reader takes no header of that size.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    stop = 0
    for name, dtype, shape in tensors:
        if name in fields or name == "__metadata__":
            raise InvalidArgument(
                f"{file}: two tensors are called {name[:200]!r}", hint="Write one"
            )
        start, stop = stop, stop + byte_count(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    try:
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        odd = error.object[: error.end].rpartition('"')[2][-200:]
        raise InvalidArgument(
            f"{file}: {odd!r} is not Unicode text", hint="Give it another name"
        ) from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise LimitExceeded(
            f"{file}: a header of {len(text)} bytes; readers take {MAX_HEADER_BYTES}",
            hint="Spread the tensors over more files",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def check_header_bytes(header_bytes: int, file: object) -> None:
    """Refuse a header, its 8-byte length included, that is beyond the limit.

    Raises:
        LimitExceeded: Its text has more than ``MAX_HEADER_BYTES``.
    """
    if header_bytes > LENGTH_BYTES + MAX_HEADER_BYTES:
        raise LimitExceeded(
            f"{file}: the header claims {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}",
            hint="Check that this is a safetensors file",
            file=str(file),
        )


def _leading_header(mapped: ByteArray, path: Path) -> bytes:
    prefix = mapped[:LENGTH_BYTES].tobytes()
    stop = LENGTH_BYTES + _text_bytes(prefix, mapped.size, path)
    if mapped.size < stop:
        raise _truncated(path, stop, mapped.size)
    return mapped[:stop].tobytes()


def _text_bytes(prefix: bytes, size: int, file: object) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise _truncated(file, LENGTH_BYTES, size)
    text_bytes = int.from_bytes(prefix, "little")
    check_header_bytes(LENGTH_BYTES + text_bytes, file)
    return text_bytes


def _parse_json(text: bytes, file: object) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise _fault(file, "the header does not start with '{'")
    try:
        return parse_object(text)
    except ValueError as error:
        raise _fault(file, f"the header is not JSON: {str(error)[:200]}") from None


def _parse_metadata(entry: Any, file: object) -> dict[str, str]:
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _fault(file, "__metadata__ is not a table of strings")
    return entry


def _parse_span(name: str, entry: Any, header_bytes: int, file: object) -> Span:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _fault(file, "the name is not Unicode text", name) from None
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _fault(file, "its entry lacks dtype, shape or data_offsets", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape):
        raise _fault(file, "its dtype or shape is malformed", name)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _fault(file, "its data_offsets are malformed", name)
    try:
        size_bytes = byte_count(dtype, shape)
    except FormatError as error:
        context = {**error.context, "file": str(file), "tensor": name}
        message = f"{file}: tensor {name[:200]!r}: {error.message}"
        raise type(error)(message, hint=error.hint or _FETCH_AGAIN, **context) from None
    if offsets[1] - offsets[0] != size_bytes:
        taken = offsets[1] - offsets[0]
        raise _fault(file, f"it takes {taken} bytes where {dtype} {shape} needs {size_bytes}", name)
    return Span(dtype, tuple(shape), header_bytes + offsets[0], header_bytes + offsets[1])


def _are_sizes(values: Any) -> bool:
    # type(), because True is an int to isinstance.
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < MAX_EXTENT for value in values
    )


def _truncated(file: object, expected_bytes: int, size_bytes: int) -> Truncated:
    return Truncated(
        f"{file}: ends after {size_bytes} bytes where {expected_bytes} are needed",
        hint=_FETCH_AGAIN,
        file=str(file),
        expected_bytes=expected_bytes,
        size_bytes=size_bytes,
    )


def _fault(file: object, reason: str, tensor: str | None = None) -> Corrupt:
    if tensor is None:
        return Corrupt(f"{file}: {reason}", hint=_FETCH_AGAIN, file=str(file))
    message = f"{file}: tensor {tensor[:200]!r}: {reason}"
    return Corrupt(message, hint=_FETCH_AGAIN, file=str(file), tensor=tensor)
