"""Writing slime's ``weight_v`` folders; see :mod:`thinwire.interop.slime`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import ByteArray, os_errors, write_file
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec import zstd
from thinwire.errors import InvalidArgument, Unsupported
from thinwire.interop.change import Change
from thinwire.interop.checksums import checksum as checksum_of
from thinwire.interop.foreign import OutFile
from thinwire.interop.hf import checkpoint_files
from thinwire.interop.payload_files import (
    LEVEL,
    MAX_FILE_BYTES,
    encode_xor,
    new_payload_files,
)
from thinwire.interop.slime_index import (
    CHECKSUM_NAMES,
    COMPRESSION,
    ENCODINGS,
    SYSTEM,
    folder_name,
    read_index,
)
from thinwire.interop.slime_read import WORD, WORD_BYTES
from thinwire.interop.writing import code_changes, refuse_other_changes, require_consecutive

# Bytes of memory for each byte of a tensor of which every word changed, as measured.
_MEMORY_TIMES = 5
MAX_OVERWRITE_BYTES = (1 << 8 * WORD_BYTES) - 1
"""The largest tensor that ``overwrite`` can count the bytes of."""


def write_delta(
    change: Change,
    out: Path,
    *,
    version: int,
    base_version: int,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    max_file_bytes: int = MAX_FILE_BYTES,
    workers: int = 1,
) -> list[OutFile]:
    """Write one delta into the empty folder ``out``: its weights files, then its index.

    Args:
        change: What it does.
        out: Where the files are to lie until they are brought to their place.
        version: Which version it makes.
        base_version: Which version it is made from: the one before.
        encoding: "xor" or "overwrite". The first is smaller; the second can be applied twice.
        checksum: "xxh3-128", "blake3" or "adler32".
        max_file_bytes: After how many bytes of payloads another file is begun.
        workers: Threads that code; the bytes are the same for any number.

    Raises:
        InvalidArgument: An argument is not one that the format has.
        TensorMismatch: A tensor came, went, or changed dtype or shape.
        Unsupported: Something else than tensors changed, versions are left out, or a tensor is
            larger than "overwrite" can address.
        StoreError: The disk is full.
    """
    _check_choice("encoding", encoding, ENCODINGS)
    _check_choice("checksum", checksum, CHECKSUM_NAMES)
    require_consecutive(SYSTEM, version, base_version)
    refuse_other_changes(SYSTEM, change)

    def code(name: str, old: StoredTensor, new: StoredTensor) -> tuple[bytes, str]:
        if encoding == "xor":
            payload = encode_xor(old.data, new.data)
        else:
            payload = encode_overwrite(name, old.data, new.data)
        return payload, checksum_of(checksum, new.data)

    numbers: dict[str, int] = {}
    with new_payload_files(
        lambda number: out / f"model-{number:05d}.part", max_file_bytes
    ) as files:
        for name, coded in code_changes(change, code, workers, memory_times=_MEMORY_TIMES):
            numbers[name] = files.add(name, *coded)
    # Only now is it known how many there are.
    names = [
        f"model-{number:05d}-of-{len(files.paths):05d}.safetensors"
        for number in range(len(files.paths))
    ]
    for path, name in zip(files.paths, names, strict=True):
        with os_errors("cannot write", out / name):
            path.rename(out / name)
    index = {
        "metadata": {
            "version": f"{version:06d}",
            "base_version": f"{base_version:06d}",
            "delta_encoding": encoding,
            "compression_format": COMPRESSION,
            "checksum_format": checksum,
        },
        "weight_map": {name: names[number] for name, number in numbers.items()},
    }
    folder = folder_name(version)
    files_out = [OutFile(f"{folder}/{name}", out / name) for name in names]
    return [*files_out, _write_index(out, folder, index)]


def write_full(checkpoint: Checkpoint, out: Path, *, version: int) -> list[OutFile]:
    """Write one full version: the checkpoint's own files, and last an index with its number.

    slime's receivers begin with their own model path as version 0 and look at no folder for it.

    Args:
        checkpoint: The weights.
        out: An empty folder for the index.
        version: Its number.

    Raises:
        InvalidArgument: The number is negative, or the checkpoint is a delta of slime's.
        StoreError: The disk is full.
    """
    if version < 0:
        raise InvalidArgument(f"the version is {version}", hint="Give 0 or more")
    folder = folder_name(version)
    metadata: Mapping[str, Any] = {}
    if (path := checkpoint.files.get(INDEX_NAME)) is not None:
        old = read_index(path)
        if old.is_delta:
            raise InvalidArgument(
                f"{checkpoint.path} is a delta ({SYSTEM} format), not full weights",
                hint="Apply it to the version before it first",
                path=str(checkpoint.path),
            )
        metadata = old.settings
    index_key = f"{folder}/{INDEX_NAME}"
    files = [file for file in checkpoint_files(checkpoint, folder) if file.key != index_key]
    names = {file.path: file.key.removeprefix(f"{folder}/") for file in files}
    index = {
        "metadata": {**metadata, "version": f"{version:06d}"},
        "weight_map": {
            name: names[file.path] for file in checkpoint.weights.values() for name in file.tensors
        },
    }
    return [*files, _write_index(out, folder, index)]


def encode_overwrite(name: str, old: ByteArray, new: ByteArray) -> bytes:
    """The ``overwrite`` payload of a changed tensor.

    Raises:
        Unsupported: It is larger than its numbers can address.
    """
    if new.size > MAX_OVERWRITE_BYTES:
        raise Unsupported(
            f"tensor {name[:200]!r} has {new.size} bytes: overwrite addresses"
            f" {MAX_OVERWRITE_BYTES} ({SYSTEM} format)",
            hint="Choose the encoding xor",
            tensor=name,
        )
    positions = np.flatnonzero(old != new)
    parts = [
        np.array([positions.size], WORD).view(np.uint8),
        positions.astype(WORD).view(np.uint8),
        new[positions],
    ]
    return zstd.compress(np.concatenate(parts).data, LEVEL)


def _write_index(out: Path, folder: str, index: Mapping[str, Any]) -> OutFile:
    write_file(out / INDEX_NAME, json.dumps(index).encode())
    return OutFile(f"{folder}/{INDEX_NAME}", out / INDEX_NAME)


def _check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(
            f"the {what} {value[:40]!r} is not one of {SYSTEM} format",
            hint=f"Known are {', '.join(known)}",
        )
