"""What a trainer hands over: a checkpoint on disk, or tensors by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.diff import collect_attachments, pair_tensors
from thinwire.checkpoint.disk import ByteArray, create_mapped, map_file, sync, write_file
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.checkpoint.safetensors_file import build_header
from thinwire.codec.arrays import to_bits
from thinwire.codec.container import Attachment
from thinwire.codec.digest import xxh3_64
from thinwire.codec.plan import Pair
from thinwire.errors import InvalidArgument, TensorMismatch, ThinwireError

TENSORS = Mapping[str, Any]
# Weights files of a stream that begins with tensors have about this size.
FILE_BYTES = 5 << 30
PathFor = Callable[[str], Path]


class Source(Protocol):
    """New weights, readable until they were published."""

    def pairs(self, base: Checkpoint) -> tuple[list[Pair], list[Attachment]]:
        """Its tensors beside those of the baseline, and its other files."""

    def write(self, path_for: PathFor) -> list[str]:
        """Write it as a checkpoint's files; returns their names."""

    def check_unchanged(self) -> None:
        """Raise InvalidArgument if it changed since it was opened."""


def open_source(source: TENSORS | str | os.PathLike[str]) -> Source:
    """The source that a caller of publish means.

    Raises:
        InvalidArgument: Neither a checkpoint nor tensors by name.
        ThinwireError: As ``Checkpoint.open`` and ``to_bits``.
    """
    if isinstance(source, Mapping):
        return TensorSource(source)
    if not isinstance(source, str | os.PathLike):
        raise InvalidArgument(
            f"{type(source).__name__} cannot be published",
            hint="Give a checkpoint's path, or tensors by name such as model.state_dict()",
        )
    checkpoint = Checkpoint.open(source, ignore_subfolders=True)
    if checkpoint.is_folder:
        return CheckpointSource(checkpoint)
    return FileSource(checkpoint)


class CheckpointSource:
    """A Hugging Face folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def pairs(self, base: Checkpoint) -> tuple[list[Pair], list[Attachment]]:
        """As :class:`Source`."""
        new = self._checkpoint
        return pair_tensors(base, new), collect_attachments(base, new)

    def write(self, path_for: PathFor) -> list[str]:
        """As :class:`Source`."""
        files = {name: file.path for name, file in self._checkpoint.weights.items()}
        files.update(self._checkpoint.files)
        for name, path in files.items():
            _copy(path, path_for(name))
        self.check_unchanged()
        return list(files)

    def check_unchanged(self) -> None:
        """As :class:`Source`."""
        self._checkpoint.check_unchanged()


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: ByteArray


class TensorSource:
    """Tensors by name. Nobody may write to them until they were published."""

    def __init__(self, tensors: TENSORS) -> None:
        if not tensors:
            raise InvalidArgument("there are no tensors to publish")
        self._tensors: dict[str, _Tensor] = {}
        for name, array in tensors.items():
            if not isinstance(name, str):
                raise InvalidArgument(f"a tensor's name is {type(name).__name__}, not text")
            try:
                bits = to_bits(array)
            except ThinwireError as error:
                message = f"tensor {name!r}: {error.message}"
                raise type(error)(message, hint=error.hint, **error.context) from None
            self._tensors[name] = _Tensor(bits.dtype, tuple(bits.shape), bits.data)

    def pairs(self, base: Checkpoint) -> tuple[list[Pair], list[Attachment]]:
        """As :class:`Source`; the files stay those of the baseline.

        Raises:
            TensorMismatch: The tensors are not those of the baseline by name, dtype and shape.
        """
        return _same_layout(base, self._tensors), kept_attachments(base)

    def write(self, path_for: PathFor) -> list[str]:
        """As :class:`Source`: files of up to 5 GiB and, with several, their index."""
        groups = _spread(self._tensors)
        if len(groups) == 1:
            _write_safetensors(path_for("model.safetensors"), self._tensors, groups[0])
            return ["model.safetensors"]
        names = []
        places = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            _write_safetensors(path_for(name), self._tensors, group)
            names.append(name)
            places.update(dict.fromkeys(group, name))
        total = sum(tensor.data.size for tensor in self._tensors.values())
        write_file(path_for(INDEX_NAME), index_of(places, total))
        return [*names, INDEX_NAME]

    def check_unchanged(self) -> None:
        """Nobody can tell; the caller promised."""


class FileSource(TensorSource):
    """One safetensors file: its tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors = {
            name: _Tensor(tensor.dtype, tuple(tensor.shape), tensor.data)
            for name, tensor in checkpoint.tensors.items()
        }

    def write(self, path_for: PathFor) -> list[str]:
        """As :class:`Source`."""
        names = super().write(path_for)
        self.check_unchanged()
        return names

    def check_unchanged(self) -> None:
        """As :class:`Source`."""
        self._checkpoint.check_unchanged()


