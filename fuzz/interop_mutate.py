"""Damage behind the outer layers: safetensors files, compressed payloads, runs of numbers."""

from __future__ import annotations

import bz2
import json
import sys
import zlib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from fuzz.mutate import INTEGERS, TEXTS, json_bytes, mutate_bytes, mutate_json

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# What a mutation unpacks at most; the readers' own bounds are what the targets are for.
_MAX_PLAIN_BYTES = 1 << 16
_BOMB_BYTES = 1 << 20
_DTYPES = ["U8", "I8", "I32", "U16", "U32", "BF16", "F32", "F8_E4M3", "I64", "F4", "BOOL", "X"]
FILE_NAMES = [
    "../../base/model.safetensors",
    "../../../base/model.safetensors",
    "x.safetensors",
    ".x.safetensors",
    "w",
]
FILE_NAMES += ["a/../x.safetensors", "model.safetensors", "/etc/hostname", "\udc80.safetensors"]

# What comes of reading fields in JSON of any shape.
ODD_VALUES = (
    TypeError,
    LookupError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)


class Weights(NamedTuple):
    """A safetensors file taken apart: its metadata, and dtype, shape and bytes by name."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], bytes]]


def take_json(data: bytes | None) -> Any:
    """The value of a JSON text, or None."""
    try:
        return json.loads(data or b"")
    except (ValueError, RecursionError):
        return None


def take_weights(data: bytes | None) -> Weights | None:
    """Take a safetensors file apart, leniently; None: it is too far from one."""
    data = data or b""
    size = int.from_bytes(data[:8], "little")
    header, body = take_json(data[8 : 8 + size]), data[8 + size :]
    try:
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], body[start:stop])
    except ODD_VALUES:
        return None
    return Weights(metadata, tensors) if isinstance(metadata, dict) else None


def put_weights(weights: Weights) -> bytes:
    """A safetensors file, its offsets right."""
    header: dict[str, Any] = {"__metadata__": weights.metadata} if weights.metadata else {}
    stop = 0
    for name, (dtype, shape, data) in weights.tensors.items():
        start, stop = stop, stop + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in weights.tensors.values())
    return len(text).to_bytes(8, "little") + text + body


def mutate_header(data: bytes, random: Random) -> bytes:
    """Another header before the same tensors; its length mostly right."""
    size = int.from_bytes(data[:8], "little")
    header = take_json(data[8 : 8 + size])
    if not isinstance(header, dict):
        return mutate_bytes(data, random)
    text = json_bytes(mutate_table(header, random), random)
    claimed = len(text) + (random.choice([-1, 1, 8, 2**32, 2**63]) if random.random() < 0.1 else 0)
    return (claimed % 2**64).to_bytes(8, "little") + text + data[8 + size :]


def mutate_weights(
    data: bytes, random: Random, mutate_payload: Callable[[bytes, Random], bytes]
) -> bytes:
    """Another safetensors file: mostly a sound one with other tensors in it."""
    weights = take_weights(data)
    if weights is None or not weights.tensors or random.random() < 0.05:
        return mutate_bytes(data, random)
    if random.random() < 0.15:
        return mutate_header(data, random)
    tensors = weights.tensors
    name = random.choice(list(tensors))
    dtype, shape, payload = tensors[name]
    match random.randrange(24):
        case 0:
            del tensors[name]
        case 1:
            other = random.choice(list(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
        case 2:
            tensors[random.choice([*TEXTS, *"qwfhesp"])] = tensors[name]
        case 3:
            tensors[name] = (random.choice(_DTYPES), shape, payload)
        case 4:
            tensors[name] = (dtype, mutate_json(shape, random, 1), payload)
        case 5:
            return put_weights(Weights(mutate_table(weights.metadata, random), tensors))
        case _:
            payload = mutate_payload(payload, random)
            tensors[name] = (dtype, shape, payload)
            if dtype == "U8" and isinstance(shape, list):
                tensors[name] = (dtype, [len(payload)], payload)
    return put_weights(weights)


def flip_some(data: bytes, random: Random) -> bytes:
    """``data`` with one to six bytes replaced: its size stays."""
    # Of a number, which damage may have put here, bytearray() alone would make as many zeros.
    changed = bytearray(memoryview(data))
    for _ in range(random.randint(1, 6) if data else 0):
        changed[random.randrange(len(data))] = random.choice([0, 1, 255, random.randrange(256)])
    return bytes(changed)


def mutate_numbers(data: bytes, width: int, random: Random, new_width: int = 0) -> bytes:
    """A run of unsigned numbers with some replaced, dropped or added, maybe in other widths."""
    count = len(data) // width
    numbers = [int.from_bytes(data[i * width : (i + 1) * width], "little") for i in range(count)]
    for _ in range(random.randint(1, 3)):
        at = random.randrange(count + 1) if count else 0
        value = random.choice([*INTEGERS, random.randrange(400)])
        choice = random.random()
        if choice < 0.8 and at < len(numbers):
            numbers[at] = value
        elif choice < 0.9:
            numbers.insert(at, value)
        elif at < len(numbers):
            del numbers[at]
    return put_numbers(numbers, new_width or width)


def put_numbers(numbers: list[int], width: int) -> bytes:
    """Numbers in so many bytes each, cut to fit."""
    return b"".join((number % (1 << 8 * width)).to_bytes(width, "little") for number in numbers)


def unpack_zstd(data: bytes) -> bytes | None:
    """What is in a zstd frame, bounded; None: nothing that can be had."""
    try:
        unpacker = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
        return bytes(unpacker.decompress(data, max_length=_MAX_PLAIN_BYTES))
    except (zstd.ZstdError, ValueError, EOFError):
        return None


def pack_zstd(plain: bytes, random: Random) -> bytes:
    """A zstd frame, now and then one that only the format's text knows, or not quite one."""
    packed = bytes(zstd.compress(plain, random.choice([1, 3])))
    match random.randrange(60):
        case 0:
            # Says no size.
            packer = zstd.ZstdCompressor(1)
            return bytes(packer.compress(plain) + packer.flush())
        case 1:
            claimed = random.choice([len(plain), len(plain) + 1, *INTEGERS]) % 2**64
            return _raw_frame(plain, claimed)
        case 2:
            return packed + bytes(zstd.compress(plain, 1))
        case 3:
            return b"\x50\x2a\x4d\x18\x04\0\0\0skip" + packed
        case 4:
            return packed + b"\0"
        case 5:
            return packed[: random.randrange(len(packed))]
        case 6:
            return mutate_bytes(packed, random, 1)
        case 7:
            return bytes(zstd.compress(bytes(random.choice([_BOMB_BYTES, 4 * _BOMB_BYTES])), 1))
        case 8:
            options: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
            return bytes(zstd.compress(plain, options=options))
    return packed


