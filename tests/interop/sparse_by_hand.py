"""TRL's and grail's deltas, written and read from their descriptions alone, one change at a time.

Nothing of thinwire is imported here: what it writes must be read by these readers, and what these
writers write by it. A tensor is its dtype (as safetensors calls it), its shape and its bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .by_hand import Tensor, Tensors, read_safetensors, safetensors

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
GRAIL_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
TORCH_DTYPES = GRAIL_DTYPES | {"I64": "int64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn"}


def changes(old: Tensor, new: Tensor) -> list[tuple[int, bytes]]:
    """Position and new bits of each element whose bits differ."""
    width = WIDTHS[new[0]]
    pairs = zip(range(0, len(new[2]), width), range(0, len(old[2]), width), strict=True)
    return [
        (at // width, new[2][at : at + width])
        for at, _ in pairs
        if new[2][at : at + width] != old[2][at : at + width]
    ]


def with_changes(old: Tensor, rows: list[tuple[int, bytes]]) -> Tensor:
    """The tensor with these elements replaced."""
    dtype, shape, data = old
    out = bytearray(data)
    for position, bits in rows:
        out[position * len(bits) : (position + 1) * len(bits)] = bits
    assert len(out) == len(data)
    return dtype, shape, bytes(out)


def trl_index(positions: list[int], encoding: str) -> Tensor:
    """TRL's tensor of positions."""
    if encoding == "raw":
        return "I32", (len(positions),), struct.pack(f"<{len(positions)}i", *positions)
    gaps = []
    before = -1
    for position in positions:
        gaps.append(position - before - 1)
        before = position
    kind, code = ("U16", "H") if max(gaps, default=0) <= 0xFFFF else ("U32", "I")
    return kind, (len(gaps),), struct.pack(f"<{len(gaps)}{code}", *gaps)


def trl_tensors(old: Tensors, new: Tensors, layout: str, encoding: str) -> dict[str, Tensor]:
    """The tensors of a delta of TRL's."""
    index, values = {"v1": (".indices", ".values"), "v2": (".idx", ".val")}[layout]
    tensors: dict[str, Tensor] = {}
    for name in sorted(new):
        if new[name] == old[name]:
            continue
        rows = changes(old[name], new[name])
        tensors[name + values] = ("BF16", (len(rows),), b"".join(bits for _, bits in rows))
        tensors[name + index] = trl_index([position for position, _ in rows], encoding)
    return tensors


def trl_metadata(
    tensors: Tensors, layout: str, encoding: str, step: int, total: int = 10_000
) -> dict[str, str]:
    """The metadata of a delta of TRL's."""
    values = [name for name in tensors if name.endswith((".val", ".values"))]
    count = sum(tensors[name][1][0] for name in values)
    if layout == "v1":
        names = [name.removesuffix(".values") for name in values]
        return {
            "sparse": "True",
            "model_version": str(step),
            "sparsity": str(1.0 - count / total),
            "changed_params": json.dumps(names),
        }
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": str(step),
        "num_changed_params": str(len(values)),
        "total_changed_elements": str(count),
        "total_elements": str(total),
        "sparsity": str(1.0 - count / total),
        "encoding": encoding,
    }


def write_trl(
    folder: Path, old: Tensors, new: Tensors, step: int, layout: str, encoding: str
) -> Path:
    """A delta of TRL's below a chain's folder."""
    tensors = trl_tensors(old, new, layout, encoding)
    path = folder / "deltas" / f"step_{step:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors(tensors, trl_metadata(tensors, layout, encoding, step)))
    return path