def kept_attachments(base: Checkpoint) -> list[Attachment]:
    """The baseline's headers and files as they are, none carried."""
    attachments = [
        Attachment(name, "header", None, len(file.header_bytes), xxh3_64(file.header_bytes))
        for name, file in base.weights.items()
    ]
    for name, path in base.files.items():
        view = map_file(path)
        attachments.append(Attachment(name, "file", None, view.size, xxh3_64(view)))
    return attachments


def carried_attachments(checkpoint: Checkpoint) -> list[Attachment]:
    """A checkpoint's headers and files, all carried: whoever has its tensors can make it."""
    attachments = [
        Attachment(name, "header", data, len(data), xxh3_64(data))
        for name, data in ((n, file.header_bytes) for n, file in checkpoint.weights.items())
    ]
    for name, path in checkpoint.files.items():
        data = map_file(path).tobytes()
        attachments.append(Attachment(name, "file", data, len(data), xxh3_64(data)))
    return attachments


def _same_layout(base: Checkpoint, tensors: Mapping[str, _Tensor]) -> list[Pair]:
    for name in base.tensors:
        if name not in tensors:
            raise _mismatch(name, "is missing")
    pairs = []
    for name, new in tensors.items():
        old = base.tensors.get(name)
        if old is None:
            raise _mismatch(name, "is new")
        if (old.dtype, tuple(old.shape)) != (new.dtype, new.shape):
            is_now = f"is {new.dtype} {list(new.shape)}"
            raise _mismatch(name, f"{is_now}, the stream has {old.dtype} {list(old.shape)}")
    # In the order of the baseline's bytes: the delta is the same whatever the mapping's order is.
    for name, old in base.tensors.items():
        pairs.append(Pair(name, old.dtype, tuple(old.shape), old.data, tensors[name].data))
    return pairs


def _mismatch(name: str, reason: str) -> TensorMismatch:
    return TensorMismatch(
        f"tensor {name!r} {reason}",
        hint="Publish the same tensors each time (all ranks, all layers, in the dtype that is "
        "served); a checkpoint folder may change its layout",
        tensor=name,
    )


def _spread(tensors: Mapping[str, _Tensor]) -> list[list[str]]:
    """The names, in files of bearable size."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.data.size > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.data.size
    return groups


def _write_safetensors(path: Path, tensors: Mapping[str, _Tensor], names: Sequence[str]) -> None:
    rows = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
    header = safetensors_header(rows)
    view = create_mapped(path, len(header) + sum(tensors[name].data.size for name in names))
    view[: len(header)] = np.frombuffer(header, np.uint8)
    start = len(header)
    for name in names:
        data = tensors[name].data
        view[start : start + data.size] = data
        start += data.size
    sync(path)


def index_of(places: Mapping[str, str], total_bytes: int) -> bytes:
    """The index of a checkpoint of several weights files: which file holds which tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(places)}
    return json.dumps(index, indent=1, sort_keys=True).encode()


def safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length prefix and header of a safetensors file whose tensors follow each other.

    Args:
        tensors: Name, dtype and shape of each.
        metadata: What else the header shall say.
    """
    return build_header(tensors, {"format": "pt", **(metadata or {})})


def _copy(source: Path, target: Path) -> None:
    data = map_file(source)
    if data.size == 0:
        write_file(target, b"")
        return
    view = create_mapped(target, data.size)
    view[:] = data
    sync(target)
