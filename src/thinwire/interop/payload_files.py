"""Safetensors files of payloads, one per tensor: slime's, SkyRL's and Fireworks' deltas are made of
them. slime's and SkyRL's payloads are zstd frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.checkpoint.disk import ByteArray, map_file
from thinwire.checkpoint.safetensors_file import (
    LENGTH_BYTES,
    Header,
    SafetensorsFile,
    StoredTensor,
)
from thinwire.codec import zstd
from thinwire.errors import (
    Corrupt,
    FormatError,
    InvalidArgument,
    LimitExceeded,
    TensorMismatch,
)
from thinwire.interop.foreign import MAX_DESCRIPTION_BYTES, MAX_TENSORS, check_count, rule_broken
from thinwire.interop.weights_out import WeightsWriter, new_weights

MAX_FILES = 10_000
"""Files that one delta may have."""

MAX_FILE_BYTES = 1 << 30
"""After how many bytes of payloads a writer begins another file, unless told otherwise."""

LEVEL = 1
"""The zstd level of both systems."""

_SHOWN_CHARS = 200
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)


class PayloadFile(SafetensorsFile):
    """A file of payloads. It is mapped anew for each payload that is asked for.

    A mapping keeps a descriptor, and a process has about a thousand, while a delta may have
    ``MAX_FILES`` files.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self.tensors = _Payloads(path, header)

    @classmethod
    def open(cls, path: Path | str) -> PayloadFile:
        """Check a file's whole header; errors as :meth:`SafetensorsFile.open`."""
        return cls(Path(path), SafetensorsFile.open(path).header)

    def payload_bytes(self, name: str) -> int:
        """The size of a payload, by the header."""
        span = self.header.spans[name]
        return span.stop - span.start


class _Payloads(Mapping[str, StoredTensor]):
    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header

    def __getitem__(self, name: str) -> StoredTensor:
        span = self._header.spans[name]
        mapped = map_file(self._path)
        if mapped.size != self._header.file_bytes:
            raise Corrupt(
                f"{self._path}: it has {mapped.size} bytes now, and had {self._header.file_bytes}"
                " when it was opened",
                hint="Leave the files of a delta as they are while it is open",
                file=str(self._path),
                tensor=name,
            )
        return StoredTensor(span.dtype, span.shape, mapped[span.start : span.stop])

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.spans)

    def __len__(self) -> int:
        return len(self._header.spans)

    def __contains__(self, name: object) -> bool:
        return name in self._header.spans


def open_payloads(system: str, path: Path) -> PayloadFile:
    """Open a file all of whose tensors are payloads.

    Raises:
        FormatError: It is no safetensors file, or a tensor is not a list of bytes.
        StoreError: It cannot be read.
    """
    header_bytes = int.from_bytes(map_file(path)[:LENGTH_BYTES].tobytes(), "little")
    check_count(system, "bytes of header", header_bytes, MAX_DESCRIPTION_BYTES, path)
    try:
        file = PayloadFile.open(path)
    except FormatError as error:
        message = f"{error.message} ({system} format)"
        raise type(error)(message, hint=error.hint, **error.context, system=system) from None
    check_count(system, "tensors", len(file.tensors), MAX_TENSORS, path)
    for name, span in file.header.spans.items():
        if span.dtype != "U8" or len(span.shape) != 1:
            rule = f"its payload is {span.dtype} {list(span.shape)}, not a list of bytes (U8)"
            raise rule_broken(system, rule, file=path, tensor=name)
    return file


class PayloadFiles:
    """Payloads over as many files as the size limit asks for; made by :func:`new_payload_files`.

    Attributes:
        paths: The files so far, in order.
    """

    def __init__(self, path_of: Callable[[int], Path], max_file_bytes: int) -> None:
        self.paths: list[Path] = []
        self._path_of = path_of
        self._max_file_bytes = max_file_bytes
        self._open = ExitStack()
        self._writer: WeightsWriter | None = None

    def add(self, name: str, payload: bytes, checksum: str = "") -> int:
        """Append a payload; its checksum goes into the file's metadata. Returns its file's number.

        Raises:
            StoreError: The disk is full.
            LimitExceeded: It would need more files than a reader takes.
        """
        writer = self._writer
        if writer is None or writer.data_bytes + len(payload) > self._max_file_bytes:
            if len(self.paths) == MAX_FILES:
                raise LimitExceeded(
                    f"{self.paths[0].parent}: a delta of more than {MAX_FILES} files",
                    hint="Give a larger max_file_bytes",
                    limit=MAX_FILES,
                )
            self._open.close()
            self.paths.append(self._path_of(len(self.paths)))
            writer = self._writer = self._open.enter_context(new_weights(self.paths[-1]))
        writer.add_payload(name, payload, checksum)
        return len(self.paths) - 1


