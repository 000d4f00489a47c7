"""A stream's newest versions, and how far behind one of them is. Decisions only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from thinwire.report.messages import DIGEST_CHARS, MAX_COUNT, VersionNote
from thinwire.stream.encoding import digest_of_record
from thinwire.stream.records import Manifest

MAX_IDENTITY_CHARS = 128


class Staleness(NamedTuple):
    """How far a version is behind the head.

    Attributes:
        steps: The head's step less its own; versions, where a step is missing or no smaller, or
            the lineages differ. None: the stream does not have it, as far as the history goes.
        seconds: Since the version after it was published, by the publisher's clock.
    """

    steps: int | None
    seconds: float | None


UNKNOWN = Staleness(None, None)


def note_of(manifest: Manifest) -> VersionNote:
    """What is told of a version."""
    identity = manifest.metadata.get("identity", "")
    is_usable = isinstance(identity, str) and len(identity) <= MAX_IDENTITY_CHARS
    # A trainer may call its steps by nanoseconds; JavaScript's numbers do not hold those, nor may
    # heartbeats.
    has_step = manifest.step is not None and abs(manifest.step) <= MAX_COUNT
    return VersionNote(
        lineage=manifest.lineage,
        version=manifest.version,
        step=manifest.step if has_step else None,
        kind=manifest.kind,
        created_ms=manifest.created_ms,
        payload_bytes=manifest.payload_bytes,
        raw_bytes=manifest.raw_bytes,
        changed_count=manifest.changed_count,
        word_count=manifest.word_count,
        identity=identity if is_usable else "",
        digest=digest_of_record(manifest)[:DIGEST_CHARS],
    )


class History:
    """The newest versions of a stream, over all its lineages; there may be holes.

    Numbers never repeat in a stream, so a number names a version here.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: list[int] = []
        self._notes: dict[int, VersionNote] = {}
        self.payload_bytes = 0
        self.raw_bytes = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def head(self) -> VersionNote | None:
        """The newest version; None: none."""
        return self._notes[self._numbers[-1]] if self._numbers else None

    def clear(self) -> None:
        """Forget everything: the stream is another one."""
        self._numbers.clear()
        self._notes.clear()
        self.payload_bytes = self.raw_bytes = 0

    def add(self, note: VersionNote) -> bool:
        """Take a version in; whether it was not there, and there was room.

        The oldest one makes room, unless this is older still.
        """
        if note.version in self._notes:
            return False
        if len(self._numbers) >= self._limit:
            if note.version < self._numbers[0]:
                return False
            self._drop(self._numbers.pop(0))
        insort(self._numbers, note.version)
        self._notes[note.version] = note
        self.payload_bytes += note.payload_bytes
        self.raw_bytes += note.raw_bytes
        return True

    def has_room_before(self, version: int) -> bool:
        """Whether a version before this one would be kept."""
        return len(self._numbers) < self._limit or version > self._numbers[0]

    def find(self, version: int) -> VersionNote | None:
        """The version with this number."""
        return self._notes.get(version)

    def find_identity(self, identity: str) -> VersionNote | None:
        """The newest version that the trainer called so."""
        for number in reversed(self._numbers):
            if self._notes[number].identity == identity:
                return self._notes[number]
        return None

    def find_step(self, step: int) -> VersionNote | None:
        """The newest version of a step."""
        for number in reversed(self._numbers):
            if self._notes[number].step == step:
                return self._notes[number]
        return None

    def newest(self, limit: int, before: int | None = None) -> list[VersionNote]:
        """At most so many, newest first.

        Args:
            limit: How many.
            before: Only those with a lower number.
        """
        stop = len(self._numbers) if before is None else bisect_left(self._numbers, before)
        return [self._notes[n] for n in reversed(self._numbers[max(0, stop - limit) : stop])]

    def doubt(self, lineage: str, version: int, digest: str) -> str:
        """Why a version is none of the stream's; empty: it is one, or may be.

        Args:
            lineage: Its lineage.
            version: Its number; 0: none.
            digest: The beginning of its manifest's digest; empty: that is not known.
        """
        head = self.head
        if head is None or version == 0 or version > head.version:
            return ""
        around, known = self._around(version), self._notes.get(version)
        # The numbers of a lineage follow each other: between two of one lineage are its own. Of
        # what came before all, or between two lineages, nobody knows.
        is_certain = known is not None or (len(around) == 2 and around[0] == around[1])
        if is_certain and lineage not in around:
            return f"the stream's version {version} is of another lineage"
        if known is not None and digest and known.digest and digest != known.digest:
            return f"the stream's version {version} is another one: {known.digest}, not {digest}"
        return ""

    def staleness(
        self, lineage: str, version: int, step: int | None, now_ms: int, digest: str = ""
    ) -> Staleness:
        """How far a version is behind the head.

        Args:
            lineage: Its lineage.
            version: Its number; 0: none.
            step: Its step as whoever serves it says; that of the history counts more.
            now_ms: The time.
            digest: The beginning of its manifest's digest; empty: that is not known.
        """
        head = self.head
        if head is None or version == 0 or self.doubt(lineage, version, digest):
            return UNKNOWN
        if version >= head.version:
            # A replica may be faster than the hub; but only on the lineage that goes on.
            return Staleness(0, 0.0) if lineage == head.lineage else UNKNOWN
        if lineage not in self._around(version):
            return UNKNOWN
        following = self._notes[self._numbers[bisect_right(self._numbers, version)]]
        if (known := self._notes.get(version)) is not None:
            step = known.step
        steps = head.version - version
        if lineage == head.lineage and step is not None and head.step is not None:
            # A step that was published twice, or again after a restart, says nothing.
            steps = head.step - step if head.step > step else steps
        return Staleness(steps, max(0, now_ms - following.created_ms) / 1000)

    def _around(self, version: int) -> list[str]:
        """The lineage of a version up to the head; where it is not here, those next to it."""
        at = bisect_left(self._numbers, version)
        first = at if version in self._notes else max(0, at - 1)
        return [self._notes[number].lineage for number in self._numbers[first : at + 1]]

    def _drop(self, number: int) -> None:
        note = self._notes.pop(number)
        self.payload_bytes -= note.payload_bytes
        self.raw_bytes -= note.raw_bytes
