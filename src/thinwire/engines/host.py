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
from thinwire.codec.dtypes import dtype_named
from thinwire.engines.engine import Update, label_of
from thinwire.engines.mounts import refuse_network_folder
from thinwire.engines.places import PlacesFile
from thinwire.errors import InvalidArgument, ThinwireError
from thinwire.follow import CheckpointSink, Mark
from thinwire.follow.sink import Installing
from thinwire.stream.version import Version

FOLDER_NAME = ".thinwire-engine"
PLACES_SUFFIX = ".places"
# Beyond this share of the words, comparing all of them is as good as a list.
_MAX_NOTED_SHARE = 1 / 20


class HostCopy(CheckpointSink):
    """A checkpoint folder with a memory of what changed since :meth:`served`.

    Args:
        folder: As for :class:`thinwire.CheckpointSink`.
        workers: As for it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, workers: int | None = None) -> None:
        super().__init__(folder, workers=workers)
        # Ranks map the files by this path.
        self.folder = self.folder.absolute()
        refuse_network_folder(self.folder)
        self._places: PlacesFile | None = None
        self._at = ""  # the manifest of the version up to which the places are complete
        self._since = ""  # the label of the version from which on they are; empty: of none
        self._room = 0  # words that may be noted down

    @property
    def engine_folder(self) -> Path:
        """Where this host's side and the engine's ranks leave notes for each other."""
        return self.folder / FOLDER_NAME

    @property
    def pause_marker(self) -> Path:
        """A file that is there while the engine is paused by its driver."""
        return self.engine_folder / "paused"

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
            if name in delta.tensors:
                entry = delta.tensors[name]
                self._note_whole(name, entry.byte_count // dtype_named(entry.dtype).word_bytes)
        self._at = mark.manifest

    def installing(self, mark: Mark | Callable[[], Mark]) -> AbstractContextManager[Installing]:
        """As a folder's; everything may be different afterwards."""
        self._forget()
        return super().installing(mark)

    def served(self, version: Version) -> None:
        """Begin to remember: an engine holds ``version``, which is what the folder holds."""
        self._forget()
        with suppress(ThinwireError):
            # Without a list, all words are compared.
            self._places = PlacesFile(self._updates / "next")
        self._room = int(version.word_count * _MAX_NOTED_SHARE)
        self._since = label_of(version)
        self._at = version.manifest

    def update_to(self, version: Version) -> Update:
        """The way of an engine to what the folder holds.

        It may be asked for again where the engine did not get there.

        Args:
            version: What the folder holds.

        Raises:
            InvalidArgument: It holds another version, or none.
        """
        mark = self.mark()
        if mark is None or mark.manifest != version.manifest:
            raise InvalidArgument(
                f"{self.folder} holds {'no version' if mark is None else mark.version}, not "
                f"version {version.version}",
                hint="Ask the follower for the version that it holds",
            )
        if self._at != version.manifest:
            self._forget()
        token = secrets.token_hex(8)
        try:
            if self._places is not None:
                self._places.rename(self._updates / f"{token}{PLACES_SUFFIX}")
                self._places.seal()
        except ThinwireError:
            self._forget()
        return Update(
            version=version,
            folder=self.folder,
            token=token,
            base=self._since if self._places is not None else "",
            changed_count=0 if self._places is None else self._places.word_count,
        )

    def forget_changes(self) -> None:
        """Have the next update compare all words, whatever was noted down."""
        self._forget()

    @property
    def _updates(self) -> Path:
        return self.engine_folder / "updates"

    def _note(self, change: ChunkChanges) -> None:
        self._add(int(change.positions.size), lambda places: places.add(change))

    def _note_whole(self, name: str, word_count: int) -> None:
        self._add(word_count, lambda places: places.add_whole(name, word_count))

    def _add(self, word_count: int, add: Callable[[PlacesFile], None]) -> None:
        """Note words down. That it does not work must not keep the copy from its version."""
        places = self._places
        if places is None:
            return
        try:
            if places.word_count + word_count > self._room:
                self._forget()
            else:
                add(places)
        except ThinwireError:
            self._forget()

    def _forget(self) -> None:
        if self._places is not None:
            self._places.close()
            with suppress(OSError):
                self._places.path.unlink()
        self._places = None
        self._since = self._at = ""


def places_path(folder: Path, token: str) -> Path:
    """Where an update's file of changed words lies in a host's copy."""
    return folder / FOLDER_NAME / "updates" / f"{token}{PLACES_SUFFIX}"


def _encoded(mark: Mark) -> bytes:
    return msgspec.json.encode(mark)