def _raw_frame(plain: bytes, claimed: int) -> bytes:
    """A frame of one segment of raw bytes that claims to hold ``claimed`` of them."""
    blocks = []
    size = 1 << 16
    pieces = [plain[at : at + size] for at in range(0, len(plain), size)] or [b""]
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        blocks.append((len(piece) << 3 | is_last).to_bytes(3, "little") + piece)
    return b"\x28\xb5\x2f\xfd\xe0" + claimed.to_bytes(8, "little") + b"".join(blocks)


def unpack_zlib(data: bytes) -> bytes | None:
    """Likewise, for zlib."""
    try:
        return zlib.decompressobj().decompress(data, _MAX_PLAIN_BYTES)
    except zlib.error:
        return None


def pack_zlib(plain: bytes, random: Random) -> bytes:
    """Likewise, for zlib."""
    packed = zlib.compress(plain)
    match random.randrange(30):
        case 0:
            return zlib.compress(bytes(_BOMB_BYTES))
        case 1:
            return packed + packed
        case 2:
            return packed[: random.randrange(len(packed))]
        case 3:
            return mutate_bytes(packed, random, 1)
        case 4:
            packer = zlib.compressobj(wbits=random.choice([-15, 31, 9]))
            return packer.compress(plain) + packer.flush()
        case 5:
            return zlib.compress(plain, random.choice([0, 9]))
    return packed


def unpack_bz2(data: bytes) -> bytes | None:
    """Likewise, for bz2."""
    try:
        return bz2.BZ2Decompressor().decompress(data, _MAX_PLAIN_BYTES)
    except (OSError, ValueError, EOFError):
        return None


def pack_bz2(plain: bytes, random: Random) -> bytes:
    """Likewise, for bz2."""
    packed = bz2.compress(plain)
    match random.randrange(30):
        case 0:
            return bz2.compress(bytes(_BOMB_BYTES), 1)
        case 1:
            return packed + packed
        case 2:
            return packed[: random.randrange(len(packed))]
        case 3:
            return mutate_bytes(packed, random, 1)
    return packed


def mutate_files(files: list[bytes | None], random: Random) -> list[bytes | None]:
    """A delta with a file missing, twice, or in another's place; rarely of use, so rarely done."""
    at, other = random.randrange(len(files)), random.randrange(len(files))
    match random.randrange(4):
        case 0:
            files[at] = None
        case 1:
            files[at] = files[other]
        case 2:
            files[at], files[other] = files[other], files[at]
        case _:
            files[at] = mutate_bytes(files[at] or b"", random)
    return files


def mutate_text(data: bytes | None, random: Random) -> bytes:
    """Another JSON text; also with names of files in it that no delta may name."""
    value = take_json(data)
    if value is None or random.random() < 0.05:
        return mutate_bytes(data or b"{}", random)
    if random.random() < 0.1:
        return json_bytes(_with_file_name(value, random), random)
    return json_bytes(mutate_table(value, random), random)


def mutate_table(value: Any, random: Random) -> Any:
    """Another JSON value; of a table mostly a table."""
    changed = mutate_json(value, random)
    while type(changed) is not type(value) and random.random() < 0.95:
        changed = mutate_json(value, random)
    return changed


def _with_file_name(table: Any, random: Random) -> Any:
    """An index or a manifest that also names a file that no delta may name."""
    name = random.choice(FILE_NAMES)
    if not isinstance(table, dict):
        return table
    match table:
        case {"payload_files": list(names)}:
            names.append(name)
        case {"file_manifest": dict(digests)}:
            digests[name] = "0" * 64
        case {"weight_map": dict(homes)} if homes:
            homes[random.choice(list(homes))] = name
    return table
