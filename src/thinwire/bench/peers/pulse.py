"""PULSE as grail ships it (layout v3.1): row and column deltas, new values, zstd-1 over it all."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from thinwire.bench.peers.zstd_one import ZstdOne
from thinwire.bench.tensors import Checkpoint, Words
from thinwire.interop.grail_layout import (
    DTYPES,
    LENGTH_BYTES,
    Part,
    join_positions,
    pack_header,
    split_positions,
)

_LAYOUT = "v3.1"
_GRAIL_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Pulse:
    """One compressed file for all tensors, coded by :mod:`thinwire.interop.grail_layout`.

    grail's decoder loops over rows in Python; this one is vectorised, so it is faster than the real
    one. grail compares floats and so misses +0.0 to -0.0, and has values of BF16, F16 and F32 only;
    this row compares bits, of any dtype. The whole file counts as payload, because its header is
    compressed together with the data.
    """

    name = "pulse"

    def __init__(self) -> None:
        self._zstd = ZstdOne()

    def encode(self, base: Checkpoint, new: Checkpoint) -> bytes:
        """See CheckpointPeer. Unchanged tensors are left out."""
        parts: list[Part] = []
        arrays: list[Words] = []
        for name, tensor in sorted(new.items()):
            positions = np.flatnonzero(base[name].words != tensor.words)
            if positions.size == 0:
                continue
            index, columns = split_positions(positions, tensor.shape, _LAYOUT)
            values = tensor.words[positions]
            dtype = _GRAIL_NAMES.get(tensor.dtype, tensor.dtype)
            parts.append(Part.of(name, dtype, tensor.shape, (index, columns, values)))
            arrays += [index, columns, values]
        header = pack_header(_LAYOUT, parts)
        return self._zstd.compress(b"".join([header, *(array.data for array in arrays)]))

    def decode(self, base: Checkpoint, payload: bytes) -> Checkpoint:
        """See CheckpointPeer."""
        file = self._zstd.decompress(payload)
        data_start = LENGTH_BYTES + int.from_bytes(file[:LENGTH_BYTES], "little")
        header = json.loads(file[LENGTH_BYTES:data_start])
        data = memoryview(file)[data_start:]
        new = dict(base)
        for entry in header["tensors"]:
            tensor = base[entry["name"]]
            words = tensor.words.copy()
            values = _array(data, entry["values_offset"], entry["values_size"], words.dtype)
            start = entry["indices_offset"]
            index = _array(data, start, entry["rows_size"], entry["row_dtype"])
            start += entry["rows_size"]
            columns = _array(data, start, entry["cols_size"], entry["col_dtype"])
            done = 0
            for positions in join_positions(index, columns, tensor.shape, _LAYOUT):
                words[positions] = values[done : done + positions.size]
                done += positions.size
            new[entry["name"]] = tensor._replace(words=words)
        return new

    def framing_bytes(self, _payload: bytes, /) -> int:
        """Nothing is left out."""
        return 0


def _array(data: memoryview, start: int, size_bytes: int, kind: Any) -> Words:
    return np.frombuffer(data[start : start + size_bytes], kind)
