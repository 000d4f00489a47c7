"""Small models, read and written without thinwire, and a store whose clock stands still."""

from __future__ import annotations

import hashlib
import json
import math
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from thinwire.errors import AlreadyExists, LimitExceeded, NotFound, Truncated
from thinwire.store import Entry, Store, StoreWrapper

# Two tensors that a partial follower can have without each other, and three that share a group.
# MORE may come and go with a change of the layout.
SHAPES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layers.0.weight": (np.float16, (700, 100)),
    "layers.1.weight": (np.float16, (68_000,)),
    "norm": (np.float16, (77,)),
    "scale": (np.float32, (5, 3)),
    "ids": (np.int64, (4,)),
}
MORE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layers.1.more": (np.float16, (66_000,)),
    "bias": (np.float32, (3,)),
}
_DTYPES = {"float16": "F16", "float32": "F32", "int64": "I64"}

Arrays = dict[str, np.ndarray]
Files = dict[str, bytes]


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds: a digest of every tensor's bits, and its small files."""

    tensors: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def part(self, pattern: str) -> Content:
        """What a partial follower has: what it asked for, and what is too small to be alone."""
        return Content(
            {
                name: row
                for name, row in self.tensors.items()
                if fnmatchcase(name, pattern) or math.prod(json.loads(row.split("|")[1])) < 1 << 16
            },
            self.files,
        )


def first_arrays(
    seed: int = 0, shapes: Mapping[str, tuple[Any, tuple[int, ...]]] = SHAPES
) -> Arrays:
    """A model of random bits."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, (dtype, shape) in shapes.items():
        if np.issubdtype(dtype, np.floating):
            arrays[name] = rng.normal(0, 0.02, shape).astype(dtype)
        else:
            arrays[name] = rng.integers(0, 9, shape).astype(dtype)
    return arrays


def stepped(arrays: Arrays, seed: int, share: float = 0.01) -> Arrays:
    """The model after a step: about ``share`` of the elements differ, at least one of each."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, array in arrays.items():
        copy = array.copy().reshape(-1)
        words = copy.view(f"u{copy.itemsize}")
        chosen = rng.random(words.size) < share
        chosen[rng.integers(words.size)] = True
        words[chosen] ^= rng.integers(1, 4, int(chosen.sum())).astype(words.dtype)
        new[name] = copy.reshape(array.shape)
    return new


def row_of(dtype: str, shape: Iterable[int], data: bytes) -> str:
    return f"{dtype}|{list(shape)}|{hashlib.sha256(data).hexdigest()}"


def content_of(arrays: Arrays, files: Mapping[str, bytes] | None = None) -> Content:
    """What a checkpoint of these arrays and files must hold."""
    rows = {
        name: row_of(_DTYPES[str(array.dtype)], array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    return Content(rows, dict(files or {}))


def write_safetensors(path: Path, arrays: Arrays) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {
            "dtype": _DTYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_checkpoint(
    folder: Path, arrays: Arrays, files: Mapping[str, bytes], file_count: int = 1
) -> Path:
    """A Hugging Face folder of one or more weights files."""
    folder.mkdir(parents=True)
    for number in range(file_count):
        names = list(arrays)[number::file_count]
        name = f"model-{number}.safetensors" if number else "model.safetensors"
        write_safetensors(folder / name, {name: arrays[name] for name in names})
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def read_checkpoint(folder: Path) -> Content | None:
    """What a folder holds, read by the format's description alone; None: no weights."""
    rows: dict[str, str] = {}
    files: Files = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_dir():
            continue
        data = path.read_bytes()
        if path.suffix != ".safetensors":
            files[path.name] = data
            continue
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            low, high = entry["data_offsets"]
            assert name not in rows
            rows[name] = row_of(entry["dtype"], entry["shape"], data[start + low : start + high])
    return Content(rows, files) if rows or files else None


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What the folder says of itself."""
    path = folder / ".thinwire-mark"
    return json.loads(path.read_bytes()) if path.exists() else None


def all_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but locks, links not followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def sink_bytes(folder: Path) -> dict[str, bytes]:
    """Everything of a sink that matters: no locks, and nothing of what was only fetched."""
    return {
        name: data
        for name, data in all_bytes(folder).items()
        if data and not name.startswith(".thinwire-fetched/")
    }


def blake3_of(data: bytes) -> str:
    return blake3(data).hexdigest()


class DictStore:
    """Objects in a dict, which a test may change as someone with access to a bucket may.

    What it begins with is old, what is written later is new.
    """

    url = "dict://bucket"

    def __init__(self, objects: Mapping[str, bytes] = {}) -> None:
        self.objects = dict(objects)
        self._old = frozenset(objects)
        self._lock = threading.Lock()

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        data = self._found(key)
        if len(data) > limit_bytes:
            raise LimitExceeded(f"{key} has {len(data)} bytes, the limit is {limit_bytes}")
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        data = self._found(key)
        if len(data) < stop:
            raise Truncated(f"{key} has {len(data)} bytes")
        return data[start:stop]

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def put_file(self, key: str, path: Path) -> None:
        self.objects[key] = path.read_bytes()

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self.objects:
                raise AlreadyExists(f"{key} exists")
            self.objects[key] = data

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        for key in sorted(self.objects):
            if key.startswith(prefix) and key > after:
                age_s = 1e9 if key in self._old else 0.0
                yield Entry(key, len(self.objects[key]), 2e9 - age_s)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def _found(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(f"there is no {key}")
        return self.objects[key]


class ClockStore(StoreWrapper):
    """Objects are as old as a clock says that only moves when it is told to."""

    def __init__(self, store: Store, now_s: float) -> None:
        super().__init__(store)
        self.now_s = now_s
        self._times: dict[str, float] = {}

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._times[key] = self.now_s

    def put_file(self, key: str, path: Path) -> None:
        super().put_file(key, path)
        self._times[key] = self.now_s

    def put_if_absent(self, key: str, data: bytes) -> None:
        super().put_if_absent(key, data)
        self._times[key] = self.now_s

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        for entry in super().list(prefix, after=after):
            # Between its writing and its noting by another thread, an object is new.
            modified_s = self._times.get(entry.key, self.now_s)
            yield entry._replace(modified_s=modified_s)


class KeyedRandom(random.Random):
    """Dice that depend on the operation, its key and its number, not on which thread was first.

    Give :meth:`on_operation` to a ``FaultStore`` as its hook.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._salt = seed
        self._at = threading.local()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def on_operation(self, when: str, operation: str, key: str) -> None:
        if when == "before":
            name = f"{operation} {key}"
            with self._lock:
                self._counts[name] += 1
                self._at.name = f"{self._salt} {name} {self._counts[name]}"
            self._at.rolls = 0

    def random(self) -> float:
        rolls = getattr(self._at, "rolls", 0)
        self._at.rolls = rolls + 1
        name = f"{getattr(self._at, 'name', self._salt)} {rolls}"
        return int.from_bytes(blake3(name.encode()).digest()[:6], "big") / 2**48
