"""One delta of another system as one input, and what must hold whatever is in it.

An input is the files of a delta, each after its length; which names they get is fixed per target.
Every reader gets the same small base, whose tensors lie at odd addresses.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fuzz.interop_watch import watched
from fuzz.target import Finding, require
from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.dtypes import byte_count
from thinwire.errors import ApplyError, FormatError, TensorMismatch, ThinwireError
from thinwire.interop.change import CheckpointChange, ForeignChange
from thinwire.interop.foreign import ForeignDelta, OutFile
from thinwire.interop.weights_out import write_weights

# Instead of a length: the file is not there.
_ABSENT = 0xFFFFFFFF
_MAX_MESSAGE_CHARS = 4000

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    # 33 bytes come first, so that what follows lies at odd addresses.
    "q": ("F8_E4M3", (33,)),
    "w": ("BF16", (12, 25)),
    "f": ("F32", (7, 3)),
    "h": ("F16", (9,)),
    "e": ("BF16", (0, 3)),
    "s": ("BF16", ()),
}
BITS = {name: Random(f"base {name}").randbytes(byte_count(*SHAPES[name])) for name in SHAPES}


class Layout(NamedTuple):
    """Where the files of an input go, and who reads them.

    Attributes:
        name: The target's.
        system: The reader's module.
        files: Their names in the chain's folder, in the order of the input.
        delta: What is opened: one of the files, or the folder of some.
        constant: Other files of the chain.
        check: What else is done with an opened delta.
        also: What else is done with the path of one, opened or not.
    """

    name: str
    system: ModuleType
    files: Sequence[str]
    delta: str
    constant: Mapping[str, bytes] = {}
    check: Callable[[Any, Checkpoint], object] | None = None
    also: Callable[[Path, Checkpoint], object] | None = None


class _Room(NamedTuple):
    """The folder of this process for one target: nothing else may be read or written."""

    path: Path
    chain: Path
    base: Checkpoint
    held: dict[str, bytes | None]
    kept: tempfile.TemporaryDirectory[str]

    def listing(self) -> set[str]:
        """All files."""
        return {
            os.path.relpath(folder, self.path) + "/" + name
            for folder, _, names in os.walk(self.path)
            for name in names
        }


def pack(files: Sequence[bytes | None]) -> bytes:
    """An input of files in the target's order; None: not there."""
    return b"".join(
        (_ABSENT if data is None else len(data)).to_bytes(4, "little") + (data or b"")
        for data in files
    )


def unpack(data: bytes, count: int) -> list[bytes | None]:
    """The files in an input: always so many, the last ones empty where it ends too early."""
    files: list[bytes | None] = []
    for _ in range(count):
        size, data = int.from_bytes(data[:4], "little"), data[4:]
        if size == _ABSENT:
            files.append(None)
            continue
        files.append(data[:size])
        data = data[size:]
    return files


def run(layout: Layout, data: bytes) -> None:
    """Read one input in every way that there is; see the module."""
    room = _room(layout.name, tuple(layout.constant.items()))
    files = dict(zip(layout.files, unpack(data, len(layout.files)), strict=True))
    for name, content in files.items():
        if name in room.held and room.held[name] == content:
            continue
        path = room.chain / name
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        room.held[name] = content
    with watched(room.chain, room.path / "spool"):
        _list(layout, room)
        _read(layout, room)
        if layout.also is not None:
            _refused(layout.also, room.chain / layout.delta, room.base)
    chain = [name for name, content in files.items() if content is not None]
    wanted = {"base/model.safetensors", *(f"chain/{name}" for name in (*chain, *layout.constant))}
    require(not (odd := room.listing() ^ wanted), f"files came or went: {sorted(odd)[:3]}")
    for name, tensor in room.base.tensors.items():
        require(tensor.data.tobytes() == BITS[name], f"the base's {name!r} was changed")


def _list(layout: Layout, room: _Room) -> None:
    try:
        versions = layout.system.list_versions(room.chain)
    except ThinwireError as error:
        check_error(error)
        return
    for version in versions:
        require(version.path.is_relative_to(room.chain), f"version {version.name!r} is elsewhere")
        require(version.path.exists(), f"version {version.name!r} is not there")


def _read(layout: Layout, room: _Room) -> None:
    path = room.chain / layout.delta
    try:
        layout.system.is_delta(path)
    except Exception as error:
        raise Finding(f"is_delta raised {error!r}") from error
    try:
        delta: ForeignDelta = layout.system.open_delta(path)
    except ThinwireError as error:
        check_error(error)
        return
    with delta:
        check_delta(delta, room.base)
        for small in delta.files.values():
            require(small.is_relative_to(room.chain), f"{small} is elsewhere")
        if layout.check is not None:
            _refused(layout.check, delta, room.base)


