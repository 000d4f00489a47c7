"""A store in a dictionary with a clock of its own, small models, and who watches."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from thinwire.errors import AccessDenied, AlreadyExists, NotFound
from thinwire.follow import Follower, Stream, open_stream
from thinwire.maintain import Maintainer
from thinwire.publish import Publisher
from thinwire.store import Entry, Store, StoreWrapper
from thinwire.store.store import (
    check_key,
    check_prefix,
    check_range,
    regular_size,
    too_large,
    too_short,
)
from thinwire.stream.events import Event
from thinwire.stream.records import Policy

# Far from the machine's own clock: whoever mixes the two shows.
NOW_S = 3_000_000_000.0
DAY_S = 86_400

Arrays = dict[str, np.ndarray]
E = TypeVar("E", bound=Event)
_numbers = itertools.count()


class DictStore:
    """Objects in a dictionary; each is as old as ``now_s`` says, which only moves when told to."""

    def __init__(self, objects: Mapping[str, tuple[bytes, float]] | None = None) -> None:
        self.url = f"dict://{next(_numbers)}"
        self.now_s = NOW_S
        self.objects = dict(objects or {})
        self._lock = threading.Lock()

    def copy(self) -> DictStore:
        """Another store of the same objects."""
        other = DictStore(self.objects)
        other.now_s = self.now_s
        return other

    def find(self, part: str = "") -> list[str]:
        """The keys that hold ``part``, sorted."""
        return sorted(key for key in self.objects if part in key)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        data = self._data(key)
        if len(data) > limit_bytes:
            raise too_large(self.url, key, len(data), limit_bytes)
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_range(start, stop)
        data = self._data(key)
        if stop > len(data):
            raise too_short(self.url, key, start, stop)
        return data[start:stop]

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._lock:
            self.objects[key] = (bytes(data), self.now_s)

    def put_file(self, key: str, path: Path) -> None:
        regular_size(path)
        self.put(key, path.read_bytes())

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._lock:
            if key in self.objects:
                raise AlreadyExists(f"cannot create {key} in {self.url}: it exists already")
            self.objects[key] = (bytes(data), self.now_s)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        check_prefix(prefix)
        with self._lock:
            found = sorted(self.objects.items())
        for key, (data, modified_s) in found:
            if key.startswith(prefix) and key > after:
                yield Entry(key, len(data), modified_s)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            check_key(key)
            with self._lock:
                self.objects.pop(key, None)

    def _data(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            if key not in self.objects:
                raise NotFound(f"{key} is not in {self.url}")
            return self.objects[key][0]


class LoggingStore(StoreWrapper):
    """Keeps what was asked for: (operation, key) in order."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.log: list[tuple[str, str]] = []

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        self.log.append(("get", key))
        return super().get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self.log.append(("get_range", key))
        return super().get_range(key, start, stop)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        self.log.append(("list", prefix))
        return super().list(prefix, after=after)

    def data_keys(self) -> list[str]:
        """The objects that hold weights which were fetched."""
        return [key for _, key in self.log if "/deltas/" in key or "/anchors/" in key]


