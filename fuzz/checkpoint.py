"""Targets `safetensors`, `weight_index` and `redo_log`: the files of a checkpoint folder."""

from __future__ import annotations

import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from fuzz.target import Target, require
from thinwire.checkpoint.file_names import INDEX_NAME, SINGLE_FILE, name_fault
from thinwire.checkpoint.folder import Checkpoint
from thinwire.checkpoint.redo_log import (
    LOG_NAME,
    MAGIC,
    Block,
    FileSize,
    RedoHead,
    RedoLog,
    RedoWriter,
)
from thinwire.checkpoint.safetensors_file import SafetensorsFile, parse_header
from thinwire.codec.digest import xxh3_64
from thinwire.codec.dtypes import byte_count
from thinwire.errors import ThinwireError


@cache
def _folder(name: str) -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """A folder of this process; the second element keeps it until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix=f"thinwire-fuzz-{name}-")
    return Path(folder.name), folder


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# ---------------------------------------------------------------- safetensors


def _safetensors(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + byte_count(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(i % 251 for i in range(start))


def _run_safetensors(data: bytes) -> None:
    path = _folder("safetensors")[0] / "model.safetensors"
    path.write_bytes(data)
    try:
        file = SafetensorsFile.open(path)
    except ThinwireError:
        file = None
    try:
        parse_header(data, "the input")
    except ThinwireError:
        pass
    else:
        require(file is not None or len(data) > 8, "a header without its tensors is a whole file")
    if file is None:
        return
    at = len(file.header_bytes)
    require(data.startswith(file.header_bytes), "the header is not that of the file")
    for name, tensor in file.tensors.items():
        require(tensor.data.size == byte_count(tensor.dtype, tensor.shape), f"{name!r} is cut")
        require(tensor.data.tobytes() == data[at : at + tensor.data.size], f"{name!r} is elsewhere")
        at += tensor.data.size
    require(at == len(data), "bytes belong to no tensor")


def _mutate_safetensors(data: bytes, random: Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = _parse(data[8 : 8 + size])
    if not isinstance(header, dict) or random.random() < 0.15:
        return mutate_bytes(data, random)
    text, tail = json_bytes(mutate_json(header, random), random), data[8 + size :]
    if random.random() < 0.3:
        tail = mutate_bytes(tail, random, 1)
    claimed = len(text) + (random.choice([-1, 1, 8, 2**32, 2**63]) if random.random() < 0.1 else 0)
    return (claimed % 2**64).to_bytes(8, "little") + text + tail


def _seeds_safetensors() -> dict[str, bytes]:
    several = {"a": ("BF16", [2, 3]), "b.c": ("F32", []), "empty": ("U8", [0]), "f4": ("F4", [6])}
    return {
        "several": _safetensors(several, {"format": "pt"}),
        "one": _safetensors({"w": ("F8_E4M3", [5])}, {}),
        "none": _safetensors({}, {}),
        "wide": _safetensors({f"layers.{i}.w": ("I64", [1, i]) for i in range(12)}, {}),
    }


# ---------------------------------------------------------------- the index of a sharded folder

_SHARDS = {
    "model-00001-of-00002.safetensors": {"a": ("U8", [2]), "b": ("U8", [1])},
    "model-00002-of-00002.safetensors": {"c": ("U8", [3])},
}


@cache
def _sharded() -> Path:
    folder = _folder("index")[0]
    for name, tensors in _SHARDS.items():
        (folder / name).write_bytes(_safetensors(tensors, {}))
    return folder


def _run_weight_index(data: bytes) -> None:
    folder = _sharded()
    (folder / INDEX_NAME).write_bytes(data)
    try:
        checkpoint = Checkpoint.open(folder)
    except ThinwireError:
        return
    require(sorted(checkpoint.tensors) == ["a", "b", "c"], "tensors appeared or vanished")
    for name, file_name in json.loads(data)["weight_map"].items():
        require(name in _SHARDS.get(file_name, {}), f"{name!r} is not in {file_name!r}")


def _mutate_weight_index(data: bytes, random: Random) -> bytes:
    value = _parse(data)
    if value is None or random.random() < 0.1:
        return mutate_bytes(data, random)
    return json_bytes(mutate_json(value, random), random)


def _seeds_weight_index() -> dict[str, bytes]:
    homes = {name: file for file, tensors in _SHARDS.items() for name in tensors}
    full = {"metadata": {"total_size": 6}, "weight_map": homes}
    return {"full": json.dumps(full, indent=2).encode(), "empty": b'{"weight_map": {}}'}


# ---------------------------------------------------------------- the redo log

_BLOCK = struct.Struct("<IQBI")


def _run_redo_log(data: bytes) -> None:
    folder = _folder("redo")[0]
    (folder / LOG_NAME).write_bytes(data)
    try:
        log = RedoLog(folder)
        blocks = list(log.blocks())
    except ThinwireError:
        return
    head = log.head
    for name in [file.name for file in [*head.patched, *head.replaced]] + head.removed:
        plain = name == SINGLE_FILE and name not in head.removed
        require(plain or name_fault(name) is None, f"the log reaches {name!r}")
    for block in blocks:
        require(block.file_number < len(head.patched), "a block is of no file")
        require(block.word_bytes in (1, 2, 4, 8), "words of an unknown width")
        require(block.words.size == block.positions.size * block.word_bytes, "a block is cut")
        if not block.positions.size:
            continue
        places = block.positions.astype(np.int64)
        require(bool((np.diff(places) > 0).all()), "positions do not rise")
        end = block.offset + (int(places[-1]) + 1) * block.word_bytes
        require(end <= head.patched[block.file_number].size, "a block lies outside its file")


def _seal_log(head: bytes, blocks: bytes) -> bytes:
    body = MAGIC + struct.pack("<I", len(head)) + head + blocks
    return body + struct.pack("<Q", xxh3_64(body))


def _mutate_redo_log(data: bytes, random: Random) -> bytes:
    if len(data) < 20 or random.random() < 0.1:
        return mutate_bytes(data, random)
    (head_bytes,) = struct.unpack_from("<I", data, 8)
    head, blocks = data[12 : 12 + head_bytes], data[12 + head_bytes : -8]
    value = _parse(head)
    if value is not None and random.random() < 0.4:
        return _seal_log(json_bytes(mutate_json(value, random), random), blocks)
    if random.random() < 0.4:
        return _seal_log(head, blocks + _random_block(random))
    return _seal_log(head, mutate_bytes(blocks, random))


def _random_block(random: Random) -> bytes:
    count, word_bytes = random.randint(0, 4), random.choice([0, 1, 2, 3, 4, 8])
    positions = sorted(random.sample(range(12), count))
    if random.random() < 0.3:
        random.shuffle(positions)
    fixed = _BLOCK.pack(random.randint(0, 2), random.randint(0, 40), word_bytes, count)
    return fixed + struct.pack(f"<{count}I", *positions) + random.randbytes(word_bytes * count)


def _seeds_redo_log() -> dict[str, bytes]:
    sizes = [FileSize("model-1.safetensors", 64), FileSize("model-2.safetensors", 40)]
    patching = RedoHead("00112233aabbccdd", sizes, [FileSize("config.json", 2)], ["old.txt"])
    single = RedoHead("00", [FileSize(SINGLE_FILE, 64)], [], [])
    words = np.arange(8, dtype=np.uint8)
    blocks = [
        Block(0, 10, 2, np.array([0, 3, 4, 20], np.uint32), words),
        Block(1, 32, 8, np.array([0], np.uint32), words),
        Block(0, 0, 1, np.array([], np.uint32), words[:0]),
    ]
    inputs = {"patching": (patching, blocks), "single": (single, blocks[:1])}
    inputs["empty"] = (RedoHead("", [], [], []), [])
    seeds = {}
    for name, (head, content) in inputs.items():
        with tempfile.TemporaryDirectory() as folder:
            with RedoWriter(Path(folder), head) as log:
                for block in content:
                    log.add(block)
                log.finish()
            seeds[name] = (Path(folder) / LOG_NAME).read_bytes()
    return seeds


SAFETENSORS = Target("safetensors", _run_safetensors, _mutate_safetensors, _seeds_safetensors)
WEIGHT_INDEX = Target("weight_index", _run_weight_index, _mutate_weight_index, _seeds_weight_index)
REDO_LOG = Target("redo_log", _run_redo_log, _mutate_redo_log, _seeds_redo_log)
