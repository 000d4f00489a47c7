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
    put_in_place,
    remove_quietly,
    temporary_sibling,
)
from thinwire.checkpoint.folder import Checkpoint, refuse_inside
from thinwire.checkpoint.plan import MAX_CARRIED_BYTES
from thinwire.codec.chunk import Spec
from thinwire.codec.container import Attachment
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import DeltaSummary, Pair, write_delta
from thinwire.errors import AlreadyExists, InvalidArgument, LimitExceeded


def diff_checkpoint(
    base: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    spec: Spec | None = None,
    overwrite: bool = False,
    ignore_subfolders: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> DeltaSummary:
    """Write the delta that turns checkpoint ``base`` into checkpoint ``new``, bit for bit.

    Both may be a safetensors file or a Hugging Face folder. A tensor that is added, or changed in
    dtype or shape, is carried in full; one that is gone is recorded. Small files, also hidden ones,
    and safetensors headers travel where they differ from the base's. ``out`` appears complete or
    not at all; its folder needs room for it twice, since it waits there in a temporary file.

    Args:
        base: The checkpoint that the receiver holds.
        new: The checkpoint it shall hold.
        out: The delta file to write.
        workers: Threads.
        spec: What to ask of the encoder.
        overwrite: Replace ``out`` where it exists.
        ignore_subfolders: Leave subfolders out instead of refusing them: what lies in them does not
            travel. Hidden ones, such as ``.git``, never do.
        on_bytes: Called with the raw bytes of each piece of work done.

    Raises:
        AlreadyExists: ``out`` exists and ``overwrite`` is false.
        InvalidArgument: ``base`` or ``new`` is no checkpoint or changed while it was read, or
            ``out`` lies inside it.
        FormatError: A weights file is malformed; ``LimitExceeded`` where other files that differ
            are too large.
        BaseUnusable: An in-place update of ``base`` or ``new`` was interrupted.
        StoreError: A file cannot be read or written, or the disk is full. Nothing is left behind,
            but where ``out`` was to be replaced and only the last step failed, making its name
            durable, it is the new delta.
    """
    target = Path(out).absolute()
    exists = os.path.lexists(target)
    if exists and (target.is_symlink() or not target.is_file()):
        raise InvalidArgument(
            f"{target} is a link, a folder or a device, not a file",
            hint="Choose another path",
            path=str(target),
        )
    if exists and not overwrite:
        raise AlreadyExists(
            f"{target} exists",
            hint="Choose another path, or pass overwrite=True (--overwrite)",
            path=str(target),
        )
    old_side = Checkpoint.open(base, ignore_subfolders=ignore_subfolders)
    new_side = Checkpoint.open(new, ignore_subfolders=ignore_subfolders)
    refuse_inside(target, old_side, new_side)
    pairs = pair_tensors(old_side, new_side)
    attachments = collect_attachments(old_side, new_side)
    temporary = temporary_sibling(target)
    try:
        with os_errors("cannot write", target), temporary.open("xb") as file:
            stream = cast(BinaryIO, file)
            summary = write_delta(
                stream,
                pairs,
                attachments,
                spec=spec,
                workers=workers,
                spool_dir=target.parent,
                on_bytes=on_bytes,
            )
            file.flush()
            os.fsync(file.fileno())
        for side in (old_side, new_side):
            side.check_unchanged()
        put_in_place(temporary, target, overwrite=overwrite)
    except BaseException:
        remove_quietly(temporary)
        raise
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
        LimitExceeded: Those that differ from the base's have more than ``MAX_CARRIED_BYTES``.
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
                raise LimitExceeded(
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


def _is_same_file(path: Path | None, other: ByteArray, digest: int) -> bool:
    if path is None:
        return False
    view = map_file(path)
    return view.size == other.size and xxh3_64(view) == digest