@contextmanager
def new_payload_files(
    path_of: Callable[[int], Path], max_file_bytes: int
) -> Iterator[PayloadFiles]:
    """New files at ``path_of(0)``, ``path_of(1)``, ...: whole once the block ends without error.

    Args:
        path_of: Where each is to be.
        max_file_bytes: A payload that would bring a file beyond this opens the next one. A larger
            payload has a file of its own.

    Raises:
        InvalidArgument: The limit is less than one byte.
        StoreError, LimitExceeded: A file cannot be written.
    """
    if max_file_bytes < 1:
        raise InvalidArgument(f"max_file_bytes is {max_file_bytes}", hint="Give at least 1")
    files = PayloadFiles(path_of, max_file_bytes)
    with files._open:
        yield files


def check_window(system: str, file: object, frame: ByteArray, name: str | None = None) -> None:
    """Say why a zstd frame was refused, if that is because of its window.

    A reader takes memory for all of the window before the first byte.

    Raises:
        LimitExceeded: The window is larger than any up to zstd's level 19.
    """
    head = frame[:6].tobytes()
    if head[:4] != _FRAME_MAGIC or len(head) < 6:
        return
    if _is_single_segment(head):
        window_bytes = declared_bytes(frame) or 0
    else:
        exponent, eighths = head[5] >> 3, head[5] & 7
        window_bytes = (1 << 10 + exponent) // 8 * (8 + eighths)
    limit = 1 << zstd.WINDOW_LOG_MAX
    if window_bytes > limit:
        raise rule_broken(
            system,
            f"its zstd frame has a window of {window_bytes} bytes; the limit is {limit}",
            file=file,
            tensor=name,
            error=LimitExceeded,
            hint="Have it written with zstd's level 19 or a lower one",
        )


def _is_single_segment(head: bytes) -> bool:
    return bool(head[4] >> 5 & 1)


def declared_bytes(frame: ByteArray) -> int | None:
    """How many bytes a zstd frame says that it unpacks to; None: it does not say, or is none."""
    head = frame[:18].tobytes()
    if head[:4] != _FRAME_MAGIC or len(head) < 6:
        return None
    descriptor, is_single_segment = head[4], _is_single_segment(head)
    # A frame of one segment has no byte for its window, and always says its size.
    start = 5 + (not is_single_segment) + _DICTIONARY_ID_BYTES[descriptor & 3]
    size_bytes = (int(is_single_segment), 2, 4, 8)[descriptor >> 6]
    field = head[start : start + size_bytes]
    if not field or len(field) < size_bytes:
        return None
    return int.from_bytes(field, "little") + (256 if size_bytes == 2 else 0)


def unpack(system: str, file: object, name: str, payload: ByteArray, byte_count: int) -> bytes:
    """The ``byte_count`` bytes in a payload: one zstd frame.

    Raises:
        Corrupt: It is no such frame, or holds another number of bytes.
        LimitExceeded: As :func:`check_window`.
    """
    what = f"{file}: the payload of tensor {name[:_SHOWN_CHARS]!r} ({system} format)"
    try:
        return zstd.decompress(payload.data, byte_count, what)
    except Corrupt:
        check_window(system, file, payload, name)
        raise


def encode_xor(old: ByteArray, new: ByteArray) -> bytes:
    """The payload of a changed tensor: one zstd frame of its old bytes XOR its new ones."""
    return zstd.compress(np.bitwise_xor(old, new).data, LEVEL)


def decode_xor(
    system: str, file: object, name: str, payload: ByteArray, old: ByteArray
) -> ByteArray:
    """The new bytes of a tensor; the checksum is still to be compared.

    Raises:
        TensorMismatch: The base's tensor has another size.
        Corrupt, LimitExceeded: As :func:`unpack`.
    """
    declared = declared_bytes(payload)
    if declared is not None and declared != old.size:
        raise size_mismatch(system, file, name, f"is for {declared} bytes", old)
    plain = unpack(system, file, name, payload, old.size)
    return np.bitwise_xor(np.frombuffer(plain, np.uint8), old)


def size_mismatch(
    system: str, file: object, name: str, what: str, old: ByteArray
) -> TensorMismatch:
    """The error for a payload that is meant for a tensor of another size."""
    return TensorMismatch(
        f"{file}: tensor {name[:_SHOWN_CHARS]!r}: its payload {what}, and the base's tensor has"
        f" {old.size} ({system} format)",
        hint="Give the checkpoint that the delta was made from",
        tensor=name,
        file=str(file),
    )


def shown(value: Any) -> str:
    """A value from a file, for a message.

    What is nested is only named: it may be nested deeper than can be shown.
    """
    if isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    ):
        return "a table" if isinstance(value, dict) else "a list of lists or tables"
    return repr(value[:_SHOWN_CHARS] if isinstance(value, str | list) else value)[:_SHOWN_CHARS]


def new_stored(old: StoredTensor, data: ByteArray) -> StoredTensor:
    """The new tensor, as its base's dtype and shape have it."""
    data.flags.writeable = False
    return StoredTensor(old.dtype, old.shape, data)
