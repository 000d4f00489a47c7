"""A checkpoint and a delta in, a new checkpoint out."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from thinwire.checkpoint.disk import (
    create_mapped,
    os_errors,
    put_in_place,
    remove_quietly,
    sync,
    temporary_sibling,
    write_file,
)
from thinwire.checkpoint.file_names import SINGLE_FILE
from thinwire.checkpoint.folder import Checkpoint, refuse_inside
from thinwire.checkpoint.plan import Plan, PlannedFile, PlannedWeights, base_file_view, plan_result
from thinwire.codec.delta import ChunkChanges, Delta
from thinwire.codec.delta_set import DeltaSet, OpenDelta
from thinwire.errors import AlreadyExists

DeltaSource = bytes | bytearray | memoryview | os.PathLike[str] | str | OpenDelta


def apply_checkpoint(
    base: str | os.PathLike[str],
    delta: DeltaSource,
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Make the checkpoint that ``delta`` describes from ``base``, bit for bit.

    ``out`` becomes a folder, or one safetensors file where the delta was made from single files. It
    appears complete, verified and durable, or not at all: everything is built under a hidden name
    beside it, which only a killed process leaves behind. ``base`` is only read. A folder gets the
    files that the delta knows: others of the base, and its subfolders, are not copied.

    Args:
        base: The checkpoint that the delta was made from.
        delta: A delta file, its bytes, or an opened one, which stays open.
        out: Where the new checkpoint goes; must not exist.
        workers: Threads.
        on_bytes: Called with the raw bytes of each piece of work done.

    Raises:
        AlreadyExists: ``out`` exists.
        ApplyError: ``BaseMismatch``, ``TensorMismatch`` or ``BaseUnusable``; says what differs.
        FormatError: The delta, or a weights file of the base, is malformed.
        StoreError: A file cannot be read or written, or the disk is full.
    """
    target = Path(out).absolute()
    _refuse_existing(target)
    opened_base = Checkpoint.open(base, ignore_subfolders=True)
    refuse_inside(target, opened_base)
    temporary = temporary_sibling(target)
    with opened_delta(delta) as opened:
        plan = plan_result(opened_base, opened)
        try:
            _build(opened_base, opened, plan, temporary, workers, on_bytes)
            _refuse_existing(target)
            put_in_place(temporary, target)
        except BaseException:
            remove_quietly(temporary)
            raise


@contextmanager
def opened_delta(delta: DeltaSource) -> Iterator[OpenDelta]:
    """Open a delta for as long as the block lasts; one that is open already stays so after it."""
    if isinstance(delta, Delta | DeltaSet):
        yield delta
    else:
        with Delta.open(delta) as opened:
            yield opened


def verify_base(
    base: str | os.PathLike[str],
    delta: DeltaSource,
    *,
    workers: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Check, without writing anything, that ``delta`` applies to ``base`` and gives what it says.

    Every tensor is decoded, chunk by chunk, and verified.

    Args:
        base: The checkpoint that the delta was made from.
        delta: A delta file, its bytes, or an opened one, which stays open.
        workers: Threads, at least 1.
        on_bytes: Called with the raw bytes of each piece of work done.

    Raises:
        ApplyError, FormatError, StoreError: As :func:`apply_checkpoint`.
    """
    opened_base = Checkpoint.open(base, ignore_subfolders=True)
    with opened_delta(delta) as opened:
        plan_result(opened_base, opened)
        bases = {name: tensor.data for name, tensor in opened_base.tensors.items()}
        opened.apply(bases, lambda _: None, workers=workers, on_bytes=on_bytes)


def read_changes(
    base: Checkpoint,
    delta: OpenDelta,
    on_bytes: Callable[[int], None] | None,
    *,
    workers: int,
    only: Collection[str] | None = None,
) -> Iterator[ChunkChanges]:
    """The changed words of the tensors that both sides hold; verified once exhausted.

    With ``only``, of those among them.
    """
    bases = {name: tensor.data for name, tensor in base.tensors.items()}
    unreported = {
        entry.name: entry.byte_count
        for entry in delta.tensors.values()
        if entry.kind in ("delta", "same") and (only is None or entry.name in only)
    }
    for change in delta.changes(bases, only=only, workers=workers):
        if only is not None and change.name not in only:
            continue
        if on_bytes:
            on_bytes(unreported.pop(change.name, 0))
        yield change
    if on_bytes:
        on_bytes(sum(unreported.values()))


def build_weights(
    base: Checkpoint,
    delta: OpenDelta,
    weights: Sequence[PlannedWeights],
    paths: Mapping[str, Path],
    *,
    workers: int,
    on_bytes: Callable[[int], None] | None,
) -> None:
    """Write these weights files, whole and verified, to the ``paths`` of their names.

    Other tensors than theirs are not looked at. The bytes go through memory maps: no tensor is ever
    held in memory of our own. After an error the new files are there with undefined content.
    """
    outs = {}
    for file in weights:
        view = create_mapped(paths[file.name], file.header.file_bytes)
        view[: len(file.header.bytes)] = memoryview(file.header.bytes)
        for name, span in file.header.spans.items():
            outs[name] = view[span.start : span.stop]
    bases = {name: tensor.data for name, tensor in base.tensors.items()}
    delta.apply(
        bases, lambda entry: outs[entry.name], only=outs, workers=workers, on_bytes=on_bytes
    )
    for file in weights:
        sync(paths[file.name])


def write_small_file(base: Checkpoint, delta: OpenDelta, file: PlannedFile, path: Path) -> None:
    """Write a file that is not weights, carried or taken from the base, to ``path``."""
    if file.from_base:
        write_file(path, base_file_view(base, file.attachment).data)
    else:
        write_file(path, delta.attachment_data(file.attachment))


def _build(
    base: Checkpoint,
    delta: OpenDelta,
    plan: Plan,
    root: Path,
    workers: int,
    on_bytes: Callable[[int], None] | None,
) -> None:
    paths = {SINGLE_FILE: root}
    if plan.is_folder:
        with os_errors("cannot create", root):
            root.mkdir()
        paths = {file.name: root / file.name for file in plan.weights}
    build_weights(base, delta, plan.weights, paths, workers=workers, on_bytes=on_bytes)
    for file in plan.files:
        write_small_file(base, delta, file, root / file.name)
    if plan.is_folder:
        sync(root)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise AlreadyExists(
            f"{target} exists", hint="Choose another path or remove it first", path=str(target)
        )
