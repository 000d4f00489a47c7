"""Publishing from memory, on one rank of a trainer or on all of them together."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import msgspec

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors
from thinwire.codec.digest import tensor_digest
from thinwire.codec.write import SameTensor
from thinwire.errors import BaseUnusable, StoreError, TensorMismatch
from thinwire.follow import Follower, Stream
from thinwire.follow.reference import check_content, local_copy
from thinwire.maintain.upload import put_files
from thinwire.publish.attempt import (
    Attempt,
    Carried,
    Encoded,
    move_on,
    shard_key,
    upload,
)
from thinwire.publish.baseline import Allocate, Baseline, check_same, in_memory
from thinwire.publish.committing import Place
from thinwire.publish.first import FirstVersion, weights_files
from thinwire.publish.leader import Leader
from thinwire.publish.making import Facts
from thinwire.publish.meeting import agree, meet
from thinwire.publish.messages import Order, Ready, Report, Start, Verdict, decline
from thinwire.publish.ranks import Fault, LineBroken, PeerFailed, Ranks
from thinwire.publish.settings import Settings
from thinwire.publish.source import kept_attachments
from thinwire.publish.spreading import Holding
from thinwire.publish.staging import Staging
from thinwire.stream import keys
from thinwire.stream.events import Observer, Observers
from thinwire.stream.records import Link, Manifest

Phase = Literal["encoding", "uploading", "committing"]
OnPhase = Callable[[Phase], None]


@dataclass
class _Unsettled:
    """An attempt of which this rank did not hear what became of it, or did not tell it."""

    topic: str
    staging: Staging | None
    encoded: Encoded
    uploaded: Sequence[str]
    verdict: Verdict | None = None


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

    Attributes:
        plan: Who does what.
        baseline: This rank's share of the last committed version.
        has_base: Whether there is one; else the next version is a lineage's first.
        head: The newest version; None: there is none.

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
        self._leader: Leader | None = None
        self._unsettled: _Unsettled | None = None
        for left in folder.glob("*.tw"):
            left.unlink(missing_ok=True)  # by a killed process
        self._is_usable = True
        self.has_base = False
        self.head: Manifest | None = None
        try:
            self._open(Observers(observer))
            hosts, self.plan = meet(ranks, stream, holdings)
            if self._leader is not None:
                self._leader.plan = self.plan
            start = self._begin()
            self.baseline = self._agreed(lambda: Baseline(self.plan, ranks.rank, allocate))
            if start.link is not None:
                self._resume(start.lineage, start.link, hosts)
        except BaseException:
            self.close()
            raise

    def check_usable(self) -> None:
        """Raise BaseUnusable if the baseline was left between two versions."""
        if not self._is_usable:
            raise BaseUnusable(
                "the baseline could not be moved to the version that was committed last",
                hint="Restart the trainer, or open another publisher: it takes its baseline from "
                "the stream",
            )

    @property
    def is_settled(self) -> bool:
        """Whether it is known here what became of the last attempt."""
        return self._unsettled is None

    def close(self) -> None:
        """Stop what runs in the background."""
        if self._leader is not None:
            self._leader.close()

    @property
    def must_mend(self) -> bool:
        """On rank 0: whether the next attempt needs another line for bulk data."""
        return self._leader is not None and self._leader.must_mend

    def publish(
        self,
        topic: str,
        line: str,
        staging: Staging | Fault | None,
        facts: Facts,
        on_phase: OnPhase,
        replicas: Mapping[str, int],
    ) -> Manifest:
        """Make one version; runs in the background, on every rank at once.

        Args:
            topic: The same on every rank, a higher number each time.
            line: The name of the line for bulk data: another one where the last one broke.
            staging: What was captured; None: the baseline was filled with everything, and this is
                a lineage's first version. A fault: this rank could capture nothing, and there will
                be no version.
            facts: What the trainer says of it; those of rank 0 count.
            on_phase: Told what begins: "encoding", "uploading", "committing".
            replicas: Digests of tensors that other ranks hold, too: see ``replicated``.

        Raises:
            ThinwireError: There is no new version; the same error on every rank.
            Deadline: It was not heard in time what became of it: see :meth:`settle`.
        """
        if self._leader is None:
            return self._publish(topic, line, None, staging, facts, on_phase, replicas)
        with self._leader.background.paused():
            place, order = self._leader.place(is_first=not self.has_base)
            self.ranks.tell(f"{topic}/order", msgspec.msgpack.encode(order))
            manifest = self._publish(topic, line, place, staging, facts, on_phase, replicas)
        self._leader.background.wake()
        return manifest

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
        last = self._unsettled
        verdict = last.verdict
        if verdict is None:
            data = self.ranks.hear(f"{last.topic}/verdict", sign_of_life=f"{last.topic}/alive")
            verdict = msgspec.msgpack.decode(data, type=Verdict)
        else:
            self.ranks.tell(f"{last.topic}/verdict", msgspec.msgpack.encode(verdict))
        self._unsettled = None
        if verdict.manifest is None:
            assert verdict.fault is not None
            if verdict.is_foreign:
                # Named by our session: nobody else can mean them.
                with suppress(StoreError):
                    self.stream.store.delete(last.uploaded)
            raise verdict.fault.error()
        if last.staging is not None:
            self._is_usable = False
            move_on(self.baseline, last.staging, last.encoded)
            self._is_usable = True
        self.has_base = True
        self.head = verdict.manifest
        return verdict.manifest

    def _open(self, observers: Observers) -> None:
        """Rank 0 opens the stream for publishing."""

        def lead() -> Start:
            self._leader = Leader(self.stream, self.ranks, self._folder, self._settings, observers)
            return Start()

        self._told("opened", lead)

    def _begin(self) -> Start:
        """Rank 0 says where the stream is."""
        return self._told("start", lambda: cast(Leader, self._leader).start(self._check_copy))

    def _told(self, topic: str, make: Callable[[], Start]) -> Start:
        """What rank 0 makes, or meets, told to all."""
        if self.ranks.rank == 0:
            try:
                start = make()
            except BaseException as error:
                self.ranks.tell(topic, msgspec.msgpack.encode(Start(fault=Fault.of(error))))
                raise
            self.ranks.tell(topic, msgspec.msgpack.encode(start))
        start = msgspec.msgpack.decode(self.ranks.hear(topic), type=Start)
        if start.fault is not None:
            raise start.fault.error(0)
        return start

    def _agreed(self, make: Callable[[], Baseline]) -> Baseline:
        """What ``make`` returns, once it did on every rank."""
        made, ready = None, Ready()
        try:
            made = make()
        except Exception as error:
            ready = Ready(fault=Fault.of(error))
        agree(self.ranks, ready)
        assert made is not None
        return made

    def _resume(self, lineage: str, link: Link, hosts: Sequence[str]) -> None:
        """Fill the baseline from a copy of the head: one on each host."""
        first = hosts.index(hosts[self.ranks.rank])
        manifest, ready = None, Ready()
        try:
            manifest = self.stream.require(lineage, link)
            if first == self.ranks.rank:
                ready = Ready(str(self._copy_of(manifest)))
        except Exception as error:
            ready = Ready(fault=Fault.of(error))
        path = agree(self.ranks, ready)[first].path
        try:
            self._fill(path)
            ready = Ready()
        except Exception as error:
            ready = Ready(fault=Fault.of(error))
        agree(self.ranks, ready)
        self.head = manifest
        self.has_base = True

    def _copy_of(self, manifest: Manifest) -> Path:
        """A folder on this host that holds a version, proved."""
        copy = self._settings.copy_folder()
        if manifest.kind == "reference" and manifest.source is not None:
            path = local_copy(manifest.source, copy)
            check_content(Checkpoint.open(path, ignore_subfolders=True), manifest.content)
            return path
        folder = self._folder / "head"
        with Follower(
            self.stream, folder, base=copy, accept_new_lineages=True, lease=False
        ) as follower:
            follower.check_known()
            follower.bring_to(manifest)
            follower.prove()
        return folder

    def _fill(self, path: str) -> None:
        """Take the baseline from a copy of the head."""
        checkpoint = Checkpoint.open(path, ignore_subfolders=True)
        kept = self._check_copy(checkpoint)
        self.baseline.fill(checkpoint)
        self.baseline.digest_owned()
        if self._leader is not None:
            tensors = [(name, checkpoint.tensors[name]) for name in kept]
            same = [
                SameTensor(name, t.dtype, tuple(t.shape), tensor_digest(t.dtype, t.data))
                for name, t in tensors
            ]
            self._leader.carried = Carried(same, kept_attachments(checkpoint))

    def _check_copy(self, checkpoint: Checkpoint) -> list[str]:
        """Raise unless a checkpoint is of the trainer's model; returns what the trainer lacks.

        Raises:
            TensorMismatch: It is not.
        """
        check_same(self.plan, checkpoint)
        published = {spread.name for spread in self.plan.spreads}
        kept = [name for name in checkpoint.tensors if name not in published]
        for name in kept:
            if not self._settings.may_lack(name):
                raise TensorMismatch(
                    f"tensor {name!r} of the stream is not published here",
                    hint="Publish all tensors, or leave it out on purpose with exclude=[...]: then "
                    "it stays as it is. Names are mapped with rename=",
                    tensor=name,
                )
        return kept

    def _publish(
        self,
        topic: str,
        line: str,
        place: Place | None,
        staging: Staging | Fault | None,
        facts: Facts,
        on_phase: OnPhase,
        replicas: Mapping[str, int],
    ) -> Manifest:
        start_s = time.monotonic()
        order = msgspec.msgpack.decode(self.ranks.hear(f"{topic}/order"), type=Order)
        if order.fault is not None:
            raise order.fault.error()
        encoded = Encoded({}, {})
        uploaded: list[str] = []
        try:
            on_phase("encoding")
            with self.ranks.working(topic):
                self.ranks.use_line(line)
                if isinstance(staging, Fault):
                    decline(self.ranks)
                    report = Report(fault=staging)
                elif staging is None:
                    report = self._make_first(order, on_phase)
                else:
                    encoded, report = self._make_delta(topic, order, staging, uploaded, on_phase)
        except Exception as error:
            is_peers = isinstance(error, PeerFailed | LineBroken)
            report = Report(fault=Fault.of(error), is_peers=is_peers)
        report.is_line_broken = self.ranks.is_broken
        report.replicas = dict(replicas)
        captured = None if isinstance(staging, Fault) else staging
        self._unsettled = _Unsettled(topic, captured, encoded, uploaded)
        self.ranks.report(f"{topic}/done", msgspec.msgpack.encode(report))
        on_phase("committing")
        if self._leader is not None and place is not None:
            self._unsettled.verdict = self._leader.decide(topic, place, facts)
        manifest = self.settle()
        assert manifest is not None
        if self._leader is not None:
            self._leader.announce(manifest, start_s)
        return manifest

    def _make_first(self, order: Order, on_phase: OnPhase) -> Report:
        folder = self._folder / "first"
        shutil.rmtree(folder, ignore_errors=True)  # a killed process left it
        with os_errors("cannot make", folder):
            folder.mkdir(parents=True, exist_ok=True)
        files = weights_files(self.plan, self._settings.weights_name)
        first = FirstVersion(
            self.plan, self.ranks, self.baseline, folder, files, self._settings.metadata
        )
        try:
            paths = first.write()
            small = self._settings.files if self._leader is not None else None
            receipts, others = first.receipts(paths, small)
            on_phase("uploading")
            keys_of = {
                name: keys.anchor_file(order.lineage, order.version, order.session, name)
                for name in (*paths, *others)
            }
            every = {**paths, **others}
            put_files(self.stream.store, [(keys_of[name], every[name]) for name in every])
            return Report(files=receipts)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _make_delta(
        self,
        topic: str,
        order: Order,
        staging: Staging,
        uploaded: list[str],
        on_phase: OnPhase,
    ) -> tuple[Encoded, Report]:
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
        encoded = attempt.encode(Carried() if self._leader is None else self._leader.carried)
        on_phase("uploading")
        base = order.version - 1
        key_of = shard_key(order.lineage, base, order.version, order.session)
        try:
            receipts = upload(self.stream.store, encoded.paths, key_of)
            uploaded += [key_of(receipt.number, receipt.record) for receipt in receipts]
            return encoded, Report(shards=receipts)
        finally:
            for path in encoded.paths.values():
                path.unlink(missing_ok=True)
