"""The version that a chain of another system's deltas has come to, as a checkpoint on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, cast

from thinwire.checkpoint import Checkpoint, apply_checkpoint, apply_in_place
from thinwire.checkpoint.disk import (
    map_file,
    os_errors,
    put_in_place,
    remove,
    remove_quietly,
    temporary_sibling,
)
from thinwire.checkpoint.folder import refuse_inside
from thinwire.codec.container import Attachment
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import write_delta
from thinwire.errors import AlreadyExists
from thinwire.interop.change import Change, CheckpointChange
from thinwire.interop.writing import spooled_pairs


class ChainState:
    """Where a chain is; what it begins with is only read.

    Attributes:
        path: The checkpoint; None: nothing yet.

    Args:
        folder: Where the states are made; what lies there goes.
        workers: Threads.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.path: Path | None = None
        self._folder = folder
        self._workers = workers

    def begin(self, path: Path) -> None:
        """Go on from full weights, which are only read."""
        remove(self._folder)
        self.path = path

    def checkpoint(self) -> Checkpoint:
        """What the chain has come to, opened."""
        assert self.path is not None
        return Checkpoint.open(self.path, ignore_subfolders=True)

    def advance(self, change: Change) -> None:
        """Go on to what a change of this state makes."""
        if isinstance(change, CheckpointChange):
            self.begin(change.new.path)
            return
        assert self.path is not None
        delta = self._folder.with_name("step.tw")
        try:
            write_thinwire(change, delta, self._workers, overwrite=True)
            if self.path == self._folder:
                apply_in_place(self.path, delta, workers=self._workers)
            else:
                apply_checkpoint(self.path, delta, self._folder, workers=self._workers)
                self.path = self._folder
        finally:
            remove_quietly(delta)


def write_thinwire(change: Change, target: Path, workers: int, overwrite: bool) -> int:
    """Write a change as a delta of thinwire's; returns its bytes."""
    if os.path.lexists(target) and not overwrite:
        raise AlreadyExists(
            f"{target} exists", hint="Choose another path, or pass --overwrite", path=str(target)
        )
    refuse_inside(target.absolute(), change.base)
    temporary = temporary_sibling(target)
    try:
        with (
            spooled_pairs(change, target.absolute().parent, workers=workers) as pairs,
            os_errors("cannot write", target),
            temporary.open("xb") as file,
        ):
            summary = write_delta(
                cast(BinaryIO, file),
                pairs,
                _attachments(change),
                workers=workers,
                spool_dir=target.absolute().parent,
            )
            file.flush()
            os.fsync(file.fileno())
        change.check_unchanged()
        put_in_place(temporary, target, overwrite=overwrite)
    except BaseException:
        remove_quietly(temporary)
        raise
    return summary.file_bytes


def _attachments(change: Change) -> list[Attachment]:
    """The base's headers, which stay, and the files that differ from the base's."""
    rows = []
    for name in change.layout:
        data = change.base.weights[name].header_bytes
        rows.append(Attachment(name, "header", None, len(data), xxh3_64(data)))
    for name in sorted(change.file_names):
        view = change.read_file(name)
        old = change.base.files.get(name)
        is_same = old is not None and map_file(old).data == view
        carried = None if is_same else bytes(view)
        rows.append(Attachment(name, "file", carried, len(view), xxh3_64(view)))
    return rows
