"""One stream at the hub: what the bucket says of it, what replicas say, and who listens."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import msgspec

from thinwire.errors import ThinwireError
from thinwire.follow import Stream
from thinwire.hub.bodies import Readiness
from thinwire.hub.events import Fanout, Message
from thinwire.hub.replicas import Fleet, FleetLimits
from thinwire.hub.status import Rule, counts_of, is_believed, judge, regions_of, status_of
from thinwire.hub.versions import History
from thinwire.report.messages import (
    Answer,
    Fault,
    Heartbeat,
    ReplicaStatus,
    StreamStatus,
    UpdateNote,
    VersionNote,
)

_MAX_FAULT_CHARS = 500
# Looking at all replicas may take a tenth of one processor: what was found is kept for so many
# times as long as it took to find, or until there is a new version.
_KEPT_TIMES = 10
_MAX_KEPT_S = 1.0
_SWEEP_EVERY_S = 1.0
# A head that was read longer ago, and than so many looks should take, is no measure of staleness.
_BLIND_AFTER_S = 60.0
_BLIND_AFTER_LOOKS = 10
_MAX_ALIASES = 256


class Latest(NamedTuple):
    """The head, ready to be told.

    Attributes:
        note: What it is.
        data: The same as JSON.
        message: The same as an event.
    """

    note: VersionNote
    data: bytes
    message: Message


class Board:
    """What is known of one stream.

    The watcher's threads bring versions; all else happens on the event loop.

    Args:
        name: The stream's name at this hub.
        stream: The stream.
        poll_s: The time between two looks at its bucket.
        history_count: How many versions are kept.
        listener_limit: How many may listen at once.
        fleet_limits: What is kept of replicas.
    """

    def __init__(
        self,
        name: str,
        stream: Stream,
        *,
        poll_s: float,
        history_count: int,
        listener_limit: int,
        fleet_limits: FleetLimits,
    ) -> None:
        self.name = name
        self.url = stream.url
        self.fanout = Fanout(listener_limit, self._sweep)
        self.look_failures: dict[str, int] = {}
        self._settled_s = time.monotonic() + fleet_limits.settle_s
        self._blind_after_s = max(_BLIND_AFTER_S, _BLIND_AFTER_LOOKS * poll_s)
        self._lock = threading.Lock()
        self._history = History(history_count)
        self._fleet = Fleet(fleet_limits)
        self._model = ""
        self._looked_s: float | None = None
        self._fault: Fault | None = None
        self._latest: Latest | None = None
        self._announced_count = 0
        self._swept_s = 0.0
        self._statuses: list[ReplicaStatus] = []
        self._statuses_until_s = 0.0
        # What a trainer called versions when it signalled them, by number.
        self._aliases: dict[int, str] = {}
        self.signalled = ""

    # What the watcher tells.

    def take(self, notes: list[VersionNote], *, model: str, is_other: bool) -> None:
        """The bucket was read: new versions, oldest first; ``is_other``: all before are void."""
        with self._lock:
            self._looked_s, self._fault, self._model = time.monotonic(), None, model
            if is_other:
                self._history.clear()
                self._aliases.clear()
                self._latest = None
            latest = [self._add(note) for note in notes]
            if latest or is_other:
                self._statuses_until_s = 0.0
        for one in latest:
            self.fanout.announce(one.message)

    def fill(self, note: VersionNote) -> bool:
        """An older version; whether still older ones are wanted.

        Also where it was known: before it there may be a hole that an earlier reading left.
        """
        with self._lock:
            self._history.add(note)
            return self._history.has_room_before(note.version)

    def fail(self, error: ThinwireError) -> None:
        """The bucket could not be read, or is not what it should be."""
        fault = Fault(
            code=error.code,
            message=str(error)[:_MAX_FAULT_CHARS],
            at_ms=_now_ms(),
        )
        with self._lock:
            self._fault = fault
            self.look_failures[error.code] = self.look_failures.get(error.code, 0) + 1

    # What is asked.

    @property
    def latest(self) -> Latest | None:
        """The newest version that the bucket showed; None: none."""
        return self._latest

    @property
    def looked_s(self) -> float | None:
        """Since the bucket was last read with success; None: never."""
        looked_s = self._looked_s
        return None if looked_s is None else max(0.0, time.monotonic() - looked_s)

    def versions(self, limit: int, before: int | None) -> list[VersionNote]:
        """Versions, newest first."""
        with self._lock:
            return self._history.newest(limit, before)

    def find(self, version: int) -> VersionNote | None:
        """The version with a number, as far back as the history goes."""
        with self._lock:
            return self._history.find(version)

    def find_identity(self, identity: str) -> VersionNote | None:
        """The version that the trainer called so when it published it."""
        with self._lock:
            return self._history.find_identity(identity)

    def find_step(self, step: int) -> VersionNote | None:
        """The newest version of a trainer's step."""
        with self._lock:
            return self._history.find_step(step)

    def statuses(self) -> list[ReplicaStatus]:
        """All replicas, by name."""
        began_s = time.monotonic()
        if began_s < self._statuses_until_s:
            return self._statuses
        began_cpu_s = time.thread_time()
        self._sweep()
        with self._lock:
            now_ms = _now_ms()
            self._statuses = [
                status_of(seen, self._history, began_s, now_ms, self._looked_s)
                for seen in self._fleet.sorted()
            ]
            cost_s = time.thread_time() - began_cpu_s
            self._statuses_until_s = time.monotonic() + min(_MAX_KEPT_S, _KEPT_TIMES * cost_s)
        return self._statuses

    def replica(self, name: str) -> ReplicaStatus | None:
        """One replica."""
        seen = self._fleet.find(name)
        if seen is None:
            return None
        with self._lock:
            now_s = time.monotonic()
            return status_of(seen, self._history, now_s, _now_ms(), self._looked_s)

    def status(self) -> StreamStatus:
        """The stream as it is now."""
        statuses = self.statuses()
        with self._lock:
            return StreamStatus(
                name=self.name,
                url=self.url,
                model=self._model,
                head=self._history.head,
                looked_s=self.looked_s,
                fault=self._fault,
                counts=counts_of(statuses),
                regions=regions_of(statuses),
                sent_bytes=self._history.payload_bytes,
                full_bytes=self._history.raw_bytes,
            )

    def judge(
        self,
        statuses: list[ReplicaStatus],
        rule: Rule,
        head_version: int,
        *,
        is_one: bool = False,
    ) -> Readiness:
        """Whether replicas are ready.

        How far behind they are is known no more once the bucket could not be read for long; and
        who they are is not known yet after a start.

        Args:
            statuses: The replicas.
            rule: When they are.
            head_version: The newest version, as it was before the replicas were looked at.
            is_one: Whether a single one is asked for.
        """
        looked_s = self.looked_s
        if looked_s is None:
            return Readiness(False, "the hub has not read the stream yet", 0, len(statuses))
        verdict = judge(statuses, rule)
        obstacles = []
        if head_version < rule.published:
            obstacles.append(f"the hub has not read version {rule.published} yet")
        settle_s = self._settled_s - time.monotonic()
        if settle_s > 0 and not is_one:
            obstacles.append(
                f"the hub has just started: for {settle_s:.0f} s more it may not know all replicas"
            )
        is_blind = rule.max_staleness_steps is not None and looked_s > self._blind_after_s
        if self._fault is not None or is_blind:
            text = f"the stream was last read {looked_s:.0f} s ago"
            verdict = msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {text}")
        return msgspec.structs.replace(
            verdict,
            is_ready=verdict.is_ready and not obstacles and not is_blind,
            reason="; ".join([verdict.reason, *obstacles]),
        )

    def updates(self, limit: int) -> list[UpdateNote]:
        """The timeline, newest first."""
        known = self._fleet.updates
        return [known[-n] for n in range(1, min(limit, len(known)) + 1)]

    # What replicas and trainers say.

    def beat(self, beat: Heartbeat) -> Answer:
        """Take in a heartbeat.

        Raises:
            FleetFull: A limit is reached.
        """
        self._sweep()
        if self._fleet.beat(beat, time.monotonic()):
            self.fanout.note_replicas(1)
        latest = self._latest
        head = None if latest is None else latest.note
        return Answer(head=head, interval_s=self._fleet.interval_s())

    def may_be_ahead(self, replica: str) -> bool:
        """Whether a replica may be at a version that the hub has yet to read."""
        seen, latest = self._fleet.find(replica), self._latest
        head_version = 0 if latest is None else latest.note.version
        return (
            seen is not None
            and seen.beat.version > head_version
            and is_believed(seen, self._looked_s)
        )

    def leave(self, replica: str) -> bool:
        """Forget a replica that left; whether it was known."""
        was_known = self._fleet.leave(replica)
        if was_known:
            self.fanout.note_replicas(1)
        return was_known

    def call(self, version: int, identity: str) -> None:
        """Remember what a trainer calls a version."""
        with self._lock:
            self._aliases[version] = identity
            while len(self._aliases) > _MAX_ALIASES:
                del self._aliases[next(iter(self._aliases))]

    def called(self, version: int) -> str:
        """What a trainer calls a version."""
        with self._lock:
            if version in self._aliases:
                return self._aliases[version]
            note = self._history.find(version)
        return note.identity if note is not None and note.identity else f"version_{version:012d}"

    def _add(self, note: VersionNote) -> Latest:
        self._history.add(note)
        self._announced_count += 1
        data = msgspec.json.encode(note)
        place = f"{note.lineage}-{note.version}".encode()
        event = b"event: version\nid: %b\ndata: %b\n\n" % (place, data)
        self._latest = Latest(note, data, Message(self._announced_count, event))
        return self._latest

    def _sweep(self) -> None:
        now_s = time.monotonic()
        if now_s - self._swept_s >= _SWEEP_EVERY_S:
            self._swept_s = now_s
            self.fanout.note_replicas(self._fleet.sweep(now_s))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
