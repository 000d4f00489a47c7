"""One delta, carried out in place: planned, verified, staged, then done (see staging.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from thinwire.checkpoint.apply import build_weights, read_changes, write_small_file
from thinwire.checkpoint.disk import check_unshared, open_unshared, sync, write_file
from thinwire.checkpoint.file_names import MARK_NAME, file_path, first_clash
from thinwire.checkpoint.folder import Checkpoint
from thinwire.checkpoint.plan import Plan, PlannedFile, PlannedWeights, is_result, plan_result
from thinwire.checkpoint.redo_log import Block, FileSize, RedoHead, RedoWriter, staged_path
from thinwire.checkpoint.staging import keep_mode, seal, settle, staging_folder
from thinwire.codec.delta import ChunkChanges
from thinwire.codec.delta_set import OpenDelta
from thinwire.codec.dtypes import dtype_named
from thinwire.errors import ApplyError, Corrupt, InvalidArgument


class Scope(NamedTuple):
    """How a delta is read against a base: what it makes of it, and whether that is so already."""

    plan: Callable[[Checkpoint, OpenDelta], Plan]
    is_result: Callable[[Checkpoint, OpenDelta], bool]


WHOLE = Scope(plan_result, is_result)
OnChange = Callable[[ChunkChanges], None] | None


class _Update(NamedTuple):
    """What happens to the files: words patched, whole files replaced, others removed."""

    patched: list[PlannedWeights]
    rebuilt: list[PlannedWeights]
    files: list[PlannedFile]
    removed: list[str]
    mark: bytes | None

    @property
    def is_empty(self) -> bool:
        return self.mark is None and not any(self[:4])


def update_in_place(
    path: Path,
    delta: OpenDelta,
    *,
    scope: Scope = WHOLE,
    mark: bytes | None = None,
    workers: int,
    on_bytes: Callable[[int], None] | None,
    on_change: OnChange = None,
) -> frozenset[str] | None:
    """Turn the locked checkpoint at ``path`` into what ``delta`` makes of it, or leave it so.

    With ``mark``, the folder has that mark afterwards: it switches with the bytes. Before that,
    ``on_change`` is told of the changed words.

    Returns:
        The tensors that may have changed without ``on_change`` being told; None: any of them.

    Raises:
        ApplyError, InvalidArgument, FormatError, StoreError: As ``apply_in_place``.
    """
    finished = settle(path) == "finished"
    base = Checkpoint.open(path, ignore_subfolders=True)
    # Not what the log said of itself: whether this is the result shows in the files.
    is_done = finished and scope.is_result(base, delta)
    untold: frozenset[str] | None = None
    if not is_done:
        try:
            update = _prepare(base, delta, scope, mark, workers, on_bytes, on_change)
        except ApplyError:
            is_done = scope.is_result(base, delta)
            if not is_done:
                raise
        else:
            untold = frozenset(name for file in update.rebuilt for name in file.header.spans)
            if not update.is_empty:
                settle(path)
    if is_done and mark is not None:
        switch_mark(path, mark)
    return untold


@contextmanager
def staged_update(
    path: Path,
    delta: OpenDelta,
    *,
    scope: Scope,
    mark: bytes,
    workers: int,
    on_bytes: Callable[[int], None] | None,
) -> Iterator[None]:
    """As :func:`update_in_place`, in two steps: the block runs once everything is verified.

    Where the block ends with an error, the locked, settled checkpoint stays as it was.
    """
    base = Checkpoint.open(path, ignore_subfolders=True)
    update = _plan_update(base, delta, scope.plan(base, delta), mark)
    _check_writable(base, update)
    with staging_folder(path) as staging:
        _stage(base, delta, update, staging, workers, on_bytes)
        yield
        seal(path, staging)
    settle(path)


def switch_mark(path: Path, mark: bytes) -> None:
    """Give the locked, settled folder at ``path`` another mark, and change nothing else."""
    with staging_folder(path) as staging:
        stage_files(staging, [], [], mark)
        seal(path, staging)
    settle(path)


def stage_files(staging: Path, replaced: list[FileSize], removed: list[str], mark: bytes) -> None:
    """Log that the staged, synced ``replaced`` files come, ``removed`` go and the mark switches."""
    head = RedoHead("", [], [*replaced, FileSize(MARK_NAME, len(mark))], removed)
    with RedoWriter(staging, head) as log:
        write_file(staged_path(staging, len(replaced)), mark)
        log.finish()
    sync(staging)


def _prepare(
    base: Checkpoint,
    delta: OpenDelta,
    scope: Scope,
    mark: bytes | None,
    workers: int,
    on_bytes: Callable[[int], None] | None,
    on_change: OnChange,
) -> _Update:
    """Verify and stage the update, then commit to it, unless nothing changes."""
    update = _plan_update(base, delta, scope.plan(base, delta), mark)
    _check_writable(base, update)
    with staging_folder(base.path) as staging:
        _stage(base, delta, update, staging, workers, on_bytes, on_change)
        if not update.is_empty:
            seal(base.path, staging)
    return update


def _plan_update(base: Checkpoint, delta: OpenDelta, plan: Plan, mark: bytes | None) -> _Update:
    if plan.is_folder != base.is_folder:
        was, becomes = ("a folder", "one file") if base.is_folder else ("one file", "a folder")
        raise InvalidArgument(
            f"{base.path} is {was} and the delta makes {becomes}",
            hint="Apply it to a new path instead of in place",
            path=str(base.path),
        )
    names = {file.name for file in plan.weights}
    removed_weights = [name for name in base.weights if name not in names]
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
    # With the header that the base's file has, every tensor keeps its place: only words change.
    full = {entry.name for entry in delta.tensors.values() if entry.kind == "full"}
    stays = {
        file.name: file.from_base and full.isdisjoint(file.header.spans) for file in plan.weights
    }
    changed = {entry.name for entry in delta.tensors.values() if entry.kind == "delta"}
    return _Update(
        [f for f in plan.weights if stays[f.name] and not changed.isdisjoint(f.header.spans)],
        [f for f in plan.weights if not stays[f.name]],
        [file for file in plan.files if not file.from_base],
        removed,
        mark,
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
    delta: OpenDelta,
    update: _Update,
    staging: Path,
    workers: int,
    on_bytes: Callable[[int], None] | None,
    on_change: OnChange = None,
) -> None:
    """Write everything that the update needs into ``staging`` and make it durable."""
    replaced = [FileSize(file.name, file.header.file_bytes) for file in update.rebuilt]
    replaced += [FileSize(file.name, file.attachment.size) for file in update.files]
    if update.mark is not None:
        replaced.append(FileSize(MARK_NAME, len(update.mark)))
    patched = [FileSize(file.name, file.header.file_bytes) for file in update.patched]
    paths = {file.name: staged_path(staging, number) for number, file in enumerate(replaced)}
    with RedoWriter(staging, RedoHead(delta.identity, patched, replaced, update.removed)) as log:
        if update.rebuilt:
            build_weights(base, delta, update.rebuilt, paths, workers=workers, on_bytes=on_bytes)
        _log_changes(base, delta, update, log, workers, on_bytes, on_change)
        for file in update.files:
            write_small_file(base, delta, file, paths[file.name])
        if update.mark is not None:
            write_file(paths[MARK_NAME], update.mark)
        for name, path in paths.items():
            keep_mode(file_path(base.path, name), path)
        log.finish()
    sync(staging)


def _log_changes(
    base: Checkpoint,
    delta: OpenDelta,
    update: _Update,
    log: RedoWriter,
    workers: int,
    on_bytes: Callable[[int], None] | None,
    on_change: OnChange,
) -> None:
    """Log every changed word of the files that are not rebuilt.

    Returning means that all their tensors were verified, also of files in which nothing changes.
    """
    rebuilt = {name for file in update.rebuilt for name in file.header.spans}
    staying = delta.tensors.keys() - rebuilt
    homes = {
        name: (number, span)
        for number, file in enumerate(update.patched)
        for name, span in file.header.spans.items()
    }
    for change in read_changes(base, delta, on_bytes, workers=workers, only=staying):
        if change.name not in homes:
            # Only crafted digests let a "same" tensor change.
            raise Corrupt(
                f"the delta is unsound: its index says that {change.name!r} stays, yet it changes",
                hint="Do not trust it",
                tensor=change.name,
            )
        number, span = homes[change.name]
        word_bytes = dtype_named(span.dtype).word_bytes
        offset = span.start + change.first_word * word_bytes
        log.add(Block(number, offset, word_bytes, change.positions, change.words))
        if on_change is not None:
            on_change(change)
