"""A follower's folder whose versions are also written to a destination in another format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire.checkpoint.disk import os_errors, remove_quietly, write_file
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.threads import default_workers
from thinwire.errors import (
    BaseUnusable,
    InvalidArgument,
    LineageChanged,
    TensorMismatch,
    Unavailable,
    Unsupported,
)
from thinwire.follow import CheckpointSink, Mark, Stream
from thinwire.follow.install import Content
from thinwire.follow.sink import Installing
from thinwire.interop.change import DeltaChange
from thinwire.interop.destination import Destination
from thinwire.interop.formats import Format
from thinwire.interop.mirror_record import MirroredVersion
from thinwire.store import Store
from thinwire.store.wrappers import end_waits

WORK_NAME = ".thinwire-mirror"
# Holds the URL of the destination that this folder was written to.
_NOTE_NAME = ".thinwire-mirrored-to"


class MirrorSink(CheckpointSink):
    """A checkpoint folder whose versions are also written to a destination.

    Give it to a :class:`thinwire.interop.mirror.Mirror`, which tries again what failed. A plain
    follower counts a version as taken once the folder has it, also where the destination failed.

    Args:
        folder: As for :class:`thinwire.CheckpointSink`.
        destination: Opens the destination, given a folder for what waits to be uploaded and what to
            call between two uploads.
        workers: Threads; None: one for each processor, at most eight.
    """

    def __init__(
        self,
        folder: Path,
        destination: Callable[[Path, Callable[[], None]], Destination],
        *,
        workers: int | None = None,
    ) -> None:
        super().__init__(folder, workers=workers)
        self.between: Callable[[], None] = lambda: None
        self._open = destination
        self._destination: Destination | None = None
        self._is_quiet = False

    @property
    def destination(self) -> Destination:
        """Where the copy is.

        Raises:
            InvalidArgument, StoreError: It cannot be written to, or holds something else.
            Unavailable: This folder was written to it, and it is empty: its store is away.
        """
        if self._destination is None or self._destination.is_in_doubt:
            opened = self._open(self.folder / WORK_NAME, lambda: self.between())
            if not opened.was_found and self._read_note() == opened.store.url:
                raise self._away(opened.store.url)
            self._destination = opened
        return self._destination

    @contextmanager
    def own(self) -> Iterator[None]:
        """As a folder's, and without what an earlier run left in its scratch folder."""
        with super().own():
            remove_quietly(self.folder / WORK_NAME)
            try:
                yield
            finally:
                remove_quietly(self.folder / WORK_NAME)

    def apply(
        self, delta: DeltaSet, mark: Mark, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """As a folder's, after the version was written to the destination.

        A version that the format has no delta for, or that is due as a full one, is written after
        the folder has it.
        """
        held = self.mark()
        if not self._is_quiet and held is not None and not self._is_there(mark):
            self._write_delta(delta, held, mark)
        super().apply(delta, mark, on_bytes)
        if not self._is_quiet:
            self.deliver()

    @contextmanager
    def installing(self, mark: Mark | Callable[[], Mark]) -> Iterator[Installing]:
        """As a folder's; then the full version is written to the destination."""
        with super().installing(mark) as installing:
            yield installing
        if not self._is_quiet:
            self.deliver()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Write nothing to the destination meanwhile: for a way of which only the end counts."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def deliver(self) -> MirroredVersion | None:
        """Write what the folder holds to the destination, unless that has it, or is ahead.

        Returns:
            The newest version at the destination; None: the folder holds none yet.

        Raises:
            InvalidArgument: The format has no full versions, and no delta leads here.
            LineageChanged: The destination has another version of that number.
            BaseUnusable: The folder does not hold what its mark says.
            StoreError: The store failed; call it again.
        """
        mark = self.mark()
        if mark is None:
            return None
        if not self._is_there(mark):
            self._write_full(mark)
        self._write_note()
        return self.destination.newest

    def naming(self, mark: Mark) -> dict[str, Any]:
        """What a version's writer is told of its name, where the format has free names."""
        return {}

    def stop(self) -> None:
        """End a wait, be it for the destination's store. From any thread."""
        if self._destination is not None:
            end_waits(self._destination.store)

    def _read_note(self) -> str:
        path = self.folder / _NOTE_NAME
        with os_errors("cannot read", path):
            return path.read_text() if path.exists() else ""

    def _write_note(self) -> None:
        url = self.destination.store.url
        if self._read_note() != url:
            remove_quietly(self.folder / _NOTE_NAME)
            write_file(self.folder / _NOTE_NAME, url.encode())

    def _away(self, url: str) -> Unavailable:
        return Unavailable(
            f"{url}: there was a copy that this mirror wrote, and there is nothing now",
            hint="Is it mounted, and the URL right? If it was emptied on purpose, remove"
            f" {self.folder / _NOTE_NAME}",
            url=url,
        )

    def _write_full(self, mark: Mark) -> None:
        """Write full weights, which are proved against the manifest: nobody could later."""
        format = self.destination.format
        if not format.writes_full and self.destination.newest is None:
            self.destination.begin(version=mark.version, source=mark.manifest)
            return
        checkpoint = self.checkpoint()
        if Content.of_checkpoint(checkpoint) != Content(mark.weights, mark.layout):
            raise BaseUnusable(
                f"{self.folder} does not hold version {mark.version}: someone changed it",
                hint="Remove the folder; the mirror makes it again",
                path=str(self.folder),
            )
        try:
            self.destination.write_full(
                checkpoint, version=mark.version, source=mark.manifest, **self.naming(mark)
            )
        except (TensorMismatch, Unsupported) as error:
            # Not an error of the stream's, around which there would be another way.
            raise InvalidArgument(
                f"the {format.name} format cannot carry version {mark.version}: {error.message}",
                hint=error.hint or "Choose another format",
                version=mark.version,
            ) from error

    def _write_delta(self, delta: DeltaSet, held: Mark, mark: Mark) -> None:
        if not self.destination.takes_delta(held.manifest, held.version, mark.version):
            return
        spool_dir = self.folder / WORK_NAME
        change = DeltaChange(self.checkpoint(), delta, spool_dir, workers=self._workers)
        try:
            self.destination.write_delta(
                change,
                version=mark.version,
                base_version=held.version,
                source=mark.manifest,
                **self.naming(mark),
            )
        except (TensorMismatch, Unsupported):
            # Full weights carry it, if anything does: deliver() writes them.
            if not self.destination.format.writes_full:
                raise

    def _is_there(self, mark: Mark) -> bool:
        """Whether the destination has the version, or is ahead: killed between the two commits,
        or beside an older folder, it is."""
        newest = self.destination.newest
        if newest is not None and newest.version == mark.version:
            if newest.source != mark.manifest:
                raise set_back(self.destination.store.url, mark.version)
            return True
        return newest is not None and newest.version > mark.version


def mirror_sink(
    stream: Stream,
    folder: Path,
    store: Store,
    format: Format,
    *,
    options: dict[str, Any] | None = None,
    full_every: int | None = None,
    keep_full: int = 2,
    workers: int | None = None,
) -> MirrorSink:
    """What a :class:`Mirror` writes into.

    Args:
        stream: The stream that it will follow.
        folder: The mirror's own copy of the model.
        store: The destination.
        format: In which format.
        options: What the format's writer is asked for.
        full_every: After so many deltas a full version; None: as the format has it.
        keep_full: Full versions to keep, with the deltas after the oldest of them; 0: all.
        workers: Threads; None: one for each processor, at most eight.

    Raises:
        InvalidArgument: The format, or an option, cannot be written, or the destination is the
            stream or lies in the folder.
    """
    if not (format.writes_deltas or format.writes_full):
        raise InvalidArgument(
            f"the {format.name} format is only read here", hint="Choose another format"
        )
    format.check_options(options or {})
    refuse_same_place(stream, folder, store)
    workers = default_workers() if workers is None else workers

    def open_destination(work_dir: Path, between: Callable[[], None]) -> Destination:
        return Destination(
            store,
            format,
            stream.record().stream,
            options=options,
            full_every=full_every,
            keep_full=keep_full,
            work_dir=work_dir,
            workers=workers,
            between=between,
        )

    return MirrorSink(folder, open_destination, workers=workers)


def refuse_same_place(stream: Stream, folder: Path, store: Store) -> None:
    """Refuse a destination that is the stream itself, or would become a part of the folder.

    Raises:
        InvalidArgument: It is, or would.
    """
    path = store.url.removeprefix("file://")
    inside = path.startswith("/") and Path(path).resolve().is_relative_to(folder.resolve())
    if store.url == stream.url or inside:
        raise InvalidArgument(
            f"{store.url} is the stream itself, or lies in the work folder",
            hint="Give another destination",
            url=store.url,
        )


def set_back(url: str, version: int) -> LineageChanged:
    """The error for a destination that has a version which the stream has not."""
    return LineageChanged(
        f"{url} has a version {version} that the stream has not: the stream was set back or"
        " replaced",
        hint="Was it meant? Then mirror it into another work folder and destination",
        version=version,
    )
