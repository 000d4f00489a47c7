"""What a replica is doing, put together from events: the next heartbeat."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from thinwire.errors import NotFound
from thinwire.report.calls import Place
from thinwire.report.messages import (
    DIGEST_CHARS,
    MAX_COUNT,
    MAX_PHASES,
    MAX_UPDATES,
    NAME_PATTERN,
    Fault,
    Heartbeat,
    Phase,
    UpdateNote,
)
from thinwire.stream.events import (
    Applied,
    CaughtUp,
    EngineFailed,
    EngineUpdated,
    Event,
    Fetched,
    Progressed,
    Refused,
)

_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(rf"[0-9]+-([0-9a-f]{{{DIGEST_CHARS}}})")
_MAX_TEXT_CHARS = 500
_MAX_SECONDS = 1e9
# Deltas that were fetched and not applied yet.
_MAX_FETCHED = 16


class Now(NamedTuple):
    """The time: of the monotonic clock in seconds, and of the day in Unix milliseconds."""

    s: float
    ms: int


class News(Enum):
    """What an event changes of what a replica says."""

    NONE = 0
    PROGRESS = 1
    CHANGE = 2


class ReplicaState:
    """Keeps what a replica says of itself. Not safe from several threads.

    Args:
        replica: Its name.
        region: Where it is.
        engine: What holds the weights.
        now: The time of its start.

    Attributes:
        held: What the sink holds.
        held_digest: The beginning of its manifest's digest; whoever knows sets it before the event.
        relayed_bytes: What a relay gave since the start; whoever knows sets it.
    """

    def __init__(self, replica: str, *, region: str, engine: str, now: Now) -> None:
        self._replica = replica
        self._region = region
        self._engine = engine
        self._is_driven = self._is_asked = False
        # Those that a look at the stream does not end.
        self._engines_phases: tuple[Phase, ...] = ()
        self._started_ms = now.ms
        self.held = Place()
        self.held_digest = ""
        self._step: int | None = None
        self._served, self._digest = Place(), ""
        # The newest version at the first look: whoever joins is not ready before.
        self._goal: Place | None = None
        self._may_serve = False
        self._doing: Progressed | None = None
        self._since_s = now.s
        self._fetched: dict[Place, Fetched] = {}
        self._fetched_bytes = self.relayed_bytes = 0
        self._cached_bytes = 0
        self._update_count = 0
        self._pause_s = 0.0
        self._fault: Fault | None = None
        self._is_engines_fault = False
        # Of the update that is on its way: seconds by phase, and what was fetched for it.
        self._phases: dict[str, float] = {}
        self._way_bytes = 0
        self._failed: tuple[Place, str] | None = None
        self._updates: deque[UpdateNote] = deque(maxlen=MAX_UPDATES)

    def begin(
        self,
        held: Place,
        step: int | None,
        digest: str = "",
        *,
        is_driven: bool,
        is_asked: bool = False,
    ) -> None:
        """Begin with what the sink holds from before.

        Args:
            held: That version.
            step: Its step.
            digest: The beginning of its manifest's digest; empty: that is not known.
            is_driven: Whether an engine serves the weights, and the sink only feeds it.
            is_asked: Whether what serves them says itself if it may be sent requests, as an engine
                always does; see :meth:`note_ready`.
        """
        self.held, self.held_digest = held, digest
        self._is_driven, self._is_asked = is_driven, is_driven or is_asked
        self._engines_phases = ("update", "prove") if is_driven else ()
        self._phases, self._way_bytes, self._doing, self._goal = {}, 0, None, None
        self._serve(Place() if is_driven else held, None if is_driven else step)

    def take(self, event: Event, now: Now) -> News:
        """Take an event in; returns what is new by it."""
        place = Place(event.lineage, event.version)
        is_new = True
        match event:
            case Progressed():
                return self._progressed(event, now)
            case Fetched():
                self._fetched_bytes += event.payload_bytes
                self._cached_bytes += event.cached_bytes
                self._fetched[place] = event
                while len(self._fetched) > _MAX_FETCHED:
                    del self._fetched[next(iter(self._fetched))]
                return News.PROGRESS
            case Applied():
                self._applied(event, place, now)
            case CaughtUp():
                is_new = self._caught_up(event, place)
            case EngineUpdated():
                self._engine_updated(event, place, now)
            case EngineFailed():
                self._engine_failed(event, place, now)
            case Refused() if event.code == NotFound.code and not self.held.version:
                # Nothing was published yet: that is no fault of anybody's.
                is_new = False
            case Refused():
                is_new = self._note_fault(event.code, event.reason, now) or self._doing is not None
                self._doing = None
            case _:
                is_new = False
        return News.CHANGE if is_new else News.NONE

    def fail(self, code: str, reason: str, now: Now) -> None:
        """Note an error that is not an event: the one that ends the following."""
        self._note_fault(code, reason, now)
        self._goal = self._doing = None

    def note_ready(self, may_serve: bool) -> bool:
        """Note whether what serves may be sent requests; returns whether that is new."""
        if may_serve == self._may_serve:
            return False
        self._may_serve = may_serve
        if may_serve and self._is_driven:
            self._fault = None
        return True

    @property
    def is_ready(self) -> bool:
        """Whether one whole version is served, and the head of the joining was reached."""
        goal, served = self._goal, self._served
        if goal is None or not served.version:
            return False
        is_there = served.lineage != goal.lineage or served.version >= goal.version
        return is_there and (self._may_serve or not self._is_asked)

    def beat(self, now: Now) -> Heartbeat:
        """What to say now."""
        doing = self._doing
        return Heartbeat(
            replica=self._replica,
            region=self._region,
            engine=self._engine,
            lineage=self._served.lineage,
            version=self._served.version,
            # A step that is a time in nanoseconds fits into no message.
            step=None if self._step is None or abs(self._step) > MAX_COUNT else self._step,
            digest=self._digest,
            is_ready=self.is_ready,
            phase="idle" if doing is None else doing.phase,
            target=0 if doing is None else doing.version,
            done_bytes=0 if doing is None else _count(doing.done_bytes),
            total_bytes=0 if doing is None else _count(doing.total_bytes),
            phase_s=0.0 if doing is None else _seconds(now.s - self._since_s),
            fetched_bytes=_count(self._fetched_bytes),
            relayed_bytes=_count(min(self.relayed_bytes, self._fetched_bytes)),
            cached_bytes=_count(self._cached_bytes),
            update_count=_count(self._update_count),
            started_ms=_count(self._started_ms),
            pause_s=_seconds(self._pause_s),
            fault=self._fault,
            updates=list(self._updates),
        )

    def arrived(self, updates: Sequence[UpdateNote]) -> None:
        """A heartbeat with these updates arrived: they are not sent again."""
        for update in updates:
            if self._updates and self._updates[0] is update:
                self._updates.popleft()

    def _progressed(self, event: Progressed, now: Now) -> News:
        before = self._doing
        if before is None or _what(before) != _what(event):
            self._doing, self._since_s = event, now.s
            return News.CHANGE
        if event.done_bytes > before.done_bytes:
            self._doing = event
        return News.PROGRESS

    def _applied(self, event: Applied, place: Place, now: Now) -> None:
        self.held = place
        self._ended(event.version)
        fetched = self._fetched.pop(place, None)
        apply_s = event.wall_s
        if fetched is not None:
            self._way_bytes += fetched.payload_bytes
            self._add("fetch", fetched.wall_s)
            if event.kind == "anchor":
                # It is written as it arrives.
                apply_s = max(0.0, apply_s - fetched.wall_s)
        self._add("copy" if self._is_driven else "apply", apply_s)
        if self._is_driven:
            return
        self._serve(place, event.step)
        self._pause_s = 0.0
        self._updated(event.version, self._take_phases(), 0.0, event.age_s, now)

    def _engine_updated(self, event: EngineUpdated, place: Place, now: Now) -> None:
        label = _LABEL.fullmatch(event.label)
        self._serve(place, event.step, "" if label is None else label[1])
        self._pause_s = event.pause_s
        self._doing = None
        self._fault = None
        phases = {**self._take_phases(), **event.phases}
        if event.way != "proved":
            self._updated(event.version, phases, event.pause_s, event.age_s, now)

    def _engine_failed(self, event: EngineFailed, place: Place, now: Now) -> None:
        self._doing = None
        self._note_fault(event.code, event.reason, now, is_engines=True)
        if event.served is None:
            self._serve(Place(), None)
        # A version that is tried again and again failed once.
        if event.version and self._failed != (place, event.code):
            self._failed = (place, event.code)
            self._updates.append(UpdateNote(event.version, now.ms, is_ok=False))

    def _caught_up(self, event: CaughtUp, place: Place) -> bool:
        is_new = self._goal is None or place != self.held or self._doing is not None
        if self._goal is None:
            self._goal = place
        self.held = place
        if self._doing is not None and self._doing.phase not in self._engines_phases:
            self._doing = None
        if not self._is_driven:
            is_new |= (self._served, self._digest) != (place, self.held_digest)
            self._serve(place, event.step)
        if self._fault is not None and not self._is_engines_fault:
            self._fault = None
            is_new = True
        return is_new

    def _serve(self, place: Place, step: int | None, digest: str | None = None) -> None:
        """It serves that; ``digest`` None: what is held."""
        self._served, self._step = place, step
        held_digest = self.held_digest if place == self.held else ""
        self._digest = held_digest if digest is None else digest

    def _updated(
        self, version: int, phases: dict[str, float], pause_s: float, age_s: float, now: Now
    ) -> None:
        self._update_count += 1
        self._failed = None
        self._updates.append(
            UpdateNote(
                version,
                now.ms,
                phases=_sendable(phases),
                fetched_bytes=_count(self._way_bytes),
                pause_s=_seconds(pause_s),
                age_s=_seconds(age_s),
            )
        )
        self._way_bytes = 0

    def _note_fault(self, code: str, reason: str, now: Now, *, is_engines: bool = False) -> bool:
        """Returns whether it is another one than before."""
        before = self._fault
        # Names of files in it may be no text.
        text = reason[:_MAX_TEXT_CHARS].encode(errors="replace").decode()
        self._fault = Fault(code, text, now.ms)
        self._is_engines_fault = is_engines
        return before is None or (before.code, before.message) != (code, self._fault.message)

    def _ended(self, version: int) -> None:
        if self._doing is not None and self._doing.version == version:
            self._doing = None

    def _add(self, phase: str, seconds: float) -> None:
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def _take_phases(self) -> dict[str, float]:
        phases, self._phases = self._phases, {}
        return phases


def _what(event: Progressed) -> tuple[Phase, str, int]:
    return event.phase, event.lineage, event.version


def _sendable(phases: dict[str, float]) -> dict[str, float]:
    """What fits into a message: an engine of somebody else's names its phases as it likes."""
    named = [(name, _seconds(s)) for name, s in phases.items() if _NAME.fullmatch(name)]
    return dict(named[:MAX_PHASES])


def _count(number: int) -> int:
    return min(max(number, 0), MAX_COUNT)


def _seconds(seconds: float) -> float:
    """Clocks of two machines differ, so that an age may be below zero."""
    return round(min(max(seconds, 0.0), _MAX_SECONDS), 6)
