"""PULSE as grail ships it (layout v3.1): row and column deltas, new values, zstd-1 over it all."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.bench.peers.zstd_one import ZstdOne
from thinwire.bench.tensors import Checkpoint, Tensor, Words

Deltas = npt.NDArray[np.int64]

_LAYOUT_VERSION = 31
_LENGTH_BYTES = 4


def _matrix_columns(tensor: Tensor) -> int:
    """Row length when the tensor is seen as a matrix: first axis by the rest, or one row."""
    if len(tensor.shape) < 2:
        return max(tensor.words.size, 1)
    return max(tensor.words.size // max(tensor.shape[0], 1), 1)


def _downcast(deltas: Deltas, narrow: str) -> Words:
    """To the narrow unsigned type when all fit, else to int32."""
    fits = deltas.size == 0 or int(deltas.max()) <= np.iinfo(narrow).max
    return deltas.astype(narrow if fits else "<i4")


class Pulse:
    """One compressed file for all tensors: u32 header length, JSON header, then the arrays.

    A change is stored as the difference to the previous change's row and column; the column is
    absolute where the row differs. Rows fit 8 bits or take 32, columns 16 or 32. grail's decoder
    loops over rows in Python; this one is vectorised, so it is faster than the real one. grail
    compares floats and so misses +0.0 to -0.0; this row compares bits. The whole file counts as
    payload, because its header is compressed together with the data.
    """

    name = "pulse"

    def __init__(self) -> None:
        self._zstd = ZstdOne()

    def encode(self, base: Checkpoint, new: Checkpoint) -> bytes:
        """See CheckpointPeer. Unchanged tensors are left out."""
        entries: list[dict[str, Any]] = []
        arrays: list[Words] = []
        offset = 0
        for name, tensor in new.items():
            positions = np.flatnonzero(base[name].words != tensor.words)
            if positions.size == 0:
                continue
            rows, columns = _split_positions(positions, _matrix_columns(tensor))
            values = tensor.words[positions]
            values_offset = offset + rows.nbytes + columns.nbytes
            entries.append(
                {
                    "name": name,
                    "shape": list(tensor.shape),
                    "num_nonzero": int(positions.size),
                    "value_dtype": tensor.dtype,
                    "indices_offset": offset,
                    "indices_size": rows.nbytes + columns.nbytes,
                    "rows_size": rows.nbytes,
                    "cols_size": columns.nbytes,
                    "row_dtype": rows.dtype.name,
                    "col_dtype": columns.dtype.name,
                    "values_offset": values_offset,
                    "values_size": values.nbytes,
                }
            )
            arrays += [rows, columns, values]
            offset = values_offset + values.nbytes
        header = json.dumps({"version": _LAYOUT_VERSION, "tensors": entries}).encode()
        parts: list[Any] = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
        return self._zstd.compress(b"".join(parts + [array.data for array in arrays]))

    def decode(self, base: Checkpoint, payload: bytes) -> Checkpoint:
        """See CheckpointPeer."""
        file = self._zstd.decompress(payload)
        data_start = _LENGTH_BYTES + int.from_bytes(file[:_LENGTH_BYTES], "little")
        header = json.loads(file[_LENGTH_BYTES:data_start])
        data = memoryview(file)[data_start:]
        new = dict(base)
        for entry in header["tensors"]:
            tensor = base[entry["name"]]
            rows_start = entry["indices_offset"]
            columns_start = rows_start + entry["rows_size"]
            columns_stop = columns_start + entry["cols_size"]
            values_start = entry["values_offset"]
            values_stop = values_start + entry["values_size"]
            positions = _join_positions(
                np.frombuffer(data[rows_start:columns_start], entry["row_dtype"]),
                np.frombuffer(data[columns_start:columns_stop], entry["col_dtype"]),
                _matrix_columns(tensor),
            )
            words = tensor.words.copy()
            words[positions] = np.frombuffer(data[values_start:values_stop], words.dtype)
            new[entry["name"]] = tensor._replace(words=words)
        return new

    def framing_bytes(self, _payload: bytes, /) -> int:
        """Nothing is left out."""
        return 0


def _split_positions(positions: Deltas, column_count: int) -> tuple[Words, Words]:
    rows, columns = np.divmod(positions, column_count)
    row_deltas = np.diff(rows, prepend=0)
    column_deltas = np.diff(columns, prepend=0)
    starts = row_deltas != 0
    column_deltas[starts] = columns[starts]
    return _downcast(row_deltas, "uint8"), _downcast(column_deltas, "<u2")


def _join_positions(row_deltas: Words, column_deltas: Words, column_count: int) -> Deltas:
    rows = np.cumsum(row_deltas, dtype=np.int64)
    running = np.cumsum(column_deltas, dtype=np.int64)
    # The running sum crosses rows; subtract from each row what had summed up before it.
    starts = np.flatnonzero(row_deltas)
    before = np.zeros(starts.size + 1, np.int64)
    before[1:] = running[starts] - column_deltas[starts]
    lengths = np.diff(starts, prepend=0, append=running.size)
    return rows * column_count + running - np.repeat(before, lengths)
