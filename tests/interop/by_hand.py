"""slime's and SkyRL's deltas, written and read from their descriptions alone.

Nothing of thinwire is imported here: what it writes must be read by these readers, and what these
writers write by it. A tensor is its dtype (as safetensors calls it), its shape and its bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Tensor = tuple[str, Sequence[int], bytes]
Tensors = Mapping[str, Tensor]
Payload = tuple[str, bytes, str]

INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"

HASHES: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: format(zlib.adler32(data), "08x"),
    "decimal adler32": lambda data: str(zlib.adler32(data)),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}
TORCH = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
TORCH |= {"I64": "int64", "U8": "uint8", "BOOL": "bool", "F64": "float64", "I8": "int8"}
TORCH |= {"F8_E5M2": "float8_e5m2", "I32": "int32", "U16": "uint16", "I16": "int16"}
TORCH |= {"U32": "uint32", "U64": "uint64"}


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = raw[8 + length :]
    tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert 0 <= start <= stop <= len(data)
        tensors[name] = (entry["dtype"], entry["shape"], data[start:stop])
    return tensors, metadata


def safetensors(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    stop = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [stop, stop + len(data)],
        }
        stop += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def xor(old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    return (np.frombuffer(old, "u1") ^ np.frombuffer(new, "u1")).tobytes()


def overwrite(old: bytes, new: bytes) -> bytes:
    changed = [at for at, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return struct.pack(f"<I{len(changed)}I", len(changed), *changed) + bytes(
        new[at] for at in changed
    )


def overwritten(old: bytes, payload: bytes) -> bytes:
    (count,) = struct.unpack_from("<I", payload)
    positions = struct.unpack_from(f"<{count}I", payload, 4)
    values = payload[4 + 4 * count :]
    assert len(values) == count
    new = bytearray(old)
    for position, value in zip(positions, values, strict=True):
        new[position] = value
    return bytes(new)


def slime_payloads(old: Tensors, new: Tensors, encoding: str, checksum: str) -> list[Payload]:
    """Of each changed tensor the name, the payload and the checksum."""
    encode = {"xor": xor, "overwrite": overwrite}[encoding]
    return [
        (name, zstd.compress(encode(old[name][2], data), 1), HASHES[checksum](data))
        for name, (_, _, data) in new.items()
        if data != old[name][2]
    ]


def write_slime(
    folder: Path,
    payloads: Sequence[Payload],
    *,
    version: Any = "000001",
    base_version: Any = "000000",
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    files: int = 1,
) -> Path:
    """The folder of one delta, its payloads dealt out to so many files."""
    folder.mkdir(parents=True)
    dealt = [payloads[number::files] for number in range(files)]
    dealt = [rows for rows in dealt if rows]
    places = {}
    for number, rows in enumerate(dealt):
        file_name = f"model-{number:05d}-of-{len(dealt):05d}.safetensors"
        tensors = {name: ("U8", [len(data)], data) for name, data, _ in rows}
        content = safetensors(tensors, {name: text for name, _, text in rows})
        (folder / file_name).write_bytes(content)
        places |= {name: file_name for name, _, _ in rows}
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum.removeprefix("decimal "),
    }
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": places}))
    return folder


def read_slime(folder: Path, base: Tensors, base_version: int) -> dict[str, Tensor]:
    """What slime's receiver makes of a folder: a full version, or the base with a delta applied."""
    index = json.loads((folder / INDEX).read_text())
    metadata = index["metadata"]
    found: dict[str, tuple[str, Tensor, dict[str, str]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors, checksums = read_safetensors(path)
        for name, tensor in tensors.items():
            assert name not in found
            found[name] = path.name, tensor, checksums
    assert index["weight_map"] == {name: row[0] for name, row in found.items()}
    if "delta_encoding" not in metadata:
        return {name: tensor for name, (_, tensor, _) in found.items()}
    assert metadata["base_version"] == f"{base_version:06d}"
    assert int(metadata["version"]) == base_version + 1
    assert folder.name == "weight_v" + metadata["version"]
    assert metadata["compression_format"] == "zstd"
    total = len(set(index["weight_map"].values()))
    expected = {f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(total)}
    assert set(index["weight_map"].values()) == expected
    result = dict(base)
    for name, (_, (dtype, shape, payload), checksums) in found.items():
        assert (dtype, shape) == ("U8", [len(payload)])
        old_dtype, old_shape, old = base[name]
        plain = zstd.decompress(payload)
        decode = {"xor": xor, "overwrite": overwritten}[metadata["delta_encoding"]]
        new = decode(old, plain)
        assert new != old, "a tensor that did not change"
        assert HASHES[metadata["checksum_format"]](new) == checksums[name]
        result[name] = (old_dtype, old_shape, new)
    return result


def skyrl_record(
    name: str, old: Tensor, new: Tensor, checksum: str
) -> tuple[dict[str, Any], bytes]:
    payload = zstd.compress(xor(old[2], new[2]), 1)
    record = {
        "name": name,
        "dtype": TORCH[new[0]],
        "shape": list(new[1]),
        "uncompressed_num_bytes": len(new[2]),
        "compressed_num_bytes": len(payload),
        "payload_file": "",
        "payload_key": name,
        "checksum": HASHES[checksum](new[2]),
        "checksum_algorithm": checksum,
    }
    return record, payload


def write_skyrl(
    folder: Path,
    old: Tensors,
    new: Tensors,
    *,
    version: int = 1,
    base_version: int = 0,
    checksum: str = "xxh3-128",
    files: int = 1,
    legacy: bool = False,
) -> Path:
    """The folder of one delta; ``legacy`` as the first release wrote its records and names."""
    folder.mkdir(parents=True)
    rows = [
        skyrl_record(name, old[name], tensor, "sha256" if legacy else checksum)
        for name, tensor in new.items()
        if tensor[2] != old[name][2]
    ]
    stem = "payload-rank000000" if legacy else "delta-rank00000"
    names = []
    for number in range(files):
        mine = rows[number::files]
        if not mine:
            continue
        names.append(f"{stem}-file{number:06d}.safetensors")
        for record, _ in mine:
            record["payload_file"] = names[-1]
            if legacy:
                record["sha256"] = record.pop("checksum")
                del record["checksum_algorithm"]
        tensors = {row["payload_key"]: ("U8", [len(data)], data) for row, data in mine}
        (folder / names[-1]).write_bytes(safetensors(tensors))
    records = [record for record, _ in rows]
    manifest = {
        "version": version,
        "base_version": base_version,
        "tensors": records,
        "total_uncompressed_num_bytes": sum(row["uncompressed_num_bytes"] for row in records),
        "total_compressed_num_bytes": sum(row["compressed_num_bytes"] for row in records),
        "payload_files": names,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def read_skyrl(folder: Path, base: Tensors, base_version: int) -> dict[str, Tensor]:
    """What SkyRL's receiver makes of a folder and the base."""
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["version"], manifest["base_version"]) == (base_version + 1, base_version)
    assert folder.name == f"delta-{base_version + 1:08d}"
    fields = {"name", "dtype", "shape", "uncompressed_num_bytes", "compressed_num_bytes"}
    fields |= {"payload_file", "payload_key", "checksum", "checksum_algorithm"}
    files = {name: read_safetensors(folder / name)[0] for name in manifest["payload_files"]}
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *files}
    result = dict(base)
    total = [0, 0]
    for record in manifest["tensors"]:
        assert record.keys() == fields
        dtype, shape, old = base[record["name"]]
        assert (TORCH[dtype], list(shape)) == (record["dtype"], record["shape"])
        _, _, payload = files[record["payload_file"]][record["payload_key"]]
        assert len(payload) == record["compressed_num_bytes"]
        plain = zstd.decompress(payload)
        assert len(plain) == record["uncompressed_num_bytes"]
        new = xor(old, plain)
        assert HASHES[record["checksum_algorithm"]](new) == record["checksum"]
        result[record["name"]] = (dtype, shape, new)
        total[0] += len(plain)
        total[1] += len(payload)
    assert total == [
        manifest["total_uncompressed_num_bytes"],
        manifest["total_compressed_num_bytes"],
    ]
    return result
