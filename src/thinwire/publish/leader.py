"""What rank 0 alone does: it looks at the stream, says where the next version goes, and commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from thinwire.checkpoint import Checkpoint
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.errors import (
    BaseMismatch,
    CommitConflict,
    Fenced,
    LineageChanged,
    StoreError,
    ThinwireError,
)
from thinwire.follow import CheckpointSink, Stream
from thinwire.follow.reference import local_copy, source_of
from thinwire.follow.steps import Outcome
from thinwire.maintain.upload import SHARD_RAW_BYTES
from thinwire.publish.attempt import Carried
from thinwire.publish.background import Background
from thinwire.publish.committing import Committer, Landed, Place
from thinwire.publish.creation import create_stream
from thinwire.publish.first import attachments_of
from thinwire.publish.making import Facts, VersionMaker
from thinwire.publish.messages import Order, Report, Start, Verdict
from thinwire.publish.ranks import Fault, Ranks
from thinwire.publish.replicas import check_replicas
from thinwire.publish.settings import Settings
from thinwire.publish.units import Plan
from thinwire.stream.encoding import link_of, seal
from thinwire.stream.events import Observers
from thinwire.stream.records import FORMAT, Manifest
from thinwire.stream.version import Version

# Between two tries to find out whether a version was committed.
_RESOLVE_S = 2.0


class Leader:
    """Rank 0's part of publishing.

    Args:
        stream: The stream; made, if there is none.
        ranks: The line to the other ranks.
        folder: Scratch.
        settings: What the trainer asks for.
        observers: Told of every event.
        noted: As of :func:`create_stream`, from the folders of all ranks.

    Attributes:
        carried: What the next delta carries besides the trainer's tensors.
        plan: Who does what, once the ranks have met.
        must_mend: Whether the line for bulk data broke, or a rank lags somewhere in it.

    Raises:
        ThinwireError: As ``Publisher``.
    """

    def __init__(
        self,
        stream: Stream,
        ranks: Ranks,
        folder: Path,
        settings: Settings,
        observers: Observers,
        noted: Mapping[str, str],
    ) -> None:
        self._stream = stream
        self._ranks = ranks
        self._folder = folder
        self._settings = settings
        self._observers = observers
        self._is_closing = False
        self.carried = Carried()
        self.must_mend = False
        self.plan: Plan | None = None
        create_stream(stream, noted)
        self._committer = Committer(stream, new_lineage=settings.new_lineage)
        end = self._committer.end
        if end is not None and not settings.new_lineage:
            raise LineageChanged(
                f"{stream.url}: a new lineage was begun at version {end.version} and has no "
                "version yet",
                hint="Publish with new_lineage=True to make its first version",
            )
        self.background = Background(
            stream,
            settings.work_dir or folder / "work",
            observers,
            base=settings.copy_folder(),
            is_on=settings.maintain,
        )

    def close(self) -> None:
        """Stop what runs in the background, and trying to find out about a commit."""
        self._is_closing = True
        self.background.close()

    def start(self, check: Callable[[Checkpoint], object]) -> Start:
        """Where the publisher begins; without a link: with a first version.

        A stream that shall begin by reference does so now.

        Args:
            check: Raises unless the copy that is referred to is of the trainer's model.
        """
        is_empty = self._committer.head is None and self._committer.end is None
        if is_empty and self._settings.reference:
            self._publish_reference(check)
        head = self._committer.head
        if self._settings.new_lineage or head is None:
            return Start()
        return Start(head.lineage, link_of(head))

    def place(self, *, is_first: bool) -> tuple[Place | None, Order]:
        """Where the next version goes, and what the ranks are told of it."""
        try:
            if is_first:
                # Names of files are not made from digests: an earlier attempt's may be there.
                self._committer.renew_session()
            place = self._committer.place()
        except Exception as error:
            return None, Order(fault=Fault.of(error))
        if is_first and not place.is_first:
            conflict = CommitConflict(
                f"{self._stream.url}: version {place.version - 1} was committed by an earlier "
                "attempt of this publisher, whose answer was lost",
                hint="Restart the trainer: the publisher takes its baseline from the stream",
            )
            return None, Order(fault=Fault.of(conflict))
        session = self._committer.session
        return place, Order(place.lineage, place.version, session, place.is_first)

    def decide(self, topic: str, place: Place, facts: Facts) -> Verdict:
        """Commit, if every rank did its part.

        After a commit nothing can fail any more; and whatever happens before one is told.
        """
        try:
            reports = self._collect(topic)
            if self.plan is not None:
                check_replicas(self.plan, [report.replicas for report in reports])
            self._ranks.forget_before(topic)
            sealed, data = seal(self._manifest(place, facts, reports), self._stream.signing_key)
            self._committer.check_objects(sealed)
            self._commit(topic, sealed, data)
        except Exception as error:
            known = error if isinstance(error, ThinwireError) else Fault.of(error).error()
            self._refuse(place.version, known)
            # Not where an earlier attempt of ours landed: it may name the same shards.
            is_foreign = (
                isinstance(known, CommitConflict | Fenced) and "landed" not in known.context
            )
            return Verdict(fault=Fault.of(known), is_foreign=is_foreign)
        if place.is_first:
            files = [file for report in reports for file in report.files]
            self.carried = Carried((), attachments_of(files))
        return Verdict(sealed)

    def announce(self, manifest: Manifest, start_s: float) -> None:
        """Say that a version is there: to followers, the observer, and the background."""
        try:
            self._committer.announce()
        except ThinwireError as error:
            self._refuse(manifest.version, error)
        version, wall_s = Version.of(manifest), time.monotonic() - start_s
        self._observers.published(self._stream.url, version, wall_s)

    def _publish_reference(self, check: Callable[[Checkpoint], object]) -> None:
        source = source_of(self._settings.reference)
        path = local_copy(source, self._settings.copy_folder())
        checkpoint = Checkpoint.open(path, ignore_subfolders=True)
        check(checkpoint)
        sink = CheckpointSink(self._folder / "reference")
        maker = VersionMaker(
            self._stream,
            sink,
            self._committer,
            spec=self._settings.spec,
            workers=self._settings.workers,
            shard_raw_bytes=SHARD_RAW_BYTES,
            on_failure=lambda manifest, error: self._refuse(manifest.version, error),
        )
        start_s = time.monotonic()
        with sink.own():
            place, facts = self._committer.place(), Facts(None, {})
            try:
                manifest = maker.make_reference(place, checkpoint, source, facts)
            except Landed as landed:
                manifest = landed.manifest
        self.announce(manifest, start_s)

    def _collect(self, topic: str) -> list[Report]:
        self.must_mend = True
        reports = [
            msgspec.msgpack.decode(data, type=Report)
            for data in self._ranks.collect(f"{topic}/done", sign_of_life=f"{topic}/alive")
        ]
        self.must_mend = any(report.is_line_broken for report in reports)
        # Whoever only heard of a failure does not know what it was.
        failed = sorted(
            ((report.is_peers, rank) for rank, report in enumerate(reports) if report.fault),
        )
        for _, rank in failed:
            fault = reports[rank].fault
            assert fault is not None
            raise fault.error(None if self._ranks.size == 1 else rank)
        return reports

    def _manifest(self, place: Place, facts: Facts, reports: Sequence[Report]) -> Manifest:
        shards = sorted((s for r in reports for s in r.shards), key=lambda s: s.number)
        files = [f for r in reports for f in r.files]
        rows = [row for shard in shards for row in shard.tensors]
        rows += [row for file in files for row in file.tensors]
        beside = [(f.record.name, f.kind, f.size, f.digest) for f in files]
        beside += [entry for shard in shards for entry in shard.files]
        outcome = Outcome.of_rows(
            [(r.name, r.dtype, r.shape, r.old_digest, r.new_digest) for r in rows], beside
        )
        head = self._committer.head
        if not place.is_first:
            assert head is not None
            if outcome.old != head.weights or outcome.layout != head.layout:
                raise BaseMismatch(
                    f"{self._stream.url}: the baseline in memory is not version {head.version}",
                    hint="Restart the trainer: the publisher takes its baseline from the stream",
                )
        kept = [(row.dtype, row.shape) for row in rows]
        return Manifest(
            format=FORMAT,
            type=Manifest.TYPE,
            stream=self._stream.record().stream,
            created_ms=time.time_ns() // 1_000_000,
            kind="anchor" if place.is_first else "delta",
            lineage=place.lineage,
            first=place.first,
            version=place.version,
            session=self._committer.session,
            base=place.base,
            previous=place.previous,
            step=facts.step,
            weights=outcome.weights,
            layout=outcome.layout,
            raw_bytes=sum(byte_count(*facts) for facts in kept),
            word_count=sum(byte_count(*f) // dtype_named(f[0]).word_bytes for f in kept),
            changed_count=sum(shard.changed_count for shard in shards),
            shards=[shard.record for shard in shards],
            files=[file.record for file in files],
            metadata=facts.metadata,
        )

    def _commit(self, topic: str, sealed: Manifest, data: bytes) -> None:
        """Commit; where the store does not answer, ask until it is known what became of it.

        The same bytes are written again, so it does not matter which attempt succeeds. The others
        are shown that this rank lives.
        """
        tries = 0
        while True:
            try:
                self._committer.commit(sealed, data)
            except Landed as landed:
                raise CommitConflict(
                    f"{self._stream.url}: version {landed.manifest.version} was committed by an "
                    "earlier attempt of this publisher, with other weights",
                    hint="Restart the trainer: the publisher takes its baseline from the stream",
                    landed=landed.manifest.version,
                ) from None
            except StoreError as error:
                # A refusal says nothing of an attempt before it whose answer was lost.
                is_open = error.retryable or tries > 0 or error.context.get("tries", 1) > 1
                if not is_open or self._is_closing:
                    raise
                self._refuse(sealed.version, error)
                tries += 1
                self._ranks.tell(f"{topic}/alive", f"commit {tries}".encode())
                time.sleep(_RESOLVE_S)
            else:
                return

    def _refuse(self, version: int, error: ThinwireError) -> None:
        self._observers.refuse(self._stream.url, "", version, error)
