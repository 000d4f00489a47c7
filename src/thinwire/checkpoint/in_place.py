"""A checkpoint becomes the new one where it lies, and survives being killed at any point.

The order is what makes it safe. ``S`` is a hidden staging folder, ``R`` the same folder renamed:

1. decode and verify everything, writing the redo log and new files into ``S``; sync it
2. rename ``S`` to ``R``: from here on the update will happen, before that it never did
3. write the changed words, sync; move the new files into place; remove what goes; sync
4. rename ``R`` back to ``S`` and remove it: from here on the update is done

An ``S`` found later is garbage and is removed. An ``R`` is replayed from 3: that gives the same
result however far it had come. Only what step 3 writes touches the checkpoint.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from thinwire.checkpoint.apply import (
    DeltaSource,
    build_weights,
    read_changes,
    write_small_file,
)
from thinwire.checkpoint.disk import (
    check_unshared,
    open_unshared,
    os_errors,
    remove,
    remove_quietly,
    shared_error,
    sync,
)
from thinwire.checkpoint.file_names import file_path, first_clash
from thinwire.checkpoint.folder import Checkpoint, hidden_path
from thinwire.checkpoint.lock import locked
from thinwire.checkpoint.plan import Plan, PlannedFile, PlannedWeights, is_result, plan_result
from thinwire.checkpoint.redo_log import Block, FileSize, RedoHead, RedoWriter, staged_path
from thinwire.checkpoint.replay import replay
from thinwire.codec.delta import Delta
from thinwire.codec.dtypes import dtype_named
from thinwire.errors import ApplyError, InvalidArgument

Recovery = Literal["clean", "discarded", "finished"]


class _Update(NamedTuple):
    """What happens to the files: words patched, whole files replaced, others removed."""

    patched: list[PlannedWeights]
    rebuilt: list[PlannedWeights]
    files: list[PlannedFile]
    removed: list[str]

    @property
    def is_empty(self) -> bool:
        return not any(self)


def apply_in_place(
    checkpoint: str | os.PathLike[str],
    delta: DeltaSource,
    *,
    workers: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Turn ``checkpoint`` itself into the one that ``delta`` describes, crash-safe.

    A folder's files that the delta does not know, say logs, and its subfolders are left alone: so
    afterwards it may hold more than the checkpoint that the delta was made to.

    Needs disk space for a redo log of 6 bytes per changed BF16 weight. Where a weights file's
    header changes, or a tensor is carried in full, all weights files are rebuilt beside the old
    ones and swapped in; that needs the space of a second checkpoint.

    After an error before the log was complete, the checkpoint is as it was. After a crash or an
    error later, opening it raises ``BaseUnusable`` until this function (with any delta) or
    :func:`recover` has finished the update. Calling it again with the same delta is always right:
    where the checkpoint already is the new one, nothing happens. Whoever has the checkpoint mapped
    meanwhile sees a mix: readers must reopen.

    Args:
        checkpoint: A safetensors file or a Hugging Face folder; no links to shared files.
        delta: A delta file, or its bytes.
        workers: Threads, where weights files are rebuilt.
        on_bytes: Called with the raw bytes of each piece of work done.

    Raises:
        ApplyError: The delta does not fit, someone else is updating, or files are links.
        InvalidArgument: The delta turns a file into a folder or the reverse.
        FormatError: The delta, or a weights file, is malformed.
        StoreError: A file cannot be read or written, or the disk is full.
    """
    path = _real_path(checkpoint)
    with Delta.open(delta) as opened, locked(hidden_path(path, "lock")):
        finished = _settle(path) == "finished"
        base = Checkpoint.open(path, ignore_subfolders=True)
        # Not what the log said of itself: whether this is the result shows in the files.
        if finished and is_result(base, opened):
            return
        try:
            is_staged = _prepare(base, opened, workers, on_bytes)
        except ApplyError:
            if is_result(base, opened):
                return
            raise
        if is_staged:
            _settle(path)


def recover(checkpoint: str | os.PathLike[str]) -> Recovery:
    """Finish, or discard, an in-place update that was interrupted.

    Returns:
        "finished": the checkpoint is now the new one. "discarded": the update had not begun to
        touch it, so it is the old one. "clean": there was nothing to do.

    Raises:
        BaseUnusable: Someone else is updating, or the update cannot be finished; says why.
        StoreError: Nothing is there, or files cannot be written.
    """
    path = _real_path(checkpoint)
    with locked(hidden_path(path, "lock")):
        return _settle(path)


def _real_path(checkpoint: str | os.PathLike[str]) -> Path:
    path = Path(checkpoint)
    with os_errors("cannot open", path):
        resolved = path.resolve(strict=True)
    if path.is_symlink() and not resolved.is_dir():
        raise shared_error(path, "is a link")
    return resolved


