"""Writes grail's checkpoints; see :mod:`thinwire.interop.grail` for what they are."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import ByteArray, map_file, os_errors, write_file
from thinwire.checkpoint.file_names import SINGLE_FILE
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.dtypes import dtype_named
from thinwire.errors import InvalidArgument, Unsupported
from thinwire.interop.change import Change
from thinwire.interop.foreign import OutFile
from thinwire.interop.grail_layout import (
    DTYPES,
    FORMATS,
    LAYOUTS,
    SYSTEM,
    Part,
    array_at,
    join_positions,
    pack_header,
    split_positions,
)
from thinwire.interop.hf import SINGLE_NAME
from thinwire.interop.sparse import NewWords, Words, changed_positions, words_of
from thinwire.interop.torch_names import TORCH_NAMES
from thinwire.interop.unnamed import map_written, unnamed_file
from thinwire.interop.writing import code_changes, refuse_other_changes

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DELTA, FULL = "DELTA", "FULL"
# Bytes of memory for each byte of a tensor of which every word changed, as measured.
_MEMORY_TIMES = 28
METADATA_NAME = "metadata.json"
WEIGHTS_METADATA_NAME = "delta_metadata.json"
DATA_NAME = "delta_sparse.bin.zst"

_LEVEL = 1
_PIECE_BYTES = 1 << 20
_OWN_NAMES = {METADATA_NAME, "manifest.sig", FULL, DELTA}
_GRAIL_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# torch's F4 counts two elements as one, so it says another shape.
_UNHASHED = {"F4"}


class _Spooled(NamedTuple):
    """A changed tensor, and where its arrays begin in the spool."""

    part: Part
    start: int


def hash_weights(
    hasher: Any, names: Collection[str], tensor: Callable[[str], StoredTensor]
) -> None:
    """Put all weights into a hash as grail does: by name, each with its name, dtype and shape.

    Raises:
        Unsupported: A dtype that torch has no name for.
    """
    for name in sorted(names):
        stored = tensor(name)
        if stored.dtype not in TORCH_NAMES or stored.dtype in _UNHASHED:
            raise Unsupported(
                f"tensor {name[:200]!r} is {stored.dtype}: no hash of {SYSTEM}'s has it",
                hint="Write another format",
                tensor=name,
            )
        hasher.update(name.encode())
        hasher.update(f"torch.{TORCH_NAMES[stored.dtype]}".encode())
        hasher.update(str(tuple(stored.shape)).encode())
        hasher.update(stored.data.data)


def write_delta(
    change: Change,
    out: Path,
    *,
    version: int,
    base_version: int,
    layout: str = "v3.1",
    anchor_version: int | None = None,
    workers: int = 1,
) -> list[OutFile]:
    """Write one delta: ``DELTA`` of the window ``version``, and its ``READY-``.

    The new weights are read twice: their hash is over all of them, in the order of their names.

    Args:
        change: What changed.
        out: An empty folder.
        version: The window it makes.
        base_version: The window it is made from.
        layout: "v2", "v3" or "v3.1".
        anchor_version: The newest full window, which grail keeps for as long as this one.
        workers: Threads that find the changes; the one zstd frame over them, and the hash, are made
            on one. The bytes are the same for any number.

    Raises:
        InvalidArgument: The layout is not one, or the window is not after its base.
        Unsupported: A change that is not of BF16, F16 or F32 elements, of a tensor without axes,
            beyond 32 bits, or of other files.
        TensorMismatch: Tensors came or went, or changed dtype or shape.
        StoreError: The disk is full.
    """
    if layout not in LAYOUTS:
        raise InvalidArgument(
            f"grail's deltas have no layout {layout[:40]!r}", hint=f"Give {', '.join(LAYOUTS)}"
        )
    _check_window(version)
    if not 0 <= base_version < version:
        raise InvalidArgument(
            f"window {version} cannot be made from window {base_version}",
            hint="Windows count up from 0",
        )
    refuse_other_changes(SYSTEM, change)
    with unnamed_file(out) as spool:
        spooled = _spool_changes(change, layout, spool, workers)
        data = map_written(spool)
        _write_data(out / DATA_NAME, layout, spooled, data)
        weights_hash = _hash_new_weights(change, layout, spooled, data)
    windows = {"prev_window": base_version, "anchor_window": anchor_version}
    weights_metadata = {"format": FORMATS[layout], "threshold": 0.0} | windows
    _write_json(out / WEIGHTS_METADATA_NAME, weights_metadata | _counts(change, spooled))
    metadata = _metadata(version, base_version, DELTA) | windows
    metadata["weights_hash"] = weights_hash
    names = (DATA_NAME, WEIGHTS_METADATA_NAME)
    return _finish(out, metadata, [(name, out / name) for name in names])


def write_full(checkpoint: Checkpoint, out: Path, *, version: int) -> list[OutFile]:
    """Write one full version: ``FULL`` of the window, and its ``READY-``.

    The checkpoint's own files are named where they lie; a ``metadata.json`` of its own is left out.

    Raises:
        InvalidArgument: The window is negative.
        StoreError: A file cannot be read or written.
    """
    _check_window(version)
    weights = [
        (SINGLE_NAME if name == SINGLE_FILE else name, file.path)
        for name, file in checkpoint.weights.items()
    ]
    small = [row for row in checkpoint.files.items() if row[0] not in _OWN_NAMES]
    files = [*small, *weights]
    return _finish(out, _metadata(version, None, FULL), files)


def _spool_changes(
    change: Change, layout: str, spool: BinaryIO, workers: int
) -> dict[str, _Spooled]:
    """The arrays of each changed tensor, written in the order in which tensors come."""

    def code(
        name: str, old: StoredTensor, new: StoredTensor
    ) -> tuple[Part, tuple[Words, Words, Words]]:
        if new.dtype not in _GRAIL_NAMES or not new.shape:
            what = f"is {new.dtype}" if new.shape else "has no axes"
            raise Unsupported(
                f"tensor {name[:200]!r} changed and {what}: {SYSTEM} has no place for that",
                hint="Write full weights for this version, or another format",
                tensor=name,
            )
        positions = changed_positions(old, new)
        index, columns = split_positions(positions, new.shape, layout)
        arrays = index, columns, words_of(new)[positions]
        return Part.of(name, _GRAIL_NAMES[new.dtype], new.shape, arrays), arrays

    spooled = {}
    for name, (part, arrays) in code_changes(change, code, workers, memory_times=_MEMORY_TIMES):
        spooled[name] = _Spooled(part, spool.tell())
        for array in arrays:
            if array.size:
                spool.write(array.data)
    return spooled


def _write_data(path: Path, layout: str, spooled: Mapping[str, _Spooled], data: ByteArray) -> None:
    """The header and all arrays, by the names of their tensors, in one zstd frame."""
    rows = [row for _, row in sorted(spooled.items())]
    header = pack_header(layout, [row.part for row in rows])
    packer = zstd.ZstdCompressor(_LEVEL)
    # grail's reader takes only frames that say how much they hold.
    packer.set_pledged_input_size(len(header) + data.size)
    with os_errors("cannot write", path), path.open("xb") as file:
        file.write(packer.compress(header))
        for part, start in rows:
            stop = start + part.index_bytes + part.column_bytes + part.value_bytes
            for at in range(start, stop, _PIECE_BYTES):
                file.write(packer.compress(data[at : min(at + _PIECE_BYTES, stop)].data))
        file.write(packer.flush())
        file.flush()
        os.fsync(file.fileno())


def _hash_new_weights(
    change: Change, layout: str, spooled: Mapping[str, _Spooled], data: ByteArray
) -> str:
    """The hash of all new weights: of those that were written, as a reader will have them."""

    def tensor(name: str) -> StoredTensor:
        old = change.base.tensors[name]
        if name not in spooled:
            return old
        part, start = spooled[name]
        middle = start + part.index_bytes
        stop = middle + part.column_bytes
        index = array_at(data, (start, middle), part.index_type)
        columns = array_at(data, (middle, stop), part.column_type)
        new_bits = data[stop : stop + part.value_bytes]
        values = words_of(StoredTensor(old.dtype, (part.changed_count,), new_bits))
        new = NewWords(SYSTEM, "the new delta", name, old)
        at = 0
        for positions in join_positions(index, columns, part.shape, layout):
            new.put(positions, values[at : at + positions.size])
            at += positions.size
        return new.finish()

    hasher = hashlib.sha256()
    hash_weights(hasher, change.base.tensors, tensor)
    return hasher.hexdigest()


def _counts(change: Change, spooled: Mapping[str, _Spooled]) -> dict[str, Any]:
    total = sum(
        tensor.data.size * 8 // dtype_named(tensor.dtype).bits
        for tensor in change.base.tensors.values()
    )
    changed = sum(row.part.changed_count for row in spooled.values())
    return {
        "shapes": {name: list(row.part.shape) for name, row in sorted(spooled.items())},
        "total_params": total,
        "nonzero_params": changed,
        "sparsity_ratio": 1.0 - changed / total if total else 1.0,
    }


def _metadata(version: int, before: int | None, kind: str) -> dict[str, Any]:
    """What ``metadata.json`` always has. No time goes in: the same input gives the same bytes."""
    training_config: dict[str, Any] = {}
    config_text = json.dumps(training_config, sort_keys=True).encode()
    return {
        "window": version,
        "file_manifest": {},
        "training_config": training_config,
        "git_commit": "unknown",
        "created_at": 0.0,
        "model_name": "no_name",
        "parent_window": before,
        "checkpoint_type": kind,
        "prev_window": None,
        "anchor_window": None,
        "weights_hash": None,
        "env_id": None,
        "env_params": {},
        "generation_params": {},
        "config_hash": hashlib.sha256(config_text).hexdigest(),
    }


def _finish(
    out: Path, metadata: dict[str, Any], files: Sequence[tuple[str, Path]]
) -> list[OutFile]:
    """Write what names and marks the files of a version; they come before it."""
    kind, window = metadata["checkpoint_type"], metadata["window"]
    metadata["file_manifest"] = {name: _sha256(path) for name, path in files}
    _write_json(out / METADATA_NAME, metadata)
    marker, ready = out / kind, out / f"READY-{window}"
    write_file(marker, b"")
    write_file(ready, b"")
    folder = f"checkpoint-{window}"
    return [
        *(OutFile(f"{folder}/{kind}/{name}", path) for name, path in files),
        OutFile(f"{folder}/{kind}/{kind}", marker),
        OutFile(f"{folder}/{kind}/{METADATA_NAME}", out / METADATA_NAME),
        OutFile(f"{folder}/{ready.name}", ready),
    ]


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(fields, ensure_ascii=False, indent=2).encode())


def _sha256(path: Path) -> str:
    data = map_file(path)
    hasher = hashlib.sha256()
    for start in range(0, data.size, _PIECE_BYTES):
        hasher.update(data[start : start + _PIECE_BYTES].data)
    return hasher.hexdigest()


def _check_window(version: int) -> None:
    if version < 0:
        raise InvalidArgument(f"the window is {version}", hint="Windows count up from 0")
