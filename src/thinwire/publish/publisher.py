"""The trainer's side: diff against the last committed version, upload, commit, move on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from thinwire.checkpoint import Checkpoint
from thinwire.codec.chunk import Spec
from thinwire.errors import (
    InvalidArgument,
    LineageChanged,
    StoreError,
    ThinwireError,
    Unavailable,
)
from thinwire.follow import CheckpointSink, Follower, Mark, Stream, open_stream
from thinwire.follow.reference import local_copy, source_of
from thinwire.maintain.upload import SHARD_RAW_BYTES
from thinwire.publish.background import Background
from thinwire.publish.committing import Committer, Landed, Place
from thinwire.publish.creation import create_stream
from thinwire.publish.making import Facts, VersionMaker
from thinwire.publish.source import TENSORS, Source, open_source
from thinwire.stream.encoding import MAX_NUMBER, plain_metadata
from thinwire.stream.events import Observer, Observers, Refusals
from thinwire.stream.records import Manifest
from thinwire.stream.version import Version

_LOG = logging.getLogger("thinwire")

# Times that our own earlier attempt, whose answer was lost, may turn out to have succeeded.
_MAX_ATTEMPTS = 8


class Publisher:
    """Publishes versions of one stream. Use it as a context manager, or call :meth:`close`.

    The baseline, what the next delta is made from, is a checkpoint folder that is always exactly at
    the last committed version: a follower's folder will do. Opening brings it to the head of the
    stream and proves what it holds. It needs the disk space of one model and of a redo log. The
    background thread keeps one more copy of the model, and one for each merge level in use.

    Args:
        stream: The stream, or its URL. It is made, if there is none and the folder is empty.
        folder: The baseline's folder.
        new_lineage: Begin a new lineage with the next version, which then needs no baseline: for a
            restart from older weights.
        base: Where a copy of the model is that the stream begins with by reference.
        maintain: Let a background thread make anchors and merged deltas, unless a
            ``thinwire maintain`` runs.
        work_dir: Where that thread keeps its copies of the model; None: inside ``folder``.
        workers: Threads for encoding.
        spec: What to ask of the encoder.
        shard_raw_bytes: Larger models are published in several shards of about this raw size.
        observer: Told of every event.

    Raises:
        UnsafeStore: The store does not honour put-if-absent.
        Unavailable: The folder holds a version of a stream, and there is none at the URL: its store
            is away.
        LineageChanged: A new lineage was begun and has no version yet: pass ``new_lineage``.
        HistoryPruned: The baseline cannot be brought to the head.
        BaseUnusable: Another publisher or follower uses the folder.
    """

    def __init__(
        self,
        stream: Stream | str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        new_lineage: bool = False,
        base: str | os.PathLike[str] | None = None,
        maintain: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
        workers: int = 1,
        spec: Spec | None = None,
        shard_raw_bytes: int = SHARD_RAW_BYTES,
        observer: Observer | None = None,
    ) -> None:
        self.stream = stream if isinstance(stream, Stream) else open_stream(stream)
        self._sink = CheckpointSink(folder, workers=workers)
        if self._sink.mark() is not None:
            self.stream.expect(self._sink)
        create_stream(self.stream)
        self._observers = Observers(observer)
        self._is_closed = False
        self._follower = Follower(
            self.stream,
            self._sink,
            base=base,
            accept_new_lineages=True,
            lease=False,
            observer=Refusals(self._observers),
        )
        try:
            self._committer = Committer(self.stream, new_lineage=new_lineage)
            if not new_lineage:
                self._go_on()
            self._maker = VersionMaker(
                self.stream,
                self._sink,
                self._committer,
                spec=spec,
                workers=workers,
                shard_raw_bytes=shard_raw_bytes,
                on_failure=self._refuse,
            )
            self._background = Background(
                self.stream,
                Path(folder) / ".thinwire-work" if work_dir is None else Path(work_dir),
                self._observers,
                base=base,
                is_on=maintain,
            )
        except BaseException:
            self._follower.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the background thread after its piece of work, and let go of the folder."""
        self._is_closed = True
        self._background.close()
        self._follower.close()

    @property
    def head(self) -> Version | None:
        """The newest version that this publisher knows of; None: nothing was published yet."""
        head = self._committer.head
        return None if head is None else Version.of(head)

    def publish(
        self,
        source: TENSORS | str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Version:
        """Publish the next version: once this returns it is durable and followers can see it.

        Args:
            source: A checkpoint's path (a Hugging Face folder or a safetensors file), or arrays by
                name: numpy, CPU torch tensors, DLPack. Nobody may write to it meanwhile.
            step: The trainer's step.
            metadata: JSON that travels along, such as rewards.
            on_bytes: Called with the raw bytes of each piece of work done.

        Raises:
            CommitConflict: Another publisher committed this version. Open a publisher anew to go on
                from the head.
            Fenced: This publisher was superseded before.
            TensorMismatch: The tensors differ from the stream's by name, dtype or shape.
            BaseMismatch: The baseline on disk was changed by someone.
            Unavailable: The store did not answer. The version may or may not exist: calling again
                finds out and goes on.
            ThinwireError: After any error the baseline is that of the last committed version.
        """
        self._check_open()
        facts = facts_of(step, metadata)._replace(on_bytes=on_bytes)
        self._warn_of_step(step)
        opened = open_source(source)
        with self._background.paused():
            start_s = time.monotonic()
            version = self._done(self._publish(opened, facts), start_s)
        self._background.wake()
        return version

    def publish_reference(
        self,
        reference: str,
        *,
        copy: str | os.PathLike[str] | None = None,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Version:
        """Publish the first version without uploading it: both sides hold it already.

        Only digests, file headers and small files such as the tokenizer travel. A follower proves
        its copy against the digests before it counts.

        Args:
            reference: ``hf://ORG/NAME@REVISION``, or the path of a folder.
            copy: Where the copy is here; None: the folder itself, or the Hugging Face cache.
            step: The trainer's step.
            metadata: JSON that travels along.

        Raises:
            InvalidArgument: The lineage has versions already.
            ThinwireError: As :meth:`publish`.
        """
        self._check_open()
        facts = facts_of(step, metadata)
        source = source_of(reference)
        if copy is None and source.kind == "folder":
            copy = source.name
        path = local_copy(source, self._follower.base if copy is None else copy)
        checkpoint = Checkpoint.open(path, ignore_subfolders=True)
        with self._background.paused():
            start_s = time.monotonic()
            place = self._committer.place()
            if not place.is_first:
                raise InvalidArgument(
                    f"{self.stream.url} is at version {place.version - 1} already: only the first "
                    "version of a lineage can be by reference",
                    hint="Publish the weights, or begin a new lineage",
                )
            try:
                manifest = self._maker.make_reference(place, checkpoint, source, facts)
            except Landed as landed:
                manifest = landed.manifest
            self._follower.base = self._background.base = path
            version = self._done(manifest, start_s)
            self._follower.bring_to(manifest)
        return version

    def _publish(self, source: Source, facts: Facts) -> Manifest:
        for _ in range(_MAX_ATTEMPTS):
            try:
                place = self._committer.place()
                if place.is_first:
                    return self._maker.make_first(place, source, facts)
                return self._maker.make_delta(place, self._baseline(place), source, facts)
            except Landed as landed:
                found = landed.manifest
                is_ours = (found.step, found.metadata) == (facts.step, facts.metadata)
                if is_ours and self._is_same(source, found):
                    return landed.manifest
        raise Unavailable(
            f"{self.stream.url}: earlier attempts kept turning out to have succeeded",
            hint="Check the store; then publish again",
        )

    def _done(self, manifest: Manifest, start_s: float) -> Version:
        """A version is committed: say so."""
        try:
            self._committer.announce()
        except StoreError as error:
            self._refuse(manifest, error)
        version = Version.of(manifest)
        self._observers.published(self.stream.url, version, time.monotonic() - start_s)
        return version

    def _warn_of_step(self, step: int | None) -> None:
        head = self._committer.head if self._committer.goes_on else None
        if step is None or head is None or head.step is None or step >= head.step:
            return
        _LOG.warning(
            "step %d is published after step %d: is it the right one? A restart from older weights "
            "begins a new lineage",
            step,
            head.step,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidArgument("this publisher was closed", hint="Open another one")

    def _go_on(self) -> None:
        """Bring the baseline to the head of the stream and prove it."""
        self._follower.check_known()
        end, head = self._committer.end, self._committer.head
        if end is not None:
            raise LineageChanged(
                f"{self.stream.url}: a new lineage was begun at version {end.version} and has no "
                "version yet",
                hint="Open the publisher with new_lineage=True (--new-lineage) to publish its first"
                " version",
            )
        if head is not None:
            self._follower.bring_to(head)
            self._follower.prove()

    def _baseline(self, place: Place) -> Mark:
        """The mark of the baseline, which is brought to the version before ``place``."""
        assert self._committer.head is not None
        mark = self._sink.mark()
        if mark is None or mark.link != place.base:
            self._follower.bring_to(self._committer.head)
            mark = self._sink.mark()
        assert mark is not None
        return mark

    def _is_same(self, source: Source, manifest: Manifest) -> bool:
        """Whether a source holds the weights of a version that the baseline can be brought to."""
        self._follower.bring_to(manifest)
        pairs, attachments = source.pairs(self._sink.checkpoint())
        is_carried = any(attachment.data is not None for attachment in attachments)
        return not is_carried and all(
            pair.base is not None and pair.new is not None and np.array_equal(pair.base, pair.new)
            for pair in pairs
        )

    def _refuse(self, manifest: Manifest, error: ThinwireError) -> None:
        self._observers.refuse(self.stream.url, manifest.lineage, manifest.version, error)


def facts_of(step: int | None, metadata: Mapping[str, Any] | None) -> Facts:
    """What a trainer says of a version, checked.

    Raises:
        InvalidArgument: The step is no whole number, or the metadata is no plain JSON.
    """
    facts = plain_metadata(metadata or {})
    if step is None:
        return Facts(None, facts)
    if not isinstance(step, Integral) or isinstance(step, bool) or abs(step) >= MAX_NUMBER:
        raise InvalidArgument(f"step is {step!r}, not a whole number")
    return Facts(int(step), facts)
