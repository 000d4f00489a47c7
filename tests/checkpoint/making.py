"""Small checkpoints of every kind, written without thinwire, and a way to die when it hurts."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "I64": 64, "I32": 32, "U8": 8, "BOOL": 8}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F4": 4, "U16": 16, "I8": 8}

Content = dict[str, bytes]
State = dict[str, tuple[int, bytes]]
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]


def tensor(dtype: str, shape: Sequence[int], seed: int = 0) -> tuple[str, Sequence[int], bytes]:
    """A tensor of random bits."""
    size_bytes = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
    return dtype, shape, np.random.default_rng(seed).bytes(size_bytes)


def stepped(
    old: tuple[str, Sequence[int], bytes], seed: int = 0
) -> tuple[str, Sequence[int], bytes]:
    """The same tensor with about one byte in fifty one higher."""
    dtype, shape, data = old
    values = np.frombuffer(data, np.uint8).copy()
    chosen = np.random.default_rng(seed).random(values.size) < 0.02
    values[chosen] += 1
    return dtype, shape, values.tobytes()


MIXED = {
    "w": tensor("BF16", [40, 30], 1),
    "scale": tensor("F32", [], 2),
    "empty": tensor("BF16", [0, 7], 3),
    "q": tensor("F8_E4M3", [99], 4),
    "packed": tensor("F4", [16], 5),
    "ids": tensor("I64", [12], 6),
    "mask": ("BOOL", [3], b"\1\0\1"),
    "half": tensor("F16", [1], 8),
}
MIXED_NEW = {name: stepped(old, seed) for seed, (name, old) in enumerate(MIXED.items())}


def pack(tensors: Tensors, metadata: Mapping[str, str] | None = None, pad: int = 8) -> bytes:
    """A safetensors file, tensors in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [start, start + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        start += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % pad)
    return raw_file(text, b"".join(data for _, _, data in tensors.values()))


def raw_file(text: bytes, data: bytes = b"") -> bytes:
    """A file of this header text, right or wrong."""
    return len(text).to_bytes(8, "little") + text + data