def read_trl(path: Path, base: Tensors) -> dict[str, Tensor]:
    """What a delta of TRL's makes of a base, as TRL's receivers do it."""
    tensors, metadata = read_safetensors(path)
    new = dict(base)
    if "encoding" in metadata:
        assert metadata["format"] == "sparse_weight_patch"
        assert metadata["sparse"] == "True"
        names = sorted(key[: -len(".val")] for key in tensors if key.endswith(".val"))
        assert int(metadata["num_changed_params"]) == len(names)
        suffixes, encoding = (".idx", ".val"), metadata["encoding"]
    else:
        names = json.loads(metadata["changed_params"])
        suffixes, encoding = (".indices", ".values"), "raw"
    for name in names:
        kind, _, data = tensors[name + suffixes[0]]
        dtype, _, values = tensors[name + suffixes[1]]
        assert dtype == "BF16"
        code = {"I32": "i", "U16": "H", "U32": "I"}[kind]
        numbers = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
        rows = []
        at = -1
        for number, number_in_order in zip(numbers, range(len(numbers)), strict=True):
            at = number if encoding == "raw" else at + number + 1
            rows.append((at, values[2 * number_in_order : 2 * number_in_order + 2]))
        new[name] = with_changes(base[name], rows)
    return new


def row_length(shape: Any) -> int:
    """grail's columns."""
    length = 1
    for extent in list(shape)[1:]:
        length *= extent
    return max(1, length)


def grail_arrays(old: Tensor, new: Tensor, layout: str) -> tuple[dict[str, Any], list[bytes]]:
    """What the header says of a tensor's arrays, and the arrays: positions and values."""
    rows = changes(old, new)
    values = b"".join(bits for _, bits in rows)
    length = row_length(new[1])
    before = row = column = 0
    flat, row_steps, column_steps = [], [], []
    for position, _ in rows:
        flat.append(position - before)
        before = position
        new_row, new_column = divmod(position, length)
        row_steps.append(new_row - row)
        column_steps.append(new_column - column if new_row == row else new_column)
        row, column = new_row, new_column

    def packed(steps: list[int], code: str) -> bytes:
        return struct.pack(f"<{len(steps)}{code}", *steps)

    if layout == "v2":
        return {}, [packed(flat, "i"), b"", values]
    if layout == "v3":
        return {}, [packed(row_steps, "i"), packed(column_steps, "i"), values]
    widths = {"uint8": ("B", 255), "uint16": ("H", 65535), "int32": ("i", 2**31 - 1)}
    chosen = []
    for steps, names in ((row_steps, list(widths)), (column_steps, list(widths)[1:])):
        chosen.append(next(n for n in names if max(steps, default=0) <= widths[n][1]))
    return {"row_dtype": chosen[0], "col_dtype": chosen[1]}, [
        packed(row_steps, widths[chosen[0]][0]),
        packed(column_steps, widths[chosen[1]][0]),
        values,
    ]


def grail_data(old: Tensors, new: Tensors, layout: str) -> bytes:
    """The binary of a delta of grail's, before zstd."""
    entries = []
    data = b""
    for name in sorted(new):
        if new[name] == old[name]:
            continue
        dtype, shape, _ = new[name]
        extra, (index, columns, values) = grail_arrays(old[name], new[name], layout)
        entry = {
            "name": name,
            "shape": list(shape),
            "num_nonzero": len(values) // WIDTHS[dtype],
            "value_dtype": GRAIL_DTYPES[dtype],
            **extra,
            "indices_offset": len(data),
            "indices_size": len(index) + len(columns),
        }
        if layout != "v2":
            entry |= {"rows_size": len(index), "cols_size": len(columns)}
        data += index + columns
        entry |= {"values_offset": len(data), "values_size": len(values)}
        data += values
        entries.append(entry)
    return grail_file({"v2": 2, "v3": 3, "v3.1": 31}[layout], entries, data)


def grail_file(version: Any, entries: Any, data: bytes) -> bytes:
    """Length, header and data."""
    header = json.dumps({"version": version, "tensors": entries}, separators=(",", ":")).encode()
    return len(header).to_bytes(4, "little") + header + data