def _settle(path: Path) -> Recovery:
    """Bring a locked checkpoint into a whole state."""
    staging, redo = hidden_path(path, "staging"), hidden_path(path, "redo")
    discarded = os.path.lexists(staging)
    remove(staging)
    if not os.path.lexists(redo):
        return "discarded" if discarded else "clean"
    replay(path, redo)
    with os_errors("cannot rename", redo):
        redo.rename(staging)
    sync(staging.parent)
    remove_quietly(staging)
    return "finished"


def _prepare(
    base: Checkpoint,
    delta: Delta,
    workers: int,
    on_bytes: Callable[[int], None] | None,
) -> bool:
    """Steps 1 and 2: verify and stage the update, then commit to it. False: nothing changes."""
    update = _plan_update(base, delta, plan_result(base, delta))
    _check_writable(base, update)
    staging = hidden_path(base.path, "staging")
    try:
        with os_errors("cannot create", staging):
            staging.mkdir()
        _stage(base, delta, update, staging, workers, on_bytes)
        if update.is_empty:
            remove(staging)
            return False
        with os_errors("cannot rename", staging):
            staging.rename(hidden_path(base.path, "redo"))
    except BaseException:
        remove_quietly(staging)
        raise
    return True


def _plan_update(base: Checkpoint, delta: Delta, plan: Plan) -> _Update:
    if plan.is_folder != base.is_folder:
        was, becomes = ("a folder", "one file") if base.is_folder else ("one file", "a folder")
        raise InvalidArgument(
            f"{base.path} is {was} and the delta makes {becomes}",
            hint="Apply it to a new path instead of in place",
            path=str(base.path),
        )
    names = {file.name for file in plan.weights}
    removed_weights = [name for name in base.weights if name not in names]
    rebuild = (
        bool(removed_weights)
        or not all(file.from_base for file in plan.weights)
        or any(entry.kind in ("full", "removed") for entry in delta.tensors.values())
    )
    removed = removed_weights + [name for name in plan.removed if name in base.files]
    # Files that the delta does not know stay, so their names count too.
    known = [*names, *(file.name for file in plan.files)]
    if clash := first_clash(dict.fromkeys([*base.weights, *base.files, *known])):
        raise InvalidArgument(
            f"{base.path}: it has {clash[0]!r} and the update makes {clash[1]!r}: the names differ"
            " only in case",
            hint="Apply it to a new path instead of in place",
            path=str(base.path),
        )
    changed = {entry.name for entry in delta.tensors.values() if entry.kind == "delta"}
    patched = [file for file in plan.weights if not changed.isdisjoint(file.header.spans)]
    return _Update(
        [] if rebuild else patched,
        list(plan.weights) if rebuild else [],
        [file for file in plan.files if not file.from_base],
        removed,
    )


def _check_writable(base: Checkpoint, update: _Update) -> None:
    """Find out before any work whether the files can be written, and are nobody else's."""
    for weights in update.patched:
        os.close(open_unshared(file_path(base.path, weights.name), os.O_WRONLY))
    for name in [file.name for file in update.rebuilt] + [file.name for file in update.files]:
        path = file_path(base.path, name)
        if os.path.lexists(path):
            check_unshared(path)


def _stage(
    base: Checkpoint,
    delta: Delta,
    update: _Update,
    staging: Path,
    workers: int,
    on_bytes: Callable[[int], None] | None,
) -> None:
    """Write everything that the update needs into ``staging`` and make it durable."""
    replaced = [FileSize(file.name, file.header.file_bytes) for file in update.rebuilt]
    replaced += [FileSize(file.name, file.attachment.size) for file in update.files]
    patched = [FileSize(file.name, file.header.file_bytes) for file in update.patched]
    paths = {file.name: staged_path(staging, number) for number, file in enumerate(replaced)}
    with RedoWriter(staging, RedoHead(delta.identity, patched, replaced, update.removed)) as log:
        if update.rebuilt:
            build_weights(base, delta, update.rebuilt, paths, workers=workers, on_bytes=on_bytes)
        else:
            _log_changes(base, delta, update.patched, log, on_bytes)
        for file in update.files:
            write_small_file(base, delta, file, paths[file.name])
        for name, path in paths.items():
            _keep_mode(file_path(base.path, name), path)
        log.finish()
    sync(staging)


def _log_changes(
    base: Checkpoint,
    delta: Delta,
    patched: list[PlannedWeights],
    log: RedoWriter,
    on_bytes: Callable[[int], None] | None,
) -> None:
    """Log every changed word; returning means that all tensors were verified."""
    homes = {
        name: (number, span)
        for number, file in enumerate(patched)
        for name, span in file.header.spans.items()
    }
    for change in read_changes(base, delta, on_bytes):
        number, span = homes[change.name]
        word_bytes = dtype_named(span.dtype).word_bytes
        offset = span.start + change.first_word * word_bytes
        log.add(Block(number, offset, word_bytes, change.positions, change.words))


def _keep_mode(old: Path, new: Path) -> None:
    if old.exists():
        with os_errors("cannot write", new):
            new.chmod(stat.S_IMODE(old.stat().st_mode))
