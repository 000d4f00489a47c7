"""Safetensors files whose sizes show only at the end: the tensors wait while the header is made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from thinwire.checkpoint.disk import ByteArray, os_errors
from thinwire.checkpoint.safetensors_file import StoredTensor, build_header
from thinwire.codec.dtypes import byte_count
from thinwire.errors import InvalidArgument
from thinwire.interop.unnamed import unnamed_file

_COPY_BYTES = 1 << 20


class WeightsWriter:
    """One safetensors file, being written tensor by tensor; make one with :func:`new_weights`.

    Attributes:
        path: Where it will be.
        metadata: The ``__metadata__`` strings; may be added to until the end.
        data_bytes: Bytes of the tensors so far.
    """

    def __init__(self, path: Path, spool: BinaryIO) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.data_bytes = 0
        self._spool = spool
        self._rows: list[tuple[str, str, tuple[int, ...]]] = []

    def add(self, name: str, tensor: StoredTensor) -> None:
        """Append a tensor.

        Raises:
            InvalidArgument: The tensor's bytes do not fit its shape.
            StoreError: The disk is full.
        """
        if tensor.data.size != byte_count(tensor.dtype, tensor.shape):
            raise InvalidArgument(f"tensor {name[:200]!r}: its bytes do not fit its shape")
        with os_errors("cannot write beside", self.path):
            self._spool.write(tensor.data.data)
        self._rows.append((name, tensor.dtype, tensor.shape))
        self.data_bytes += tensor.data.size

    def add_payload(self, name: str, payload: bytes | ByteArray, checksum: str = "") -> None:
        """Append a payload as a list of bytes (U8), with a checksum in the metadata under its name.

        Raises:
            InvalidArgument, StoreError: As :meth:`add`.
        """
        data = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
        self.add(name, StoredTensor("U8", (data.size,), data))
        if checksum:
            self.metadata[name] = checksum

    def finish(self) -> None:
        """Write the file: header, then tensors; durable.

        Raises:
            InvalidArgument: Two tensors have one name, or a name is not Unicode text.
            LimitExceeded: The header is larger than a reader takes.
            StoreError: It cannot be written.
        """
        header = build_header(self._rows, self.metadata, self.path)
        with os_errors("cannot write", self.path), self.path.open("xb") as file:
            file.write(header)
            self._spool.seek(0)
            shutil.copyfileobj(self._spool, file, _COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def new_weights(path: Path) -> Iterator[WeightsWriter]:
    """A new file at ``path``, which must not exist; it is there once the block ends without error.

    Raises:
        StoreError, LimitExceeded, InvalidArgument: It cannot be written.
    """
    with unnamed_file(path.parent) as spool:
        writer = WeightsWriter(path, spool)
        yield writer
        writer.finish()


def write_weights(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """A whole safetensors file of tensors that are there already."""
    with new_weights(path) as writer:
        writer.metadata.update(metadata or {})
        for name, tensor in tensors.items():
            writer.add(name, tensor)