def _refused(done: Callable[..., object], *args: object) -> None:
    """Do something that may be refused, but not fail otherwise."""
    try:
        done(*args)
    except ThinwireError as error:
        check_error(error)


def check_delta(delta: ForeignDelta, base: Checkpoint) -> int:
    """Take every tensor of an opened delta; returns how many of them were given."""
    require(delta.facts.file_bytes >= 0, "a size is negative")
    given_count = 0
    for name in delta.tensors:
        old = base.tensors.get(name)
        try:
            new = delta.new_tensor(name, old)
        except (FormatError, ApplyError) as error:
            check_error(error)
            continue
        require(old is not None, f"{name!r} was made of nothing")
        assert old is not None
        same = (new.dtype, new.shape, new.data.size) == (old.dtype, old.shape, old.data.size)
        require(same and new.data.dtype == np.uint8, f"{name!r} has another form than its base")
        require(not np.shares_memory(new.data, old.data), f"{name!r} is its base")
        given_count += 1
    for name in delta.tensors:
        try:
            delta.new_tensor(name, None)
        except TensorMismatch:
            continue
        raise Finding(f"{name!r} was made of nothing")
    try:
        ForeignChange(base, delta)
    except TensorMismatch as error:
        check_error(error)
    return given_count


def check_error(error: ThinwireError) -> None:
    """A refusal must be short, and must not hide that memory ran out."""
    require(len(str(error)) <= _MAX_MESSAGE_CHARS, f"a message of {len(str(error))} characters")
    cause: BaseException | None = error
    while cause is not None:
        is_memory = isinstance(cause, MemoryError) or getattr(cause, "errno", 0) == errno.ENOMEM
        require(not is_memory, "memory ran out, and a refusal hid it")
        cause = cause.__cause__ or cause.__context__


@cache
def _room(name: str, constant: tuple[tuple[str, bytes], ...]) -> _Room:
    kept = tempfile.TemporaryDirectory(prefix=f"thinwire-fuzz-{name}-")
    # Audit events have paths as they were asked for, so without links.
    path = Path(kept.name).resolve()
    (path / "base").mkdir()
    write_weights(path / "base" / "model.safetensors", stored(BITS))
    for file_name, content in constant:
        file = path / "chain" / file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (path / "chain").mkdir(exist_ok=True)
    (path / "spool").mkdir()
    return _Room(path, path / "chain", Checkpoint.open(path / "base"), {}, kept)


# ---------------------------------------------------------------- seeds


def stored(bits: Mapping[str, bytes]) -> dict[str, StoredTensor]:
    """Tensors of the base's shapes."""
    return {
        name: StoredTensor(*SHAPES[name], np.frombuffer(data, np.uint8))
        for name, data in bits.items()
    }


def stepped(names: Collection[str], share: float = 0.05) -> dict[str, bytes]:
    """The base's bits, and in some tensors so many of the bytes at even places one step on."""
    random = Random(f"new {share}")
    news = dict(BITS)
    for name in names:
        data = bytearray(BITS[name])
        for at in range(0, len(data), 2):
            if random.random() < share or at == 0:
                data[at] = (data[at] + random.choice([1, 255])) % 256
        news[name] = bytes(data)
    return news


def seed_of(
    place: Layout,
    news: Mapping[str, bytes],
    more: Mapping[str, bytes | None] | None = None,
    **options: Any,
) -> bytes:
    """An input as our writer makes it, of version 7 from version 6.

    Args:
        place: The target's.
        news: What becomes of the base.
        more: The bytes of files that the writer does not write.
        options: The writer's.
    """
    folder = Path(tempfile.mkdtemp(prefix="thinwire-fuzz-seed-"))
    try:
        for name, bits in (("old", BITS), ("new", news)):
            (folder / name).mkdir()
            write_weights(folder / name / "model.safetensors", stored(bits))
        change = CheckpointChange(Checkpoint.open(folder / "old"), Checkpoint.open(folder / "new"))
        (folder / "out").mkdir()
        written: list[OutFile] = place.system.write_delta(
            change, folder / "out", version=7, base_version=6, **options
        )
        files: dict[str, bytes | None] = {key: path.read_bytes() for key, path in written}
    finally:
        shutil.rmtree(folder)
    files |= more or {}
    unknown = files.keys() - set(place.files) - set(place.constant)
    require(not unknown, f"the target has no place for {sorted(unknown)}")
    return pack([files.get(name) for name in place.files])
