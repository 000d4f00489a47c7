"""Writes TRL's deltas and anchors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors, write_all
from thinwire.checkpoint.safetensors_file import StoredTensor, build_header
from thinwire.codec.dtypes import dtype_named
from thinwire.errors import InvalidArgument, Unsupported
from thinwire.interop.change import Change
from thinwire.interop.foreign import OutFile
from thinwire.interop.sparse import Words, changed_positions, words_of
from thinwire.interop.trl_layout import (
    BASE_KEY,
    EMPTY_KEY,
    GAPS,
    LAYOUTS,
    PATCH,
    SYSTEM,
    VALUE_DTYPE,
    Layout,
    encode_index,
    file_name,
)
from thinwire.interop.unnamed import map_written, unnamed_file
from thinwire.interop.weights_out import WeightsWriter, new_weights
from thinwire.interop.writing import code_changes, refuse_other_changes

# Bytes of memory for each byte of a tensor of which every word changed, as measured.
_MEMORY_TIMES = 15
_WIDE_BYTES = 4


class _Coded(NamedTuple):
    """A tensor's changes, ready to be written."""

    index_dtype: str
    positions: Words
    values: Words


class _Waiting(NamedTuple):
    """A tensor of the file whose elements wait in the spool."""

    key: str
    dtype: str
    element_count: int


def write_delta(
    change: Change,
    out: Path,
    *,
    version: int,
    base_version: int,
    layout: str = "v2",
    encoding: str | None = None,
    workers: int = 1,
) -> list[OutFile]:
    """Write one delta: changed BF16 tensors, and nothing else of the new version.

    Args:
        change: What changed.
        out: An empty folder.
        version: The step it makes.
        base_version: The step it is made from. TRL's own files do not say which: it is the one
            before. Where it is not, the file says so under a key that TRL's receivers skip.
        layout: "v1" or "v2".
        encoding: "gap_delta" or "raw"; None: what TRL's layout has as a rule.
        workers: Threads that code; the bytes are the same for any number.

    Raises:
        InvalidArgument: An option is not one, or the step is not after its base.
        Unsupported: A change of elements other than BF16, beyond 32 bits, or of other files.
        TensorMismatch: Tensors came or went, or changed dtype or shape.
        StoreError: The disk is full.
    """
    row, encoding = _check_options(layout, encoding)
    if not 0 <= base_version < version:
        raise InvalidArgument(
            f"step {version} cannot be made from step {base_version}", hint="Steps count up from 0"
        )
    refuse_other_changes(SYSTEM, change)
    path = out / file_name(version)
    with new_weights(path) as writer:
        names, changed_count = _write_changes(change, writer, row, encoding, out, workers)
        if layout == "v1":
            if not names:
                # The library that TRL writes with took no file without tensors.
                writer.add(EMPTY_KEY, StoredTensor("I32", (1,), np.zeros(4, np.uint8)))
            element_count = max(_element_count(change), 1)
            writer.metadata |= {
                "sparse": "True",
                "model_version": str(version),
                "sparsity": str(1.0 - changed_count / element_count),
                "changed_params": json.dumps(names),
            }
        else:
            writer.metadata |= _patch_metadata(
                version, "True", encoding, len(names), changed_count, _element_count(change)
            )
        if base_version != version - 1:
            writer.metadata[BASE_KEY] = str(base_version)
    return [OutFile(f"deltas/{path.name}", path)]


