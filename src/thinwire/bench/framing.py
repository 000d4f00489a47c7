"""The safetensors layout: the file format of the corpus and the framing of most peers.

Small on purpose. It reads files that the bench or a trainer wrote, not hostile ones.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.bench.tensors import Tensor, as_tensor

_LENGTH_BYTES = 8
_ALIGN_BYTES = 8


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Lay tensors out as one safetensors file, in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.words.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    parts: list[Any] = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
    # memoryview().cast refuses empty arrays, and joining one adds nothing.
    parts += [tensor.words.data for tensor in tensors.values() if tensor.words.size]
    return b"".join(parts)


def header_bytes(file: bytes) -> int:
    """Bytes of a packed file that are not tensor data."""
    return _LENGTH_BYTES + int.from_bytes(file[:_LENGTH_BYTES], "little")


def unpack(file: bytes | mmap.mmap) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (views into ``file``, in offset order) and the metadata of one safetensors file.

    Raises ValueError when the header does not describe the file.
    """
    data_start = header_bytes(file[:_LENGTH_BYTES])
    header = json.loads(file[_LENGTH_BYTES:data_start])
    metadata = header.pop("__metadata__", {})
    data = np.frombuffer(file, np.uint8)[data_start:]
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if not 0 <= start <= stop <= data.size:
            raise ValueError(f"tensor {name!r} lies at {start}:{stop} of {data.size} bytes")
        tensors[name] = as_tensor(entry["dtype"], tuple(entry["shape"]), data[start:stop])
    return tensors, metadata


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Memory-map a ``.safetensors`` file, or all those of a folder.

    Raises FileNotFoundError when there is none, ValueError when a file is malformed or a name
    occurs twice.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {path}")
    checkpoint: dict[str, Tensor] = {}
    for file in files:
        with file.open("rb") as handle:
            # Copy on write: peers want writable arrays, the file must stay as it is.
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            tensors, _ = unpack(mapped)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a safetensors file: {error}") from error
        twice = checkpoint.keys() & tensors.keys()
        if twice:
            raise ValueError(f"{file}: tensor {min(twice)!r} is also in another file of {path}")
        checkpoint |= tensors
    return checkpoint
