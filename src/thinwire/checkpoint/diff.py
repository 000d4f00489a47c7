"""Two checkpoints in, one delta file out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from thinwire.checkpoint.disk import (
    ByteArray,
    map_file,
    os_errors,
    remove_quietly,
    sync,
    temporary_sibling,
)
from thinwire.checkpoint.folder import Checkpoint
from thinwire.checkpoint.plan import MAX_CARRIED_BYTES
from thinwire.codec.chunk import Spec
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import Attachment, DeltaSummary, Pair, write_delta
from thinwire.errors import AlreadyExists, InvalidArgument


def diff_checkpoint(
    base: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    spec: Spec | None = None,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> DeltaSummary:
    """Write the delta that turns checkpoint ``base`` into checkpoint ``new``, bit for bit.

    Both may be a safetensors file or a Hugging Face folder. A tensor that is added, or changed in
    dtype or shape, is carried in full; one that is gone is recorded. Small files and safetensors
    headers travel where they differ from the base's. ``out`` appears complete or not at all.

    Args:
        base: The checkpoint that the receiver holds.
        new: The checkpoint it shall hold.
        out: The delta file to write.
        workers: Threads.
        spec: What to ask of the encoder.
        overwrite: Replace ``out`` where it exists.
        on_bytes: Called with the raw bytes of each piece of work done.

    Raises:
        AlreadyExists: ``out`` exists and ``overwrite`` is false.
        InvalidArgument: ``base`` or ``new`` is no checkpoint, its other files are too large, or
            ``out`` lies inside it.
        FormatError: A weights file is malformed.
        StoreError: A file cannot be read or written; nothing is left behind.
    """
    target = Path(out).absolute()
    if os.path.lexists(target) and not overwrite:
        raise AlreadyExists(
            f"{target} exists", hint="Choose another path or ask to overwrite", path=str(target)
        )
    old_side, new_side = Checkpoint.open(base), Checkpoint.open(new)
    _refuse_inside(target, old_side, new_side)
    pairs = pair_tensors(old_side, new_side)
    attachments = collect_attachments(old_side, new_side)
    temporary = temporary_sibling(target)
    try:
        with os_errors("cannot write", target), temporary.open("xb") as file:
            stream = cast(BinaryIO, file)
            summary = write_delta(
                stream, pairs, attachments, spec=spec, workers=workers, on_bytes=on_bytes
            )
            file.flush()
            os.fsync(file.fileno())
        with os_errors("cannot write", target):
            temporary.replace(target)
    except BaseException:
        remove_quietly(temporary)
        raise
    sync(target.parent)
    return summary


def pair_tensors(base: Checkpoint, new: Checkpoint) -> list[Pair]:
    """The tensors of both sides: in the order of NEW's bytes, then those that NEW lacks."""
    pairs = []
    for name, tensor in new.tensors.items():
        old = base.tensors.get(name)
        fits = old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape)
        old_data = old.data if old is not None and fits else None
        pairs.append(Pair(name, tensor.dtype, tensor.shape, old_data, tensor.data))
    for name, old in base.tensors.items():
        if name not in new.tensors:
            pairs.append(Pair(name, old.dtype, old.shape, old.data, None))
    return pairs


def collect_attachments(base: Checkpoint, new: Checkpoint) -> list[Attachment]:
    """Headers of NEW's weights files, its other files, and the names of those that are gone.

    Raises:
        InvalidArgument: Those that differ from the base's have more than ``MAX_CARRIED_BYTES``.
    """
    attachments = []
    for name, file in new.weights.items():
        old = base.weights.get(name)
        data = file.header_bytes
        carried = None if old is not None and old.header_bytes == data else data
        attachments.append(Attachment(name, "header", carried, len(data), xxh3_64(data)))
    carried_bytes = 0
    for name, path in new.files.items():
        view = map_file(path)
        digest = xxh3_64(view)
        carried = None
        if not _is_same_file(base.files.get(name), view, digest):
            carried_bytes += view.size
            if carried_bytes > MAX_CARRIED_BYTES:
                raise InvalidArgument(
                    f"{path} and the files before it have {carried_bytes} bytes that differ from"
                    f" {base.path}; a delta carries {MAX_CARRIED_BYTES}",
                    hint="Move large files that are not safetensors out of the checkpoint",
                    path=str(path),
                )
            carried = view.tobytes()
        attachments.append(Attachment(name, "file", carried, view.size, digest))
    for name in base.files:
        if name not in new.files:
            attachments.append(Attachment(name, "removed", None, 0, xxh3_64(b"")))
    return attachments


def _refuse_inside(target: Path, *checkpoints: Checkpoint) -> None:
    for checkpoint in checkpoints:
        if checkpoint.is_folder and target.parent.resolve() == checkpoint.path:
            raise InvalidArgument(
                f"{target} would become one of the files of {checkpoint.path}",
                hint="Write the delta outside the checkpoint folders",
                path=str(target),
            )


def _is_same_file(path: Path | None, other: ByteArray, digest: int) -> bool:
    if path is None:
        return False
    view = map_file(path)
    return view.size == other.size and xxh3_64(view) == digest
