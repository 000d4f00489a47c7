"""A checkpoint folder that says which version it exactly holds: its *mark*.

The mark is opaque bytes in a hidden file, which readers of checkpoints skip. It switches through
the redo log that the weights go through (:mod:`thinwire.checkpoint.staging`): log first, bytes
second, mark last. So after recovery the folder is the old bytes with the old mark, or the new bytes
with the new mark, wherever the process was killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.checkpoint.disk import check_unshared, map_file, os_errors, remove, sync
from thinwire.checkpoint.file_names import MARK_NAME, MAX_MARK_BYTES, is_weights_name
from thinwire.checkpoint.folder import hidden_path
from thinwire.checkpoint.installation import Installation
from thinwire.checkpoint.lock import locked
from thinwire.checkpoint.partial_plan import is_partial_result, plan_partial
from thinwire.checkpoint.staging import Recovery, settle, staging_folder
from thinwire.checkpoint.update import WHOLE, OnChange, Scope, staged_update, update_in_place
from thinwire.codec.delta_set import OpenDelta
from thinwire.errors import BaseUnusable, InvalidArgument

_PARTIAL = Scope(plan_partial, is_partial_result)


class MarkedFolder:
    """A checkpoint folder with a mark. One process at a time may call its methods.

    Attributes:
        path: The folder, symbolic links resolved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the folder; it is created, with the folders above it, where it is missing.

        Raises:
            InvalidArgument: A file is there.
            StoreError: The folder cannot be created.
        """
        _make_folders(Path(path).absolute())
        with os_errors("cannot open", path):
            self.path = Path(path).resolve(strict=True)

    def recover(self) -> Recovery:
        """Finish or discard an interrupted update, as :func:`thinwire.checkpoint.recover` does.

        Raises:
            BaseUnusable: Someone else is updating, or the update cannot be finished; says why.
            StoreError: Files cannot be written.
        """
        with locked(hidden_path(self.path, "lock")):
            return settle(self.path)

    def read_mark(self) -> bytes | None:
        """The mark, after recovery; None where the folder has none.

        Raises:
            BaseUnusable: As :meth:`recover`, or the mark is not one that thinwire wrote.
            StoreError: Files cannot be read or written.
        """
        with self._settled():
            path = self.path / MARK_NAME
            if not os.path.lexists(path):
                return None
            view = map_file(path, follow_link=False)
            if view.size > MAX_MARK_BYTES:
                raise _foreign_mark(path, f"has {view.size} bytes")
            return view.tobytes()

    def apply(
        self,
        delta: OpenDelta,
        mark: bytes,
        *,
        partial: bool = False,
        workers: int = 1,
        on_bytes: Callable[[int], None] | None = None,
        on_change: OnChange = None,
    ) -> frozenset[str] | None:
        """Turn the folder into what ``delta`` makes of it, and its mark into ``mark``, as one step.

        Where the folder already is the result, or the delta changes nothing, only the mark
        switches. After an error before the log was complete, bytes and mark are as they were; after
        a crash or an error later, :meth:`recover` or any other method finishes the update.

        Args:
            delta: An opened delta, or several as a set; it stays open.
            mark: The new mark, at most ``MAX_MARK_BYTES``.
            partial: The folder holds exactly the tensors that ``delta`` was opened with (``only``),
                in weights files of its own making.
            workers: Threads that decode.
            on_bytes: Called with the raw bytes of each piece of work done.
            on_change: Called with the changed words, chunk by chunk, before they are written.

        Returns:
            The tensors that may have changed without ``on_change`` being told; None: any of them.

        Raises:
            TensorMismatch: The folder's tensors are not those of the delta; in a partial folder
                also: their layout changed, and it must be installed again.
            ApplyError, InvalidArgument, FormatError, StoreError: As ``apply_in_place``.
        """
        _check_mark(mark)
        scope = _PARTIAL if partial else WHOLE
        with self._settled():
            return update_in_place(
                self.path,
                delta,
                scope=scope,
                mark=mark,
                workers=workers,
                on_bytes=on_bytes,
                on_change=on_change,
            )

    @contextmanager
    def applying(
        self,
        delta: OpenDelta,
        mark: bytes,
        *,
        workers: int = 1,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Iterator[None]:
        """As :meth:`apply`, in two steps: the block runs once everything is decoded and verified.

        At its end bytes and mark switch; where it ends with an error, they stay. The lock is held
        meanwhile: the other methods of this folder raise ``BaseUnusable``.

        Raises:
            ThinwireError: As :meth:`apply`; before the block, nothing was changed.
        """
        _check_mark(mark)
        with (
            self._settled(),
            staged_update(
                self.path, delta, scope=WHOLE, mark=mark, workers=workers, on_bytes=on_bytes
            ),
        ):
            yield

    @contextmanager
    def installing(self, mark: bytes | Callable[[], bytes]) -> Iterator[Installation]:
        """Replace the folder's whole checkpoint by the files that the block writes.

        At the end of the block the folder holds exactly these files, and the mark, as one step:
        every other file that belongs to a checkpoint is removed; what readers skip (hidden folders,
        thinwire's own files) and subfolders stay. The files are not looked into: verify them
        before. After an error in the block, or at its end before the log was complete, the folder
        is as it was; after a crash or an error later, any method finishes the update. The lock is
        held meanwhile: the other methods of this folder raise ``BaseUnusable``.

        Args:
            mark: The new mark, or what gives it once the block has ended without an error.

        Raises:
            InvalidArgument: A name is no file name or clashes with another, a file was not written,
                or the folder holds something that no checkpoint may.
            BaseUnusable: Someone else is updating, or a file of the folder is a link.
            StoreError: Files cannot be written.
        """
        if isinstance(mark, bytes):
            _check_mark(mark)
        with self._settled():
            with staging_folder(self.path) as staging:
                installation = Installation(self.path, staging)
                yield installation
                final = mark if isinstance(mark, bytes) else mark()
                _check_mark(final)
                installation.seal(final)
            settle(self.path)

    def unmark(self) -> None:
        """Take the mark away, durably; do it before the folder is declared unusable.

        An interrupted update is finished or discarded first. Where it cannot be finished its log
        stays, with which the folder can be neither read nor marked.

        Raises:
            BaseUnusable: Someone else is updating.
            StoreError: The mark cannot be removed.
        """
        with locked(hidden_path(self.path, "lock")):
            with suppress(BaseUnusable):
                settle(self.path)
            path = self.path / MARK_NAME
            with os_errors("cannot remove", path):
                path.unlink(missing_ok=True)
            sync(self.path)

    def clear(self) -> None:
        """Remove mark and weights files, and whatever is left of an interrupted update.

        For a folder that cannot be recovered, or to make room: only :meth:`installing` makes a
        checkpoint of it again. Other files stay. Killed half-way, the folder is unmarked, and
        either cannot be opened or holds whole files of one version.

        Raises:
            BaseUnusable: Someone else is updating.
            StoreError: Something cannot be removed.
        """
        with locked(hidden_path(self.path, "lock")):
            redo, staging = hidden_path(self.path, "redo"), hidden_path(self.path, "staging")
            with os_errors("cannot list", self.path), os.scandir(self.path) as found:
                doomed = [
                    Path(entry.path)
                    for entry in found
                    if is_weights_name(entry.name) and not entry.is_dir(follow_symlinks=False)
                ]
            for path in [self.path / MARK_NAME, *doomed]:
                with os_errors("cannot remove", path):
                    path.unlink(missing_ok=True)
                # The mark goes first, and the log, which keeps readers out, goes last.
                sync(self.path)
            remove(staging)
            remove(redo)
            sync(self.path)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Hold the lock of the folder, recovered, with a mark that can be read and replaced."""
        with locked(hidden_path(self.path, "lock")):
            settle(self.path)
            path = self.path / MARK_NAME
            # Found before anything is staged: the log could not be carried out.
            if os.path.lexists(path):
                check_unshared(path)
            yield


def _make_folders(path: Path) -> None:
    """Create a folder and those above it, durably, as far as they are missing."""
    if path.is_dir():
        return
    if os.path.lexists(path):
        raise InvalidArgument(
            f"{path} is not a folder", hint="Choose another path or remove it", path=str(path)
        )
    _make_folders(path.parent)
    with os_errors("cannot create", path):
        path.mkdir(exist_ok=True)
    sync(path.parent)


def _check_mark(mark: bytes) -> None:
    if len(mark) > MAX_MARK_BYTES:
        raise InvalidArgument(
            f"a mark of {len(mark)} bytes; the limit is {MAX_MARK_BYTES}", hint="Shorten it"
        )


def _foreign_mark(path: Path, reason: str) -> BaseUnusable:
    return BaseUnusable(
        f"{path} {reason}: it is not a mark that thinwire wrote",
        hint="Remove it and install the folder again",
        path=str(path),
    )
