"""Publishing from memory, on one rank of a trainer or on all of them together."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors
from thinwire.errors import BaseUnusable, StoreError
from thinwire.follow import Stream
from thinwire.maintain.upload import put_files
from thinwire.publish.attempt import (
    Attempt,
    Carried,
    Encoded,
    move_on,
    shard_key,
    upload,
)
from thinwire.publish.baseline import Allocate, Baseline, in_memory
from thinwire.publish.committing import Place
from thinwire.publish.creation import note_stream, noted_stream
from thinwire.publish.first import FirstVersion, weights_files
from thinwire.publish.leader import Leader
from thinwire.publish.making import Facts
from thinwire.publish.meeting import meet, on_all
from thinwire.publish.messages import Order, Report, Start, Verdict, decline
from thinwire.publish.ranks import Fault, LineBroken, PeerFailed, Ranks
from thinwire.publish.resuming import check_copy, resume
from thinwire.publish.settings import Settings
from thinwire.publish.spreading import Holding
from thinwire.publish.staging import Staging
from thinwire.stream import keys
from thinwire.stream.events import Observer, Observers
from thinwire.stream.records import Manifest

Phase = Literal["encoding", "uploading", "committing"]
OnPhase = Callable[[Phase], None]


class Captured(NamedTuple):
    """What a rank hands on once training may go on.

    Attributes:
        staging: What differs; None: the baseline was filled with everything, and this is a
            lineage's first version. A fault: this rank could capture nothing, and there will be no
            version.
        facts: What the trainer says of it; those of rank 0 count.
        replicas: Digests of tensors that other ranks hold, too: see ``replicated``.
    """

    staging: Staging | Fault | None
    facts: Facts
    replicas: Mapping[str, int] = {}


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
            on_all(ranks, lambda: note_stream(folder, stream.record().stream))
            start = self._begin()
            self.baseline = on_all(ranks, lambda: Baseline(self.plan, ranks.rank, allocate))
            if start.link is not None:
                self.head, carried = resume(
                    stream,
                    ranks,
                    hosts,
                    start.lineage,
                    start.link,
                    self.baseline,
                    folder,
                    settings,
                )
                self.has_base = True
                if self._leader is not None:
                    self._leader.carried = carried
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

    def publish(self, topic: str, line: str, captured: Captured, on_phase: OnPhase) -> Manifest:
        """Make one version; runs in the background, on every rank at once.

        Args:
            topic: The same on every rank, a higher number each time.
            line: The name of the line for bulk data: another one where the last one broke.
            captured: What this rank captured.
            on_phase: Told what begins: "encoding", "uploading", "committing".

        Raises:
            ThinwireError: There is no new version; the same error on every rank.
            Deadline: It was not heard in time what became of it: see :meth:`settle`.
        """
        if self._leader is None:
            return self._publish(topic, line, None, captured, on_phase)
        with self._leader.background.paused():
            place, order = self._leader.place(is_first=not self.has_base)
            self.ranks.tell(f"{topic}/order", msgspec.msgpack.encode(order))
            manifest = self._publish(topic, line, place, captured, on_phase)
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
        """Rank 0 opens the stream for publishing.

        Which stream it was before may be known to other ranks alone: a restarted job may have its
        rank 0 on another host.
        """
        own = on_all(self.ranks, lambda: noted_stream(self._folder))
        said = [
            msgspec.msgpack.decode(data, type=tuple[str, str])
            for data in self.ranks.share(msgspec.msgpack.encode((own, str(self._folder))))
        ]
        noted = {stream: folder for stream, folder in said if stream}

        def lead() -> Start:
            self._leader = Leader(
                self.stream, self.ranks, self._folder, self._settings, observers, noted
            )
            return Start()

        self._told("opened", lead)

    def _begin(self) -> Start:
        """Rank 0 says where the stream is."""

        def check(copy: Checkpoint) -> None:
            check_copy(self.plan, self._settings, copy)

        return self._told("start", lambda: cast(Leader, self._leader).start(check))

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

    def _publish(
        self,
        topic: str,
        line: str,
        place: Place | None,
        captured: Captured,
        on_phase: OnPhase,
    ) -> Manifest:
        start_s = time.monotonic()
        staging = captured.staging
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
        report.replicas = dict(captured.replicas)
        found = None if isinstance(staging, Fault) else staging
        self._unsettled = _Unsettled(topic, found, encoded, uploaded)
        self.ranks.report(f"{topic}/done", msgspec.msgpack.encode(report))
        on_phase("committing")
        if self._leader is not None and place is not None:
            self._unsettled.verdict = self._leader.decide(topic, place, captured.facts)
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
