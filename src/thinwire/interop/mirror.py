"""A copy of a stream in another system's format, kept current.

A mirror is a follower whose sink, besides its own folder, writes every version to a destination:
what an engine that was built for that system reads. The destination's version is committed first
and the folder's mark switches second; whatever interrupts it, the same version is written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire.checkpoint.disk import remove_quietly
from thinwire.codec.delta_set import DeltaSet
from thinwire.errors import (
    EngineError,
    HistoryPruned,
    InvalidArgument,
    NotFound,
    StoreError,
    TensorMismatch,
    ThinwireError,
    Unsupported,
)
from thinwire.follow import CheckpointSink, Follower, Mark, Stream
from thinwire.follow.sink import Installing
from thinwire.interop.change import DeltaChange
from thinwire.interop.destination import Destination, MirroredVersion
from thinwire.interop.formats import Format
from thinwire.store import Store
from thinwire.stream.version import Version

WORK_NAME = ".thinwire-mirror"


class MirrorSink(CheckpointSink):
    """A checkpoint folder whose versions are also written to a destination.

    Args:
        folder: As for :class:`thinwire.CheckpointSink`.
        destination: Opens the destination, given a folder for what waits to be uploaded.
        workers: Threads.
    """

    def __init__(
        self,
        folder: Path,
        destination: Callable[[Path], Destination],
        *,
        workers: int = 1,
    ) -> None:
        super().__init__(folder, workers=workers)
        self._open = destination
        self._destination: Destination | None = None
        self._is_quiet = False

    @property
    def destination(self) -> Destination:
        """Where the copy is.

        Raises:
            InvalidArgument, StoreError: It cannot be written to, or holds something else.
        """
        if self._destination is None:
            self._destination = self._open(self.folder / WORK_NAME)
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
        """Write what the folder holds to the destination, unless it is there.

        Returns:
            The newest version at the destination; None: the folder holds none yet.

        Raises:
            InvalidArgument: The format has no full versions, and no delta leads here.
            StoreError: The store failed; call it again.
        """
        mark = self.mark()
        if mark is None:
            return None
        if not self._is_there(mark):
            self._write_full(mark)
        return self.destination.newest

    def naming(self, mark: Mark) -> dict[str, Any]:
        """What a version's writer is told of its name, where the format has free names."""
        return {}

    def _write_full(self, mark: Mark) -> None:
        format = self.destination.format
        if not format.writes_full and self.destination.newest is None:
            self.destination.begin(version=mark.version, source=mark.manifest)
            return
        try:
            self.destination.write_full(
                self.checkpoint(), version=mark.version, source=mark.manifest, **self.naming(mark)
            )
        except (TensorMismatch, Unsupported) as error:
            # Not an error of the stream's, around which there would be another way.
            raise InvalidArgument(
                f"the {format.name} format cannot carry version {mark.version}: {error.message}",
                hint=error.hint or "Choose another format",
                version=mark.version,
            ) from error

    def _write_delta(self, delta: DeltaSet, held: Mark, mark: Mark) -> None:
        if not self.destination.takes_delta(held.version, mark.version):
            return
        change = DeltaChange(self.checkpoint(), delta)
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
        # Killed between the two commits, the destination is ahead of the folder by one.
        return any(row.source == mark.manifest for row in self.destination.record.versions)


class Mirror:
    """Keeps a destination at the newest version of a stream, one version after the other.

    Use it as a context manager. Unlike a plain follower it leaves no version out where it can help
    it: a chain of step deltas is what the formats know.

    Args:
        stream: The stream.
        sink: The folder and the destination.
        follower_options: As for :class:`thinwire.Follower`.
    """

    def __init__(self, stream: Stream, sink: MirrorSink, **follower_options: Any) -> None:
        self.stream = stream
        self.sink = sink
        self._follower = Follower(stream, sink, **follower_options)
        self._is_stopped = threading.Event()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        self.stop()
        self._follower.close()

    def stop(self) -> None:
        """End :meth:`run` after the version that is being written. From any thread."""
        self._is_stopped.set()
        self._follower.stop()

    def catch_up(self, *, from_oldest: bool = False) -> Iterator[tuple[Version, MirroredVersion]]:
        """Write every version up to the newest; yields each with what it became.

        Args:
            from_oldest: Begin with the oldest version that can still be reached, where nothing was
                mirrored yet; else with the newest.

        Raises:
            NotFound: Nothing was published yet.
            ThinwireError: As :meth:`thinwire.Follower.catch_up`, or the destination failed.
        """
        held = self._follower.version()
        if held is None:
            with self.sink.quiet():
                held = self._oldest() if from_oldest else self._follower.catch_up()
        before = self.sink.destination.newest
        written = self.sink.deliver()
        if written is not None and written is not before:
            yield held, written
        while not self._is_stopped.is_set():
            following = self.stream.manifest(held.lineage, held.version + 1)
            if following is None:
                return
            if following.kind == "end":
                # Whether to go along is the follower's to decide.
                with self.sink.quiet():
                    after = self._follower.catch_up()
                if after.manifest == held.manifest:
                    return
                held = after
                self.sink.deliver()
            else:
                held = self._follower.bring_to(following)
            written = self.sink.destination.newest
            assert written is not None
            yield held, written

    def run(
        self, *, poll_s: float = 1.0, on_failure: Callable[[ThinwireError], None] | None = None
    ) -> Iterator[tuple[Version, MirroredVersion]]:
        """Yield each version that was written, until :meth:`stop`.

        Failures that may pass are told to ``on_failure`` and tried again; all others are raised.

        Args:
            poll_s: The time between two looks, in seconds.
            on_failure: Told of every failure that may pass.
        """
        while not self._is_stopped.is_set():
            try:
                yield from self.catch_up()
            except (StoreError, EngineError) as error:
                is_early = isinstance(error, NotFound) and self._follower.version() is None
                if not (error.retryable or is_early):
                    raise
                if on_failure is not None:
                    on_failure(error)
            self._is_stopped.wait(poll_s)

    def _oldest(self) -> Version:
        """Bring the folder to the oldest version that can still be reached."""
        head = self.stream.tip().head
        if head is None:
            raise NotFound(f"nothing was published to {self.stream.url} yet", hint="Publish first")
        candidates = {head.first, *self.stream.listed_anchors(head.lineage), head.version}
        for version in sorted(candidates):
            try:
                return self._follower.catch_up(version, reset=True)
            except (HistoryPruned, NotFound):
                continue
        raise HistoryPruned(
            f"no version of {self.stream.url} can be reached", hint="`thinwire fsck` shows more"
        )


def mirror_sink(
    stream: Stream,
    folder: Path,
    store: Store,
    format: Format,
    *,
    options: dict[str, Any] | None = None,
    full_every: int | None = None,
    keep_full: int = 2,
    workers: int = 1,
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
        workers: Threads.

    Raises:
        InvalidArgument: The format cannot be written.
    """
    if not (format.writes_deltas or format.writes_full):
        raise InvalidArgument(
            f"the {format.name} format is only read here", hint="Choose another format"
        )

    def open_destination(work_dir: Path) -> Destination:
        return Destination(
            store,
            format,
            stream.record().stream,
            options=options,
            full_every=full_every,
            keep_full=keep_full,
            work_dir=work_dir,
        )

    return MirrorSink(folder, open_destination, workers=workers)
