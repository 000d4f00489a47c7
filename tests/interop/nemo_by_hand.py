"""NeMo-RL's payloads, made by the real ``torch.save`` in the layout of its public source.

How a payload is made is written here from its description alone.
"""

from __future__ import annotations

import io
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.checkpoint.safetensors_file import StoredTensor

from .making import Tensor, Tensors, stepped, tensor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}
TORCH |= {"F8_E4M3": "float8_e4m3fn", "BOOL": "bool", "F64": "float64", "U8": "uint8"}
WORDS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "BOOL": 1, "F64": 8, "U8": 1}
STORED = {1: "u1", 2: "<i2", 4: "<i4", 8: "<i8"}


OLD: dict[str, Tensor] = {
    "model.w": tensor("BF16", [40, 30], 1),
    "model.far": tensor("BF16", [70_000], 2),
    "model.norm": tensor("F32", [50], 3),
    "q": tensor("F8_E4M3", [99], 4),
    "ids": tensor("I64", [12], 5),
    "half": tensor("F16", [], 6),
    "still": tensor("BF16", [9], 7),
}
NEW: dict[str, Tensor] = {
    name: old if name == "still" else stepped(old, seed + 7)
    for seed, (name, old) in enumerate(OLD.items())
} | {"half": ("F16", [], b"\0\x80"), "model.norm": ("F32", [50], tensor("F32", [50], 33)[2])}
FAR = bytearray(OLD["model.far"][2])
FAR[0] ^= 1
FAR[-1] ^= 1
NEW["model.far"] = ("BF16", [70_000], bytes(FAR))


def stored(old: Tensor) -> StoredTensor:
    """A tensor of a base."""
    dtype, shape, data = old
    return StoredTensor(dtype, tuple(shape), np.frombuffer(data, np.uint8))


def payload(old: Tensors, new: Tensors, operation: str, **more: Any) -> tuple[Any, Any, Any]:
    """Positions, groups of values and tables, as arrays."""
    packed = b""
    groups: list[np.ndarray] = []
    group_of: dict[int, int] = {}
    tables = []
    for name, (dtype, shape, data) in new.items():
        kind = STORED[WORDS[dtype]]
        before, after = np.frombuffer(old[name][2], kind), np.frombuffer(data, kind)
        at = np.flatnonzero(before != after)
        if not at.size:
            continue
        values = after[at] ^ before[at] if operation == "xor" else after[at]
        group = group_of.setdefault(WORDS[dtype], len(groups))
        if group == len(groups):
            groups.append(np.empty(0, kind))
        table = {
            "name": name,
            "shape": tuple(shape),
            "dtype": TORCH[dtype],
            "operation": operation,
            "index_start": len(packed),
            "index_end": len(packed),
            "value_group": group,
            "value_start": groups[group].size,
            "value_end": groups[group].size + at.size,
        }
        groups[group] = np.concatenate([groups[group], values])
        if int(at[-1] - at[0]) + 1 == at.size:
            table |= {"index_encoding": "range", "range_start": int(at[0])}
        else:
            gaps = [int(b) - int(a) - 1 for a, b in zip([-1, *at], at, strict=False)]
            code = "H" if max(gaps) <= 0xFFFF else "I"
            packed += struct.pack(f"<{len(gaps)}{code}", *gaps)
            table |= {"index_end": len(packed), "index_encoding": "deltas"}
        tables.append(table | more)
    return np.frombuffer(packed, "u1"), groups, tables


def saved(index: Any, groups: Any, tables: Any) -> bytes:
    """What ``torch.save`` makes of a payload."""
    torch = pytest.importorskip("torch")

    def flat(array: Any) -> Any:
        return torch.from_numpy(array.copy()) if isinstance(array, np.ndarray) else array

    buffer = io.BytesIO()
    torch.save((flat(index), tuple(flat(group) for group in groups), tables), buffer)
    return buffer.getvalue()


@cache
def sound(operation: str) -> bytes:
    """What ``torch.save`` makes of the payload between two versions of a tiny model."""
    return saved(*payload(OLD, NEW, operation))


def packed(folder: Path, data: bytes, name: str = "000000.pt") -> Path:
    """A payload's file."""
    path = folder / name
    path.write_bytes(zstd.compress(data, 1))
    return path
