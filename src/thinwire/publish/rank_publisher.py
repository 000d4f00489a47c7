"""Publishing from memory, on one rank of a trainer or on all of them together."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from thinwire.checkpoint import Checkpoint
from thinwire.codec.chunk import Spec
from thinwire.codec.container import Attachment
from thinwire.codec.digest import tensor_digest
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.codec.write import SameTensor
from thinwire.errors import (
    BaseMismatch,
    CommitConflict,
    Fenced,
    InvalidArgument,
    LineageChanged,
    StoreError,
    TensorMismatch,
    ThinwireError,
)
from thinwire.follow import CheckpointSink, Follower, Stream
from thinwire.follow.reference import check_content, local_copy, source_of
from thinwire.follow.steps import Outcome
from thinwire.publish.attempt import (
    Attempt,
    Carried,
    Encoded,
    Receipt,
    decline,
    move_on,
    shard_key,
    upload,
)
from thinwire.publish.background import Background
from thinwire.publish.baseline import Allocate, Baseline, in_memory
from thinwire.publish.committing import Committer, Landed, Place
from thinwire.publish.creation import create_stream
from thinwire.publish.first import (
    FileReceipt,
    FirstVersion,
    attachments_of,
    upload_files,
    weights_files,
)
from thinwire.publish.making import Facts, VersionMaker
from thinwire.publish.ranks import Fault, PeerFailed, Ranks
from thinwire.publish.source import kept_attachments
from thinwire.publish.staging import Staging
from thinwire.publish.units import Holding, Plan, spread_over
from thinwire.stream import keys
from thinwire.stream.encoding import link_of, seal
from thinwire.stream.events import Observer, Observers, Published, Refused
from thinwire.stream.records import FORMAT, Link, Manifest
from thinwire.stream.version import Version

# Between two tries to find out whether a version was committed.
_RESOLVE_S = 2.0
Phase = Literal["encoding", "uploading", "committing"]
OnPhase = Callable[[Phase], None]


class Settings(NamedTuple):
    """What a trainer asks for; the same on every rank.

    Attributes:
        new_lineage: Begin a new lineage with the next version.
        reference: Begin the stream by reference to this; empty: upload an anchor.
        base: Where the copy is here that the stream begins with by reference.
        files: Small files of the first version.
        weights_name: The name of its weights file.
        metadata: What the headers of its weights files say besides.
        may_lack: Whether a tensor of the stream, by name, is left out here on purpose.
        spec: What to ask of the encoder.
        workers: Threads for encoding.
        maintain: Let a background thread of rank 0 make anchors and merged deltas.
        work_dir: Where that thread keeps its copies of the model.
    """

    new_lineage: bool = False
    reference: str = ""
    base: str | os.PathLike[str] | None = None
    files: Mapping[str, bytes] = {}
    weights_name: str = "model.safetensors"
    metadata: Mapping[str, str] = {}
    may_lack: Callable[[str], bool] = lambda name: False
    spec: Spec = Spec()
    workers: int = 1
    maintain: bool = True
    work_dir: Path | None = None


class _Hello(msgspec.Struct):
    """What a rank says of itself."""

    host: str
    holdings: list[Holding]
    fault: Fault | None = None


class _Start(msgspec.Struct):
    """Where the stream is, as rank 0 found it."""

    lineage: str = ""
    link: Link | None = None
    fault: Fault | None = None


class _Ready(msgspec.Struct):
    """Whether a rank has its baseline; the first rank of a host says where the copy is."""

    path: str = ""
    fault: Fault | None = None


class _Order(msgspec.Struct):
    """Where the next version goes, as rank 0 decides."""

    lineage: str = ""
    version: int = 0
    session: str = ""
    is_first: bool = False
    fault: Fault | None = None


class _Report(msgspec.Struct):
    """What a rank did."""

    shards: list[Receipt] = []
    files: list[FileReceipt] = []
    fault: Fault | None = None
    is_peers: bool = False


class _Outcome(msgspec.Struct):
    """What became of an attempt: the version, or why there is none."""

    manifest: Manifest | None = None
    fault: Fault | None = None


class _Unsettled(NamedTuple):
    """An attempt of which this rank did not hear what became of it."""

    topic: str
    staging: Staging | None
    encoded: Encoded
    uploaded: Sequence[str]


class RankPublisher:
    """Publishes what ranks hold in memory. All ranks call the same methods in the same order.

    Whatever fails, the baseline stays at the last committed version, and the next attempt sends
    all that changed since. Rank 0 alone looks at the stream and commits.

    Args:
        stream: The stream, opened on every rank.
        ranks: The line to the other ranks.
        folder: This rank's scratch, and on the first rank of a host where the head is caught up
            from.
        holdings: The tensors that this rank holds, as they are published.
        settings: What the trainer asks for.
        allocate: Makes the memory of the baseline.
        observer: Told of every event, on rank 0.

    Raises:
        ThinwireError: As ``Publisher``; on every rank, whichever it was that failed.
    """

    def __init__(
        self,
        stream: Stream,
        ranks: Ranks,
        folder: Path,
        holdings: Sequence[Holding],
        settings: Settings,
        *,
        allocate: Allocate = in_memory,
        observer: Observer | None = None,
    ) -> None:
        self.stream = stream
        self.ranks = ranks
        self._folder = folder
        self._settings = settings
        self._observers = Observers(observer)
        self._committer: Committer | None = None
        self._background: Background | None = None
        self._carried = Carried()
        self._first_attachments: list[Attachment] = []
        self._unsettled: _Unsettled | None = None
        self._is_closing = False
        self.head: Manifest | None = None
        start = self._begin()
        hosts, self.plan = self._meet(holdings)
        self.baseline = Baseline(self.plan, ranks.rank, allocate)
        self.has_base = False
        if start.link is not None:
            self._resume(start, hosts)
        if ranks.rank == 0:
            self._background = Background(
                stream,
                settings.work_dir or folder / "work",
                self._observers,
                base=settings.base or self._reference_folder(),
                is_on=settings.maintain,
            )

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.ranks.rank == 0

    @property
    def is_settled(self) -> bool:
        """Whether it is known here what became of the last attempt."""
        return self._unsettled is None

    def close(self) -> None:
        """Stop what runs in the background."""
        self._is_closing = True
        if self._background is not None:
            self._background.close()
        self.ranks.close()

    def publish(
        self, topic: str, staging: Staging | Fault | None, facts: Facts, on_phase: OnPhase
    ) -> Manifest:
        """Make one version; runs in the background, on every rank at once.

        Args:
            topic: The same on every rank, another one each time.
            staging: What was captured; None: the baseline was filled with everything, and this is
                a lineage's first version. A fault: this rank could capture nothing, and there will
                be no version.
            facts: What the trainer says of it; those of rank 0 count.
            on_phase: Told what begins: "encoding", "uploading", "committing".

        Raises:
            ThinwireError: There is no new version; the same error on every rank.
        """
        start_s = time.monotonic()
        place = self._tell_order(topic)
        order = msgspec.msgpack.decode(self.ranks.hear(f"{topic}/order"), type=_Order)
        if order.fault is not None:
            raise order.fault.error()
        if self._background is not None:
            with self._background.paused():
                return self._publish(topic, order, place, staging, facts, on_phase, start_s)
        return self._publish(topic, order, place, staging, facts, on_phase, start_s)

    def settle(self) -> Manifest | None:
        """Hear what became of the last attempt, and move the baseline accordingly.

        Returns:
            The version that it made; None: everything is settled already.

        Raises:
            Deadline: Nothing was heard: call it again.
            ThinwireError: There is no new version.
        """
        if self._unsettled is None:
            return None
        topic, staging, encoded, uploaded = self._unsettled
        data = self.ranks.hear(f"{topic}/outcome", sign_of_life=f"{topic}/alive")
        self._unsettled = None
        outcome = msgspec.msgpack.decode(data, type=_Outcome)
        if outcome.manifest is None:
            assert outcome.fault is not None
            error = outcome.fault.error()
            if isinstance(error, CommitConflict | Fenced):
                # Named by our session: nobody else can mean them.
                with suppress(StoreError):
                    self.stream.store.delete(uploaded)
            raise error
        if staging is not None:
            move_on(self.baseline, staging, encoded)
        self.has_base = True
        self.head = outcome.manifest
        return outcome.manifest

    # --- opening ---

    def _begin(self) -> _Start:
        """Rank 0 opens the stream for publishing and says where it is."""
        topic = "start"
        if self.is_leader:
            start = _Start()
            try:
                start = self._open()
            except ThinwireError as error:
                start = _Start(fault=Fault.of(error))
                mine: ThinwireError | None = error
            else:
                mine = None
            self.ranks.tell(topic, msgspec.msgpack.encode(start))
            if mine is not None:
                raise mine
        start = msgspec.msgpack.decode(self.ranks.hear(topic), type=_Start)
        if start.fault is not None:
            raise start.fault.error(0)
        return start

    def _open(self) -> _Start:
        create_stream(self.stream)
        self._committer = Committer(self.stream, new_lineage=self._settings.new_lineage)
        end, head = self._committer.end, self._committer.head
        if self._settings.new_lineage:
            return _Start()
        if end is not None:
            raise LineageChanged(
                f"{self.stream.url}: a new lineage was begun at version {end.version} and has no "
                "version yet",
                hint="Publish with new_lineage=True to make its first version",
            )
        if head is None and self._settings.reference:
            head = self._publish_reference(self._committer)
        self.head = head
        if head is None:
            return _Start()
        return _Start(head.lineage, link_of(head))

    def _publish_reference(self, committer: Committer) -> Manifest:
        source = source_of(self._settings.reference)
        path = local_copy(source, self._settings.base or self._reference_folder())
        checkpoint = Checkpoint.open(path, ignore_subfolders=True)
        sink = CheckpointSink(self._folder / "reference")
        maker = VersionMaker(
            self.stream,
            sink,
            committer,
            spec=self._settings.spec,
            workers=self._settings.workers,
            shard_raw_bytes=32 << 30,
            on_failure=lambda manifest, error: self._refuse(manifest.version, error),
        )
        start_s = time.monotonic()
        with sink.own():
            try:
                manifest = maker.make_reference(
                    committer.place(), checkpoint, source, Facts(None, {})
                )
            except Landed as landed:
                manifest = landed.manifest
        self._announce(committer, manifest, start_s)
        return manifest

    def _reference_folder(self) -> str | None:
        """The folder that the trainer named as the reference, if that is what it named."""
        if not self._settings.reference:
            return None
        source = source_of(self._settings.reference)
        return source.name if source.kind == "folder" else None

    def _meet(self, holdings: Sequence[Holding]) -> tuple[list[str], Plan]:
        """Every rank learns what the others hold; all make the same plan."""
        hello = _Hello(platform.node(), list(holdings))
        hellos = [
            msgspec.msgpack.decode(data, type=_Hello)
            for data in self.ranks.share(msgspec.msgpack.encode(hello))
        ]
        spreads = spread_over([one.holdings for one in hellos])
        if not spreads:
            raise InvalidArgument("there are no tensors to publish")
        return [one.host for one in hellos], Plan(spreads, self.ranks.size)

    def _resume(self, start: _Start, hosts: Sequence[str]) -> None:
        """Fill the baseline from a copy of the head: one on each host."""
        assert start.link is not None
        manifest = self.stream.require(start.lineage, start.link)
        self.head = manifest
        first = hosts.index(hosts[self.ranks.rank])
        ready = _Ready()
        if first == self.ranks.rank:
            try:
                ready = _Ready(str(self._copy_of(manifest)))
            except ThinwireError as error:
                ready = _Ready(fault=Fault.of(error))
        paths = self._agree(ready)
        try:
            checkpoint = Checkpoint.open(paths[first].path, ignore_subfolders=True)
            self._check_names(checkpoint)
            self.baseline.fill(checkpoint)
            self.baseline.digest_owned()
            if self.is_leader:
                self._carried = self._carry(checkpoint, manifest)
            ready = _Ready()
        except ThinwireError as error:
            ready = _Ready(fault=Fault.of(error))
        self._agree(ready)
        self.has_base = True

    def _agree(self, ready: _Ready) -> list[_Ready]:
        """What every rank says; raises what any of them met."""
        found = [
            msgspec.msgpack.decode(data, type=_Ready)
            for data in self.ranks.share(msgspec.msgpack.encode(ready))
        ]
        for rank, one in enumerate(found):
            if one.fault is not None:
                raise one.fault.error(None if self.ranks.size == 1 else rank)
        return found

    def _copy_of(self, manifest: Manifest) -> Path:
        """A folder on this host that holds a version, proved."""
        if manifest.kind == "reference" and manifest.source is not None:
            path = local_copy(manifest.source, self._settings.base or self._reference_folder())
            check_content(Checkpoint.open(path, ignore_subfolders=True), manifest.content)
            return path
        folder = self._folder / "head"
        with Follower(
            self.stream,
            folder,
            base=self._settings.base or self._reference_folder(),
            accept_new_lineages=True,
            lease=False,
        ) as follower:
            follower.check_known()
            follower.bring_to(manifest)
            follower.prove()
        return folder

    def _check_names(self, checkpoint: Checkpoint) -> None:
        published = {spread.name for spread in self.plan.spreads}
        for name in checkpoint.tensors:
            if name not in published and not self._settings.may_lack(name):
                raise TensorMismatch(
                    f"tensor {name!r} of the stream is not published here",
                    hint="Publish all tensors, or leave it out on purpose with exclude=[...]: then "
                    "it stays as it is. Names are mapped with rename=",
                    tensor=name,
                )

    def _carry(self, checkpoint: Checkpoint, manifest: Manifest) -> Carried:
        """What travels unchanged beside the trainer's tensors."""
        published = {spread.name for spread in self.plan.spreads}
        same = [
            SameTensor(name, t.dtype, tuple(t.shape), tensor_digest(t.dtype, t.data))
            for name, t in checkpoint.tensors.items()
            if name not in published
        ]
        return Carried(same, kept_attachments(checkpoint))

    # --- one version ---

    def _tell_order(self, topic: str) -> Place | None:
        if self._committer is None:
            return None
        place = None
        try:
            if not self.has_base:
                self._committer.renew_session()
            place = self._committer.place()
            order = _Order(place.lineage, place.version, self._committer.session, place.is_first)
        except ThinwireError as error:
            order = _Order(fault=Fault.of(error))
        self.ranks.tell(f"{topic}/order", msgspec.msgpack.encode(order))
        return place

    def _publish(
        self,
        topic: str,
        order: _Order,
        place: Place | None,
        staging: Staging | Fault | None,
        facts: Facts,
        on_phase: OnPhase,
        start_s: float,
    ) -> Manifest:
        encoded = Encoded({}, {})
        report = _Report()
        uploaded: list[str] = []
        try:
            on_phase("encoding")
            if isinstance(staging, Fault):
                decline(self.ranks)
                report = _Report(fault=staging)
            elif staging is None:
                report = self._make_first(order, on_phase)
            else:
                encoded, report = self._make_delta(topic, order, staging, uploaded, on_phase)
        except Exception as error:
            report = _Report(fault=Fault.of(error), is_peers=isinstance(error, PeerFailed))
        self.ranks.report(f"{topic}/done", msgspec.msgpack.encode(report))
        captured = None if isinstance(staging, Fault) else staging
        self._unsettled = _Unsettled(topic, captured, encoded, uploaded)
        on_phase("committing")
        if place is not None:
            outcome = self._decide(topic, place, staging is None, facts, start_s)
            self.ranks.tell(f"{topic}/outcome", msgspec.msgpack.encode(outcome))
        manifest = self.settle()
        assert manifest is not None
        return manifest

    def _make_first(self, order: _Order, on_phase: OnPhase) -> _Report:
        folder = self._folder / "first"
        folder.mkdir(parents=True, exist_ok=True)
        files = weights_files(self.plan, self._settings.weights_name)
        first = FirstVersion(
            self.plan, self.ranks, self.baseline, folder, files, self._settings.metadata
        )
        paths = first.write()
        receipts, others = first.receipts(paths, self._settings.files, self.is_leader)
        on_phase("uploading")
        try:
            upload_files(
                self.stream.store,
                {**paths, **others},
                lambda name: keys.anchor_file(order.lineage, order.version, order.session, name),
            )
        finally:
            for path in (*paths.values(), *others.values()):
                path.unlink(missing_ok=True)
        return _Report(files=receipts)

    def _make_delta(
        self,
        topic: str,
        order: _Order,
        staging: Staging,
        uploaded: list[str],
        on_phase: OnPhase,
    ) -> tuple[Encoded, _Report]:
        attempt = Attempt(
            self.plan,
            self.ranks,
            self.baseline,
            staging,
            self._folder,
            topic,
            spec=self._settings.spec,
            workers=self._settings.workers,
        )
        encoded = attempt.encode(self._carried)
        on_phase("uploading")
        base = order.version - 1
        key_of = shard_key(order.lineage, base, order.version, order.session)
        try:
            receipts = upload(self.stream.store, encoded.paths, key_of)
            uploaded += [key_of(receipt.number, receipt.record) for receipt in receipts]
            return encoded, _Report(shards=receipts)
        finally:
            for path in encoded.paths.values():
                path.unlink(missing_ok=True)

    def _decide(
        self, topic: str, place: Place, is_first: bool, facts: Facts, start_s: float
    ) -> _Outcome:
        """On rank 0: commit, if every rank did its part."""
        try:
            manifest = self._manifest(place, is_first, facts, self._collect(topic))
            sealed, data = seal(manifest, self.stream.signing_key)
            self._commit(topic, sealed, data)
            assert self._committer is not None
            if is_first:
                self._carried = Carried((), self._first_attachments)
            self._announce(self._committer, sealed, start_s)
            if self._background is not None:
                self._background.wake()
        except ThinwireError as error:
            self._refuse(place.version, error)
            return _Outcome(fault=Fault.of(error))
        return _Outcome(sealed)

    def _collect(self, topic: str) -> list[_Report]:
        reports = [
            msgspec.msgpack.decode(data, type=_Report)
            for data in self.ranks.collect(f"{topic}/done", sign_of_life=f"{topic}/alive")
        ]
        failed = [(rank, r) for rank, r in enumerate(reports) if r.fault is not None]
        # Whoever only heard of a failure does not know what it was.
        failed.sort(key=lambda item: item[1].is_peers)
        for rank, report in failed:
            assert report.fault is not None
            raise report.fault.error(None if self.ranks.size == 1 else rank)
        return reports

    def _manifest(
        self, place: Place, is_first: bool, facts: Facts, reports: Sequence[_Report]
    ) -> Manifest:
        assert self._committer is not None
        shards = sorted((s for r in reports for s in r.shards), key=lambda s: s.number)
        files = [f for r in reports for f in r.files]
        rows = [row for shard in shards for row in shard.tensors]
        rows += [row for file in files for row in file.tensors]
        beside = [(f.record.name, f.kind, f.size, f.digest) for f in files]
        beside += [entry for shard in shards for entry in shard.files]
        outcome = Outcome.of_rows(
            [(r.name, r.dtype, r.shape, r.old_digest, r.new_digest) for r in rows], beside
        )
        if not is_first:
            assert self.head is not None
            if outcome.old != self.head.weights or outcome.layout != self.head.layout:
                raise BaseMismatch(
                    f"{self.stream.url}: the baseline in memory is not version {self.head.version}",
                    hint="Restart the trainer: the publisher takes its baseline from the stream",
                )
        else:
            self._first_attachments = attachments_of(files)
        kept = [(row.dtype, row.shape) for row in rows]
        return Manifest(
            format=FORMAT,
            type=Manifest.TYPE,
            stream=self.stream.record().stream,
            created_ms=time.time_ns() // 1_000_000,
            kind="anchor" if is_first else "delta",
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
        assert self._committer is not None
        tries = 0
        while True:
            try:
                self._committer.commit(sealed, data)
            except Landed as landed:
                if Version.of(landed.manifest) != Version.of(sealed):
                    raise CommitConflict(
                        f"{self.stream.url}: version {sealed.version} was committed by an earlier "
                        "attempt of this publisher, with other weights",
                        hint="Restart the trainer: the publisher takes its baseline from there",
                    ) from None
                return
            except StoreError as error:
                if not error.retryable or self._is_closing:
                    raise
                self._refuse(sealed.version, error)
                tries += 1
                self.ranks.tell(f"{topic}/alive", str(tries).encode())
                time.sleep(_RESOLVE_S)
            else:
                return

    def _announce(self, committer: Committer, manifest: Manifest, start_s: float) -> None:
        try:
            committer.announce()
        except StoreError as error:
            self._refuse(manifest.version, error)
        version = Version.of(manifest)
        self._observers.on_event(
            Published(
                url=self.stream.url,
                lineage=version.lineage,
                version=version.version,
                step=version.step,
                payload_bytes=version.payload_bytes,
                raw_bytes=version.raw_bytes,
                changed_count=version.changed_count,
                wall_s=time.monotonic() - start_s,
            )
        )

    def _refuse(self, version: int, error: ThinwireError) -> None:
        self._observers.on_event(
            Refused(
                url=self.stream.url,
                lineage="",
                version=version,
                code=error.code,
                reason=str(error),
            )
        )