def write_folder(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def read_folder(folder: Path, hidden: bool = True) -> dict[str, bytes]:
    """Every file by name."""
    paths = [path for path in folder.iterdir() if hidden or path.name[0] != "."]
    return {path.name: path.read_bytes() for path in paths}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def index(shards: Mapping[str, Tensors]) -> str:
    places = {name: file for file, tensors in shards.items() for name in tensors}
    return json.dumps({"metadata": {}, "weight_map": places})


def visible(checkpoint: Path) -> Content:
    if checkpoint.is_file():
        return {"": checkpoint.read_bytes()}
    return read_folder(checkpoint, hidden=False)


def patched_pair(root: Path) -> tuple[Path, Path]:
    """Two shards and a config, only words and the config change."""
    names = list(MIXED)
    sides = []
    for side, tensors in (("a", MIXED), ("b", MIXED_NEW)):
        files = {
            "m-1.safetensors": pack({name: tensors[name] for name in names[:3]}),
            "m-2.safetensors": pack({name: tensors[name] for name in names[3:]}),
            "config.json": side,
            "vocab.txt": "same",
        }
        sides.append(write_folder(root / side, files))
    return sides[0], sides[1]


def rebuilt_pair(root: Path) -> tuple[Path, Path]:
    """A shard goes, another comes, a header changes, files come and go."""
    old = {"w": tensor("BF16", [50], 1), "v": tensor("F32", [5], 2)}
    base = write_folder(
        root / "a",
        {
            "m-1.safetensors": pack({"w": old["w"]}),
            "m-2.safetensors": pack({"v": old["v"]}),
            "gone.txt": "gone",
            "config.json": "old",
        },
    )
    new = write_folder(
        root / "b",
        {
            "m-1.safetensors": pack({"w": stepped(old["w"])}, {"step": "2"}),
            "m-3.safetensors": pack({"v": old["v"], "x": tensor("U8", [3], 3)}),
            "config.json": "new",
            "come.txt": "come",
        },
    )
    return base, new


def mixed_pair(root: Path) -> tuple[Path, Path]:
    """The header of one shard changes, words of the second, nothing of the third.

    Tensors of the first two share a group.
    """
    old = {name: tensor("BF16", [50 + seed], seed) for seed, name in enumerate("abc")}
    new = {name: stepped(old[name], 9) for name in "ab"} | {"c": old["c"]}
    sides = []
    for side, tensors, metadata in (("a", old, None), ("b", new, {"step": "2"})):
        files: dict[str, bytes | str] = {
            "m-1.safetensors": pack({"a": tensors["a"]}, metadata),
            "m-2.safetensors": pack({"b": tensors["b"]}),
            "m-3.safetensors": pack({"c": tensors["c"]}),
            "config.json": side,
        }
        sides.append(write_folder(root / side, files))
    return sides[0], sides[1]


def single_pair(root: Path) -> tuple[Path, Path]:
    root.mkdir()
    (root / "a").write_bytes(pack(MIXED))
    (root / "b").write_bytes(pack(MIXED_NEW))
    return root / "a", root / "b"


def single_rebuilt_pair(root: Path) -> tuple[Path, Path]:
    root.mkdir()
    (root / "a").write_bytes(pack(MIXED))
    (root / "b").write_bytes(pack(MIXED_NEW, {"step": "2"}))
    return root / "a", root / "b"


FOLDER_PAIRS = [patched_pair, rebuilt_pair, mixed_pair]
PAIRS = [*FOLDER_PAIRS, single_pair, single_rebuilt_pair]


def copy(checkpoint: Path, target: Path) -> Path:
    if checkpoint.is_file():
        target.parent.mkdir()
        shutil.copy(checkpoint, target)
    else:
        shutil.copytree(checkpoint, target)
    return target


def run_child(action: Callable[[], None]) -> int:
    """Run ``action`` in a forked process; returns its wait status: 0, or the signal it died of."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(99)
        os._exit(0)
    return os.waitpid(child, 0)[1]


FATAL = ("fsync", "rename", "replace", "pwrite", "write", "unlink", "rmdir", "mkdir", "open")
FATAL += ("chmod", "posix_fallocate")


def die_at(call: int) -> None:
    """From now on, this process kills itself as the ``call``-th of the ``FATAL`` calls begins.

    A write gets half-way first.
    """
    count = 0

    def die() -> None:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in FATAL:
        setattr(os, name, _told(name, getattr(os, name), die))


def killed_at_each_call(room: Path, act: Callable[[], None], copies: Path) -> Iterator[Path]:
    """What ``act`` leaves of a folder where it is killed at each of its ``FATAL`` calls.

    It runs once, and the folder is copied as each call begins, with a write half-way: who is killed
    there does nothing more. Copies that are as the one before are left out; the last one is where
    it ended. ``test_a_killed_process_leaves_what_is_copied`` holds this against real kills.
    """
    found: list[Path] = []
    last: State | None = None
    is_copying = False

    def copy_room() -> None:
        nonlocal is_copying, last
        if is_copying:
            return
        is_copying = True
        if (now := tree(room)) != last:
            found.append(shutil.copytree(room, copies / str(len(found)), symlinks=True))
            last = now
        is_copying = False

    wrappers = {name: _told(name, getattr(os, name), copy_room) for name in FATAL}
    with mock.patch.multiple(os, **wrappers):
        act()
    yield from found
    yield room


def tree(folder: Path) -> State:
    """Everything below a folder: kinds, modes and bytes."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


def _told(name: str, real: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    """A call that tells as it begins, or half-way where it writes."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name not in ("pwrite", "write"):
            tell()
            return real(*args, **kwargs)
        descriptor, data, *at = args
        half = bytes(data)[: len(data) // 2]
        written = real(descriptor, half, *at)
        tell()
        rest = [start + written for start in at]
        return written + real(descriptor, bytes(data)[written:], *rest)

    return wrapper
