"""A host's copy of the model: the folder that engines on this host are brought up to.

It is an ordinary follower's folder, always exactly at its mark. Besides, it remembers which words
changed since an engine was last brought up to it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec

from thinwire.checkpoint.disk import os_errors
from thinwire.codec.delta import ChunkChanges
from thinwire.codec.delta_set import DeltaSet
from thinwire.engines.engine import Update, label_of
from thinwire.engines.places import PlacesFile
from thinwire.errors import InvalidArgument
from thinwire.follow import CheckpointSink, Mark
from thinwire.follow.sink import Installing
from thinwire.stream.version import Version

FOLDER_NAME = ".thinwire-engine"
PLACES_SUFFIX = ".places"


class HostCopy(CheckpointSink):
    """A checkpoint folder with a memory of what changed since :meth:`served`.

    Args:
        folder: As for :class:`thinwire.CheckpointSink`.
        workers: Threads.
    """

    def __init__(self, folder: str | os.PathLike[str], *, workers: int = 1) -> None:
        super().__init__(folder, workers=workers)
        # Ranks map the files by this path.
        self.folder = self.folder.absolute()
        self._places: PlacesFile | None = None
        self._at = ""  # the manifest of the version up to which the places are complete
        self._since = ""  # the label of the version from which on they are; empty: of none

    @property
    def engine_folder(self) -> Path:
        """Where this host's side and the engine's ranks leave notes for each other."""
        return self.folder / FOLDER_NAME

    @contextmanager
    def own(self) -> Iterator[None]:
        """As a folder's, and with no notes of an earlier run."""
        with super().own():
            # Maps of where things lie stay: they are costly, and checked before they are used.
            for name in ("updates", "ranks"):
                shutil.rmtree(self.engine_folder / name, ignore_errors=True)
                with os_errors("cannot create", self.engine_folder):
                    (self.engine_folder / name).mkdir(parents=True)
            try:
                yield
            finally:
                self._forget()

    def apply(
        self, delta: DeltaSet, mark: Mark, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """As a folder's; the changed words are noted down."""
        if mark.tensors:
            raise InvalidArgument("an engine needs the whole model", hint="Leave tensors out")
        before = self.mark()
        if before is None or before.manifest != self._at:
            self._forget()
        kinds = {entry.kind for entry in delta.tensors.values()}
        if kinds - {"delta", "same", "full"}:
            self._forget()
        untold = self._marked.apply(
            delta,
            _encoded(mark),
            workers=self._workers,
            on_bytes=on_bytes,
            on_change=self._note,
        )
        if untold is None:
            self._forget()
        for name in sorted(untold or ()):
            if self._places is not None and name in delta.tensors:
                self._places.add_whole(name, delta.tensors[name].byte_count)
        self._at = mark.manifest

    def installing(self, mark: Mark | Callable[[], Mark]) -> AbstractContextManager[Installing]:
        """As a folder's; everything may be different afterwards."""
        self._forget()
        return super().installing(mark)

    def served(self, version: Version) -> None:
        """Begin to remember: an engine holds ``version``, which is what the folder holds."""
        self._forget()
        self._places = PlacesFile(self.engine_folder / "updates" / "next")
        self._since = label_of(version)
        self._at = version.manifest

    def update_to(self, version: Version) -> Update:
        """The way of an engine to what the folder holds, which must be ``version``.

        It may be asked for again where the engine did not get there.
        """
        if self._at != version.manifest:
            self._forget()
        places, base = self._places, self._since
        update = Update(
            version=version,
            folder=self.folder,
            token=secrets.token_hex(8),
            base=base,
            changed_count=0 if places is None else places.word_count,
        )
        if places is not None:
            places.rename(places_path(update))
            places.seal()
        return update

    def _note(self, change: ChunkChanges) -> None:
        if self._places is not None:
            self._places.add(change)

    def _forget(self) -> None:
        if self._places is not None:
            self._places.close()
            with suppress(OSError):
                self._places.path.unlink()
        self._places = None
        self._since = self._at = ""


def places_path(update: Update) -> Path:
    """Where an update's file of changed words lies."""
    return update.folder / FOLDER_NAME / "updates" / f"{update.token}{PLACES_SUFFIX}"


def _encoded(mark: Mark) -> bytes:
    return msgspec.json.encode(mark)
