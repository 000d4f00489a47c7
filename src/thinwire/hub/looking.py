"""Where a stream is, look by look; everything verified, nothing remembered but the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import NamedTuple

from thinwire.errors import VersionGap
from thinwire.follow import Stream
from thinwire.stream.encoding import link_of
from thinwire.stream.records import Manifest

# So many versions are walked to; what lies further is jumped to.
_MAX_WALK = 16
_BATCH = 8


class Look(NamedTuple):
    """What a look found.

    Attributes:
        is_other: Whether the stream is another one than before, or was set back: what was known
            of it counts no more.
        found: Versions that are new, oldest first; after a jump only the newest.
        is_jump: Whether there are more, between what was known and these.
    """

    is_other: bool
    found: list[Manifest]
    is_jump: bool


class Looker:
    """Looks at a stream for its newest version. One thread uses it at a time.

    Args:
        stream: The stream.

    Attributes:
        head: The newest version so far.
        model: What the stream says that it is of.
    """

    def __init__(self, stream: Stream) -> None:
        self.head: Manifest | None = None
        self.model = ""
        self._stream = stream
        self._id = ""
        # Kept until a look ends well: whoever was told of the old stream must hear of it.
        self._is_other = False

    def look(self, *, doubts: bool) -> Look:
        """Look for versions after the head: one request where there is none.

        Args:
            doubts: Make sure as well that it still is the same stream, and holds the head.

        Raises:
            ThinwireError: It cannot be read, or is not what it should be.
        """
        if self.head is not None and doubts and not self._is_same():
            self.head, self._is_other = None, True
        if self.head is None:
            return self._begin()
        found: list[Manifest] = []
        head = self.head
        while len(found) < _MAX_WALK:
            following = self._stream.manifest(head.lineage, head.version + 1)
            if following is not None and following.kind == "end":
                following = self._beyond(head, following)
            elif following is not None and following.base != link_of(head):
                raise VersionGap(
                    f"{self._stream.url}: version {following.version} does not follow the version "
                    f"{head.version} that was there",
                    hint="Someone changed the bucket; `thinwire fsck` shows what else",
                )
            if following is None:
                self.head = head
                return Look(False, found, False)
            found.append(following)
            head = following
        tip = self._stream.tip(head)
        is_jump = tip.head is not None and tip.head.version > head.version
        if is_jump and tip.head is not None:
            found.append(tip.head)
            head = tip.head
        self.head = head
        return Look(False, found, is_jump)

    def repeat(self, look: Look) -> None:
        """Nobody could be told of a look: the next one begins anew, and tells it as well."""
        self.head, self._is_other = None, self._is_other or look.is_other

    def _begin(self) -> Look:
        self._stream.forget()
        record = self._stream.record()
        self._is_other |= self._id not in ("", record.stream)
        self._id, self.model = record.stream, record.model
        self.head = self._stream.tip().head
        found = [] if self.head is None else [self.head]
        is_other, self._is_other = self._is_other, False
        return Look(is_other, found, bool(found))

    def _is_same(self) -> bool:
        assert self.head is not None
        self._stream.forget()
        if self._stream.record().stream != self._id:
            return False
        there = self._stream.manifest(self.head.lineage, self.head.version)
        return there is not None and link_of(there) == link_of(self.head)

    def _beyond(self, head: Manifest, end: Manifest) -> Manifest | None:
        """The first version of the lineage that follows an ended one; None: not there yet."""
        first = self._stream.manifest(end.successor, end.version)
        if first is None:
            return None
        if end.base != link_of(head) or (first.base, first.previous) != (link_of(end), end.lineage):
            raise VersionGap(
                f"{self._stream.url}: the lineage that begins with version {first.version} does not"
                f" follow the version {head.version} that was there",
                hint="Someone changed the bucket; `thinwire fsck` shows what else",
            )
        if first.kind == "end":
            return self._beyond_again(first)
        return first

    def _beyond_again(self, end: Manifest) -> Manifest | None:
        """The same for a lineage that ended before it had a version."""
        tip = self._stream.tip(end)
        return tip.head if tip.end is None else None


def versions_before(
    stream: Stream, head: Manifest, pool: Executor, wants: Callable[[], bool]
) -> Iterator[Manifest]:
    """The versions before one, newest first, each the one that the next names.

    Several are asked for at once. Versions that ended lineages took the place of are left out.

    Args:
        stream: The stream.
        head: Where to begin; not among them.
        pool: What asks.
        wants: Whether to go on.

    Raises:
        ThinwireError: One cannot be read, or is not the one that is named.
    """
    at = head
    while (base := at.base) is not None and wants():
        if at.version > at.first:
            for found in _chain(stream, at, pool):
                at = found
                yield found
            continue
        # The end of the lineage before has its place; where it had no version, so have more.
        at = end = stream.require(at.previous, base)
        if (base := end.base) is not None and end.version > end.first:
            at = stream.require(end.lineage, base)
            yield at


def _chain(stream: Stream, at: Manifest, pool: Executor) -> Iterator[Manifest]:
    """Some versions before one in its lineage."""
    numbers = range(at.version - 1, max(at.first, at.version - _BATCH) - 1, -1)
    futures = [pool.submit(stream.manifest, at.lineage, number) for number in numbers]
    expected = at.base
    for number, future in zip(numbers, futures, strict=True):
        found = future.result()
        if found is None or expected != link_of(found):
            raise VersionGap(
                f"{stream.url}: version {number} is not there, or not the one that version "
                f"{number + 1} names",
                hint="`thinwire fsck` shows more",
            )
        yield found
        expected = found.base