class HookStore(StoreWrapper):
    """Calls ``before(operation, key)`` ahead of every operation; it may raise."""

    def __init__(self, store: Store, before: Callable[[str, str], None]) -> None:
        super().__init__(store)
        self.before = before

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        self.before("get", key)
        return super().get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self.before("get_range", key)
        return super().get_range(key, start, stop)

    def put(self, key: str, data: bytes) -> None:
        self.before("put", key)
        super().put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self.before("put_file", key)
        super().put_file(key, path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.before("put_if_absent", key)
        super().put_if_absent(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        all_keys = [*keys]
        self.before("delete", " ".join(all_keys))
        super().delete(all_keys)


class Look:
    """Tells when somebody looked into a store for the first time: give it to a HookStore."""

    def __init__(self) -> None:
        self._looked = threading.Event()

    def __call__(self, operation: str, key: str) -> None:
        self._looked.set()

    def wait(self) -> None:
        assert self._looked.wait(60)


def read_only(store: Store) -> HookStore:
    """The store as someone sees it who may not write."""

    def refuse(operation: str, key: str) -> None:
        if operation not in ("get", "get_range"):
            raise AccessDenied(f"cannot {operation} {key} in {store.url}")

    return HookStore(store, refuse)


class Recorder:
    """Keeps every event, and wakes who waits for one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def on_event(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[E], count: int = 1) -> E:
        """The ``count``-th event of a kind, once it is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= count, timeout=60)
        return self.of(kind)[count - 1]


def model(seed: int = 0, large: int = 70_000) -> Arrays:
    """Two tensors large enough to stand alone, and small ones of three dtypes."""
    rng = np.random.default_rng(seed)
    return {
        "layers.0.weight": rng.normal(0, 0.02, (large // 100, 100)).astype(np.float16),
        "layers.1.weight": rng.normal(0, 0.02, large).astype(np.float16),
        "norm": rng.normal(0, 0.02, 77).astype(np.float16),
        "scale": rng.normal(0, 0.02, (5, 3)).astype(np.float32),
        "ids": rng.integers(0, 9, 4),
    }


def tiny(seed: int = 0) -> Arrays:
    """A model of a few hundred bytes."""
    return {"w": np.random.default_rng(seed).normal(0, 0.02, 400).astype(np.float16)}


def stepped(arrays: Arrays, seed: int, share: float = 0.01) -> Arrays:
    """About ``share`` of the elements differ, at least one of each tensor."""
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


def history(count: int, first: Arrays | None = None) -> list[Arrays]:
    """``count`` versions of a model."""
    versions = [model() if first is None else first]
    for seed in range(1, count):
        versions.append(stepped(versions[-1], seed))
    return versions


DTYPES = {"float16": "F16", "float32": "F32", "int64": "I64", "bfloat16": "BF16", "uint8": "U8"}


def bits(arrays: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint of these arrays must read as."""
    return {
        name: _row(DTYPES[str(array.dtype)], array.shape, array.tobytes())
        for name, array in arrays.items()
    }


def held(folder: Path) -> dict[str, str]:
    """What a folder's weights files hold, read by the format's description alone."""
    rows: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                assert name not in rows
                rows[name] = _row(entry["dtype"], entry["shape"], data[start + low : start + high])
    return rows


def write_safetensors(
    path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> Path:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": DTYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_folder(folder: Path, **files: Mapping[str, Any] | bytes) -> Path:
    """A checkpoint folder: weights files from arrays, other files from bytes; "_" is a dot."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_safetensors(path.with_suffix(".safetensors"), content)
    return folder


def small_files(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint that are not weights."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.name[0] != "." and path.suffix != ".safetensors"
    }


def publisher(stream: Stream | Store, folder: Path, **options: Any) -> Publisher:
    """A publisher that leaves maintenance to the test."""
    opened = stream if isinstance(stream, Stream) else open_stream(stream)
    return Publisher(opened, folder, **{"maintain": False, **options})


def published(store: Store, folder: Path, versions: Iterable[Any], **policy: Any) -> None:
    """Publish versions into a store."""
    stream = open_stream(store, policy=Policy(**policy) if policy else None)
    with publisher(stream, folder) as made:
        for step, arrays in enumerate(versions, 1):
            made.publish(arrays, step=step)


def maintained(store: Store, folder: Path, **options: Any) -> Any:
    """One round of maintenance."""
    with Maintainer(open_stream(store), folder, **options) as maintainer:
        return maintainer.run_once()


def joined(store: Store, folder: Path, target: Any = "latest", **options: Any) -> dict[str, str]:
    """What somebody holds who joins now."""
    with Follower(open_stream(store), folder, lease=False, **options) as follower:
        follower.catch_up(target)
    return held(folder)


def _row(dtype: str, shape: Iterable[int], data: bytes) -> str:
    return f"{dtype} {list(shape)} {hashlib.sha256(data).hexdigest()[:16]}"
