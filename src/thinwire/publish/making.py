"""Versions in the making: encoded, uploaded, committed; then the baseline moves on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from thinwire.checkpoint import Checkpoint, SafetensorsFile
from thinwire.checkpoint.file_names import is_weights_name
from thinwire.codec.chunk import Spec
from thinwire.codec.container import Attachment
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.plan import Pair, word_count
from thinwire.errors import (
    BaseMismatch,
    ChecksumMismatch,
    CommitConflict,
    Fenced,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
)
from thinwire.follow import CheckpointSink, Mark, Stream
from thinwire.follow.install import Content, layout_of
from thinwire.follow.reference import content_digest
from thinwire.follow.steps import Outcome
from thinwire.maintain.upload import Shards, file_record, put_files, shard_keys, write_shards
from thinwire.publish.committing import Committer, Place
from thinwire.publish.source import Source, carried_attachments
from thinwire.stream import keys
from thinwire.stream.encoding import seal
from thinwire.stream.records import FORMAT, Manifest
from thinwire.stream.records import Source as SourceRecord
from thinwire.stream.version import Version


class Facts(NamedTuple):
    """What a trainer says of a version, and whom to tell of the progress."""

    step: int | None
    metadata: dict[str, Any]
    on_bytes: Callable[[int], None] | None = None


class VersionMaker:
    """Makes versions of one stream from one baseline."""

    def __init__(
        self,
        stream: Stream,
        sink: CheckpointSink,
        committer: Committer,
        *,
        spec: Spec | None,
        workers: int,
        shard_raw_bytes: int,
        on_failure: Callable[[Manifest, ThinwireError], None],
    ) -> None:
        self._stream = stream
        self._store = stream.store
        self._sink = sink
        self._committer = committer
        self._spec = spec
        self._workers = workers
        self._shard_raw_bytes = shard_raw_bytes
        self._on_failure = on_failure

    def make_first(self, place: Place, source: Source, facts: Facts) -> Manifest:
        """Upload an anchor and commit it; the same files become the baseline."""
        # Names of files are not made from digests: an earlier attempt may yet turn out to be there.
        self._committer.renew_session()
        committed: list[Manifest] = []

        def mark() -> Mark:
            return Mark.of(Version.of(committed[0]), committed[0].stream, [])

        try:
            self._install_first(place, source, facts, mark, committed)
        except ThinwireError as error:
            if not committed:
                raise
            # The version exists: the baseline is brought up before the next one.
            self._on_failure(committed[0], error)
        return committed[0]

    def _install_first(
        self,
        place: Place,
        source: Source,
        facts: Facts,
        mark: Callable[[], Mark],
        committed: list[Manifest],
    ) -> None:
        with self._sink.installing(mark) as staged:
            paths: dict[str, Path] = {}

            def path_for(name: str) -> Path:
                paths[name] = staged.path_for(name)
                return paths[name]

            source.write(path_for)
            content = Content.of_files(paths)
            manifest = self._manifest(place, facts, _as_new(paths))
            manifest = msgspec.structs.replace(
                manifest,
                kind="anchor",
                weights=content.weights,
                layout=content.layout,
                files=[file_record(name, path) for name, path in paths.items()],
            )
            # Before the upload: what no reader would take shows now.
            sealed, data = seal(manifest, self._stream.signing_key)
            session = self._committer.session
            put_files(
                self._store,
                [
                    (keys.anchor_file(place.lineage, place.version, session, name), path)
                    for name, path in paths.items()
                ],
                facts.on_bytes,
            )
            self._committer.check_objects(sealed)
            self._committer.commit(sealed, data)
            committed.append(sealed)

    def make_reference(
        self, place: Place, copy: Checkpoint, source: SourceRecord, facts: Facts
    ) -> Manifest:
        """Commit a version whose weights are those of a copy that both sides hold."""
        pairs = [
            Pair(name, tensor.dtype, tuple(tensor.shape), tensor.data, tensor.data)
            for name, tensor in copy.tensors.items()
        ]
        shards = self._encode(pairs, carried_attachments(copy))
        try:
            with shards.open() as delta:
                outcome = Outcome.of_delta(delta)
            manifest = msgspec.structs.replace(
                self._manifest(place, facts, pairs, shards),
                kind="reference",
                weights=outcome.weights,
                layout=outcome.layout,
                source=source,
                content=content_digest(copy.tensors),
            )
            copy.check_unchanged()
            sealed, data = seal(manifest, self._stream.signing_key)
            names = self._upload(manifest, place.version, shards)
            self._commit(sealed, data, names)
            return sealed
        finally:
            shards.remove()

    def make_delta(self, place: Place, mark: Mark, source: Source, facts: Facts) -> Manifest:
        """Diff a source against the baseline, which is at ``mark``; commit; move the baseline.

        Once it is committed, whatever happens to the baseline is told and not raised.
        """
        baseline = self._sink.checkpoint()
        if layout_of(baseline) != mark.layout:
            raise self._changed(mark)
        pairs, attachments = source.pairs(baseline)
        _check_same_model(pairs)
        shards = self._encode(pairs, attachments, facts.on_bytes)
        try:
            with shards.open() as delta:
                source.check_unchanged()
                outcome = Outcome.of_delta(delta)
                # Where a tensor is carried in full, the delta does not tell what it replaces.
                old = outcome.old or Content.of_checkpoint(baseline).weights
                if old != mark.weights:
                    raise self._changed(mark)
                manifest = msgspec.structs.replace(
                    self._manifest(place, facts, pairs, shards),
                    weights=outcome.weights,
                    layout=outcome.layout,
                )
                return self._apply_and_commit(manifest, delta, place.version - 1, shards)
        finally:
            shards.remove()

    def _apply_and_commit(
        self, manifest: Manifest, delta: DeltaSet, base: int, shards: Shards
    ) -> Manifest:
        """Commit a delta that was decoded and verified here first.

        A source that someone wrote to meanwhile shows now, and not when followers fail. Once the
        version is committed, what happens to the baseline is told and not raised.
        """
        sealed, data = seal(manifest, self._stream.signing_key)
        names = self._upload(manifest, base, shards)
        committed = False
        try:
            with self._sink.applying(delta, Mark.of(Version.of(sealed), sealed.stream, [])):
                self._commit(sealed, data, names)
                committed = True
        except ChecksumMismatch as error:
            raise InvalidArgument(
                f"the tensors changed while they were published: {error.message}",
                hint="Publish between two optimizer steps, or a copy",
            ) from error
        except ThinwireError as error:
            if not committed:
                raise
            self._on_failure(sealed, error)
        return sealed

    def _changed(self, mark: Mark) -> BaseMismatch:
        return BaseMismatch(
            f"the baseline in {self._sink.folder} is not version {mark.version} any more: someone "
            "changed or added a file",
            hint="Close this publisher and open it again: it fetches the version",
        )

    def _encode(
        self,
        pairs: Sequence[Pair],
        attachments: Sequence[Attachment],
        on_bytes: Callable[[int], None] | None = None,
    ) -> Shards:
        return write_shards(
            self._sink.scratch(),
            pairs,
            attachments,
            spec=self._spec,
            workers=self._workers,
            shard_raw_bytes=self._shard_raw_bytes,
            on_bytes=on_bytes,
        )

    def _manifest(
        self, place: Place, facts: Facts, pairs: Sequence[Pair], shards: Shards | None = None
    ) -> Manifest:
        new = [pair for pair in pairs if pair.new is not None]
        return Manifest(
            format=FORMAT,
            type=Manifest.TYPE,
            stream=self._stream.record().stream,
            created_ms=time.time_ns() // 1_000_000,
            kind="delta",
            lineage=place.lineage,
            first=place.first,
            version=place.version,
            session=self._committer.session,
            base=place.base,
            previous=place.previous,
            step=facts.step,
            raw_bytes=sum(pair.new.size for pair in new if pair.new is not None),
            word_count=sum(word_count(pair) for pair in new),
            changed_count=0 if shards is None else shards.changed_count,
            shards=[] if shards is None else shards.records,
            metadata=facts.metadata,
        )

    def _upload(self, manifest: Manifest, base: int, shards: Shards) -> list[str]:
        names = shard_keys(
            manifest.lineage, base, manifest.version, manifest.session, shards.records
        )
        put_files(self._store, list(zip(names, shards.paths, strict=True)))
        return names

    def _commit(self, manifest: Manifest, data: bytes, names: Sequence[str]) -> None:
        try:
            self._committer.check_objects(manifest)
            self._committer.commit(manifest, data)
        except (CommitConflict, Fenced):
            # Named by our session: nobody else can mean them.
            with suppress(ThinwireError):
                self._store.delete(names)
            raise


def _check_same_model(pairs: Sequence[Pair]) -> None:
    """A checkpoint may gain, lose and reshape tensors; some of it must stay: or it is a wrong path.

    Raises:
        TensorMismatch: It is another model.
    """
    old = sum(pair.base.size for pair in pairs if pair.base is not None)
    new = sum(pair.new.size for pair in pairs if pair.new is not None)
    both = sum(p.base.size for p in pairs if p.base is not None and p.new is not None)
    if 10 * both < max(old, new):
        raise TensorMismatch(
            "this is another model: less than a tenth of its weights lie in tensors that the "
            "stream has by name, dtype and shape",
            hint="Check the path. If it was meant, begin a new lineage (new_lineage=True, "
            "--new-lineage) or another stream",
        )


def _as_new(files: Mapping[str, Path]) -> list[Pair]:
    return [
        Pair(name, tensor.dtype, tuple(tensor.shape), None, tensor.data)
        for file, path in files.items()
        if is_weights_name(file)
        for name, tensor in SafetensorsFile.open(path).tensors.items()
    ]