def write_full(checkpoint: Checkpoint, out: Path, *, version: int) -> list[OutFile]:
    """Write an anchor: all tensors in one file. Config and tokenizer have no place in the format.

    Raises:
        InvalidArgument: The step is negative.
        StoreError: The disk is full.
    """
    if version < 0:
        raise InvalidArgument(f"the step is {version}", hint="Steps count up from 0")
    path = out / file_name(version)
    # Readers map the file, and need each element at a multiple of its size: wide ones come first.
    order = sorted(checkpoint.tensors.items(), key=lambda item: -dtype_named(item[1].dtype).bits)
    count = sum(_elements_of(tensor) for _, tensor in order)
    rows = ((name, tensor.dtype, tensor.shape) for name, tensor in order)
    metadata = _patch_metadata(version, "False", GAPS, len(order), count, count)
    header = build_header(rows, metadata, path)
    with os_errors("cannot write", path), path.open("xb") as file:
        write_all(file.fileno(), header)
        for _, tensor in order:
            write_all(file.fileno(), tensor.data.data)
        os.fsync(file.fileno())
    return [OutFile(f"anchors/{path.name}", path)]


def _write_changes(
    change: Change, writer: WeightsWriter, layout: Layout, encoding: str, out: Path, workers: int
) -> tuple[list[str], int]:
    """The changed tensors' names, and how many changes they have."""

    def code(name: str, old: StoredTensor, new: StoredTensor) -> _Coded:
        if new.dtype != VALUE_DTYPE:
            raise _other_dtype(name, new.dtype)
        positions = changed_positions(old, new)
        return _Coded(*encode_index(positions, encoding), words_of(new)[positions])

    names: list[str] = []
    changed_count = 0
    waiting: list[_Waiting] = []
    with unnamed_file(out) as spool:
        for name, coded in code_changes(change, code, workers, memory_times=_MEMORY_TIMES):
            names.append(name)
            changed_count += coded.values.size
            for suffix, dtype, elements in (
                (layout.index_suffix, coded.index_dtype, coded.positions),
                (layout.value_suffix, VALUE_DTYPE, coded.values),
            ):
                # As in an anchor, wide elements come first: the others wait until all of these are
                # there.
                if elements.itemsize == _WIDE_BYTES:
                    data = elements.view(np.uint8)
                    writer.add(name + suffix, StoredTensor(dtype, (elements.size,), data))
                else:
                    spool.write(elements.data)
                    waiting.append(_Waiting(name + suffix, dtype, elements.size))
        mapped = map_written(spool)
        start = 0
        for key, dtype, count in waiting:
            stop = start + count * dtype_named(dtype).word_bytes
            writer.add(key, StoredTensor(dtype, (count,), mapped[start:stop]))
            start = stop
    return names, changed_count


def _patch_metadata(
    version: int,
    sparse: str,
    encoding: str,
    tensor_count: int,
    changed_count: int,
    element_count: int,
) -> dict[str, str]:
    return {
        "format": PATCH,
        "version": "1",
        "sparse": sparse,
        "model_version": str(version),
        "num_changed_params": str(tensor_count),
        "total_changed_elements": str(changed_count),
        "total_elements": str(element_count),
        "sparsity": str(1.0 - changed_count / max(element_count, 1)),
        "encoding": encoding,
    }


def _check_options(layout: str, encoding: str | None) -> tuple[Layout, str]:
    row = LAYOUTS.get(layout)
    if row is None:
        raise InvalidArgument(
            f"TRL's deltas have no layout {layout[:40]!r}", hint=f"Give {' or '.join(LAYOUTS)}"
        )
    encoding = encoding or row.encodings[0]
    if encoding not in row.encodings:
        raise InvalidArgument(
            f"TRL's layout {layout} has no encoding {encoding[:40]!r} that is written here",
            hint=f"Give {' or '.join(row.encodings)}",
        )
    return row, encoding


def _element_count(change: Change) -> int:
    return sum(_elements_of(tensor) for tensor in change.base.tensors.values())


def _elements_of(tensor: StoredTensor) -> int:
    return tensor.data.size * 8 // dtype_named(tensor.dtype).bits


def _other_dtype(name: str, dtype: str) -> Unsupported:
    return Unsupported(
        f"tensor {name[:200]!r} changed and is {dtype}: values of {SYSTEM} are {VALUE_DTYPE}",
        hint="Write full weights for this version, or another format",
        tensor=name,
        dtype=dtype,
    )
