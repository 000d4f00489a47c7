"""Targets `places` and `index_map`: what a host and an engine's ranks read of each other."""

from __future__ import annotations

import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from fuzz.target import Target, require
from thinwire.codec.delta import ChunkChanges
from thinwire.codec.digest import CHUNK_WORDS, xxh3_64
from thinwire.codec.dtypes import MAX_TENSOR_BYTES
from thinwire.engines.places import MAGIC, PlacesFile, read_places
from thinwire.errors import ThinwireError

_DIGEST_BYTES = 8
_MAP_MAGIC = b"TWMAP01\n"


@cache
def _folder() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """A folder of this process; the second element keeps it until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="thinwire-fuzz-engine-")
    return Path(folder.name), folder


def _sealed(content: bytes) -> bytes:
    return content + struct.pack("<Q", xxh3_64(np.frombuffer(content, np.uint8)))


def _run_places(data: bytes) -> None:
    path = _folder()[0] / "input.places"
    path.write_bytes(data)
    try:
        blocks = list(read_places(path))
    except ThinwireError:
        return
    for block in blocks:
        if block.positions is None:
            continue
        positions = block.positions.astype(np.int64)
        require(bool((np.diff(positions) > 0).all()), "positions that do not rise were taken")
        require(bool((positions < CHUNK_WORDS).all()), "a position beyond a chunk was taken")
        require(0 <= block.first_word < MAX_TENSOR_BYTES, "a block beyond any tensor was taken")


def _mutate_places(data: bytes, random: Random) -> bytes:
    if random.random() < 0.2:
        return mutate_bytes(data, random)
    content = data[len(MAGIC) : -_DIGEST_BYTES]
    if random.random() < 0.4:
        name = random.choice([b"a", b"", b"\xff", b"b" * 300])
        count = random.randint(0, 4)
        words = sorted(random.sample(range(12), count))
        first = random.choice([0, 7, 1 << 47, (1 << 64) - 1])
        fixed = struct.pack("<H", len(name)) + name + struct.pack("<QI", first, count)
        content += fixed + struct.pack(f"<{count}I", *words)
    else:
        content = mutate_bytes(content, random)
    return _sealed(MAGIC + content)


def _seeds_places() -> dict[str, bytes]:
    seeds = {}
    for name, is_whole in (("changes", False), ("whole", True)):
        path = _folder()[0] / "seed.places"
        places = PlacesFile(path)
        positions = np.array([0, 3, 1000], np.uint32)
        places.add(ChunkChanges("a.weight", 1 << 20, positions, np.zeros(6, np.uint8), 2))
        if is_whole:
            places.add_whole("b.weight", 64)
        places.seal()
        places.close()
        seeds[name] = path.read_bytes()
    return seeds


def _run_index_map(data: bytes) -> None:
    try:
        from thinwire.torch.map_file import read_map
    except ModuleNotFoundError:  # torch is not installed: nobody reads such files
        return
    path = _folder()[0] / "input.map"
    path.write_bytes(data)
    found = read_map(path)
    if found is None:
        return
    sizes = [count for _, count in found.tensors.values()]
    rooms = [count for _, count in found.parameters.values()]
    for (
        tensor,
        parameter,
        source,
        start,
        length,
        step,
        repeat,
        source_jump,
        jump,
    ) in found.runs.tolist():
        last = source + (length - 1) * step + (repeat - 1) * source_jump
        require(0 <= source <= last < sizes[tensor], "a run beyond its tensor was taken")
        end = start + (length - 1) + (repeat - 1) * jump
        require(0 <= start <= end < rooms[parameter], "a run beyond its parameter was taken")


def _map_bytes(head: bytes, rows: bytes) -> bytes:
    return _sealed(_MAP_MAGIC + struct.pack("<I", len(head)) + head + rows)


def _mutate_index_map(data: bytes, random: Random) -> bytes:
    if random.random() < 0.2 or len(data) < len(_MAP_MAGIC) + 4 + _DIGEST_BYTES:
        return mutate_bytes(data, random)
    (head_bytes,) = struct.unpack_from("<I", data, len(_MAP_MAGIC))
    first = len(_MAP_MAGIC) + 4
    head = data[first : first + head_bytes]
    rows = data[first + head_bytes : -_DIGEST_BYTES]
    choice = random.random()
    if choice < 0.3:
        try:
            value = msgspec.json.decode(head)
        except msgspec.MsgspecError:
            return mutate_bytes(data, random)
        return _map_bytes(json_bytes(mutate_json(value, random), random), rows)
    if choice < 0.7:
        numbers = [random.choice([0, 1, 2, 3, 8, 99, -1, 1 << 40, (1 << 63) - 1]) for _ in range(9)]
        return _map_bytes(head, rows + struct.pack("<9q", *numbers))
    return _map_bytes(head, mutate_bytes(rows, random))


def _seeds_index_map() -> dict[str, bytes]:
    head = {
        "tensors": [["a", "BF16", 100], ["b", "BF16", 100]],
        "parameters": [["ab", "BF16", 200]],
        "refused": {"c": "for a reason"},
    }
    rows = [[0, 0, 0, 0, 100, 1, 1, 1, 1], [1, 0, 0, 100, 10, 10, 10, 1, 10]]
    packed = b"".join(struct.pack("<9q", *row) for row in rows)
    return {"two": _map_bytes(msgspec.json.encode(head), packed)}


PLACES = Target("places", _run_places, _mutate_places, _seeds_places)
INDEX_MAP = Target("index_map", _run_index_map, _mutate_index_map, _seeds_index_map)
