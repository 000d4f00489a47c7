"""New files for a whole folder, staged one by one and then swapped in together."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock

from thinwire.checkpoint.disk import check_unshared, sync
from thinwire.checkpoint.file_names import first_clash, folded, name_fault
from thinwire.checkpoint.folder import list_files, refuse_unfinished_files
from thinwire.checkpoint.redo_log import FileSize, staged_path
from thinwire.checkpoint.staging import keep_mode, seal
from thinwire.checkpoint.update import stage_files
from thinwire.errors import InvalidArgument


class Installation:
    """The files that a locked folder shall hold; may be filled from several threads."""

    def __init__(self, folder: Path, staging: Path) -> None:
        """Begin one: nothing is written yet.

        Raises:
            InvalidArgument: The folder holds something that no checkpoint may, say a pipe.
            BaseUnusable: An in-place update of one of its files alone was interrupted.
        """
        # Looked at once more before the commit.
        there = list_files(folder, ignore_subfolders=True)
        self._folded = {folded(name): name for name in there}
        refuse_unfinished_files(folder)
        self._folder = folder
        self._staging = staging
        self._names: list[str] = []
        self._lock = Lock()

    def path_for(self, name: str) -> Path:
        """Where to write the file that will be called ``name``; nothing is there yet.

        Raises:
            InvalidArgument: It is not a plain file name, was asked for before, or differs from
                another one only in case.
            BaseUnusable: In the folder the name is a link, a subfolder or shared with another.
        """
        if fault := name_fault(name):
            raise InvalidArgument(f"the file name {name[:80]!r} {fault}", hint="Choose another")
        with self._lock:
            if name in self._names:
                raise InvalidArgument(
                    f"the file {name!r} was asked for before", hint="Write each file once"
                )
            other = self._folded.setdefault(folded(name), name)
            if other != name:
                raise self._clash(other, name)
            _check_target(self._folder / name)
            self._names.append(name)
            return staged_path(self._staging, len(self._names) - 1)

    def seal(self, mark: bytes) -> None:
        """Make the staged files durable and commit to them.

        Raises:
            InvalidArgument: One was not written.
            BaseUnusable: One is a link or has a second name; or as :meth:`path_for`.
            StoreError: The log cannot be written.
        """
        replaced = []
        for number, name in enumerate(self._names):
            staged = staged_path(self._staging, number)
            if not os.path.lexists(staged):
                raise InvalidArgument(
                    f"the file {name!r} was not written", hint="Write every file that was asked for"
                )
            # Again: the folder may have changed since.
            _check_target(self._folder / name)
            replaced.append(FileSize(name, check_unshared(staged).st_size))
            keep_mode(self._folder / name, staged)
            sync(staged)
        there = list_files(self._folder, ignore_subfolders=True)
        if clash := first_clash(dict.fromkeys([*there, *self._names])):
            raise self._clash(*clash)
        removed = [name for name in there if name not in set(self._names)]
        stage_files(self._staging, replaced, removed, mark)
        seal(self._folder, self._staging)

    def _clash(self, one: str, other: str) -> InvalidArgument:
        return InvalidArgument(
            f"{self._folder}: the names {one!r} and {other!r} differ only in case",
            hint="Remove one: some file systems hold only one of them",
            path=str(self._folder),
        )


def _check_target(path: Path) -> None:
    if os.path.lexists(path):
        check_unshared(path)