def weights_hash(tensors: Tensors) -> str:
    """grail's hash of all weights."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        hasher.update(name.encode())
        hasher.update(f"torch.{TORCH_DTYPES[dtype]}".encode())
        hasher.update(str(tuple(shape)).encode())
        hasher.update(data)
    return hasher.hexdigest()


def grail_folder(
    folder: Path,
    packed: bytes,
    *,
    layout: str,
    window: int,
    before: int,
    said: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """``DELTA`` of a window of a chain, and its ``READY-``."""
    delta = folder / f"checkpoint-{window}" / "DELTA"
    delta.mkdir(parents=True)
    (delta / "delta_sparse.bin.zst").write_bytes(packed)
    weights = {
        "format": f"sparse_codec_{layout}",
        "threshold": 0.0,
        "prev_window": before,
        "anchor_window": 0,
        **(said or {}),
    }
    (delta / "delta_metadata.json").write_text(json.dumps(weights))
    manifest = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in delta.iterdir()
    }
    metadata = {
        "window": window,
        "file_manifest": manifest,
        "checkpoint_type": "DELTA",
        "prev_window": before,
        "anchor_window": 0,
        "model_name": "async_trainer_snapshot",
        **(more or {}),
    }
    (delta / "metadata.json").write_text(json.dumps(metadata))
    (delta / "manifest.sig").write_text("00")
    (delta / "DELTA").write_text("")
    (delta.parent / f"READY-{window + 100}").write_text("")
    return delta


def write_grail(
    folder: Path, old: Tensors, new: Tensors, layout: str, window: int, before: int
) -> Path:
    """A sound delta of grail's."""
    packed = zstd.compress(grail_data(old, new, layout), 1)
    hashed = {"weights_hash": weights_hash(new)}
    return grail_folder(folder, packed, layout=layout, window=window, before=before, more=hashed)


def read_grail(delta: Path, base: Tensors) -> dict[str, Tensor]:
    """What a delta of grail's makes of a base, with all that its consumers check."""
    metadata = json.loads((delta / "metadata.json").read_text())
    assert metadata["checkpoint_type"] == "DELTA"
    for name, digest in metadata["file_manifest"].items():
        assert hashlib.sha256((delta / name).read_bytes()).hexdigest() == digest
    said = json.loads((delta / "delta_metadata.json").read_text())
    packed = (delta / "delta_sparse.bin.zst").read_bytes()
    assert zstd.get_frame_info(packed).decompressed_size is not None
    file = zstd.decompress(packed)
    start = 4 + int.from_bytes(file[:4], "little")
    header = json.loads(file[4:start])
    layout = {2: "v2", 3: "v3", 31: "v3.1"}[header["version"]]
    assert said["format"] == f"sparse_codec_{layout}"
    data = file[start:]
    new = dict(base)
    for entry in header["tensors"]:
        old = base[entry["name"]]
        assert entry["shape"] == list(old[1]) == said["shapes"][entry["name"]]
        assert entry["value_dtype"] == GRAIL_DTYPES[old[0]]
        width, count = WIDTHS[old[0]], entry["num_nonzero"]
        at = entry["indices_offset"]
        values = data[entry["values_offset"] :][: entry["values_size"]]
        assert len(values) == count * width
        if layout == "v2":
            steps = struct.unpack(f"<{count}i", data[at : at + entry["indices_size"]])
            pairs = [(step, None) for step in steps]
        else:
            codes = {"int32": "i", "uint16": "H", "uint8": "B"}
            first = codes[entry.get("row_dtype", "int32")]
            second = codes[entry.get("col_dtype", "int32")]
            middle = at + entry["rows_size"]
            rows = struct.unpack(f"<{count}{first}", data[at:middle])
            columns = struct.unpack(f"<{count}{second}", data[middle:][: entry["cols_size"]])
            pairs = list(zip(rows, columns, strict=True))
        changed = []
        row = column = 0
        for number, (step, column_step) in enumerate(pairs):
            row += step
            position = row
            if column_step is not None:
                column = column_step if step or not number else column + column_step
                position = row * row_length(old[1]) + column
            changed.append((position, values[number * width : (number + 1) * width]))
        new[entry["name"]] = with_changes(old, changed)
    if metadata["weights_hash"] is not None:
        assert weights_hash(new) == metadata["weights_hash"]
    return new
