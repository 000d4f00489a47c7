"""Looks after a stream, beside live publishers and followers and other maintainers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

from thinwire.errors import (
    Corrupt,
    HistoryPruned,
    NotFound,
    ThinwireError,
)
from thinwire.follow import Stream, open_stream
from thinwire.follow.presence import Outage
from thinwire.maintain.anchoring import make_anchor
from thinwire.maintain.charge import Charge
from thinwire.maintain.inventory import Inventory
from thinwire.maintain.merging import due_merges, make_merge
from thinwire.maintain.pruning import Removed, ages_s, collect, give_up, prune
from thinwire.maintain.trails import Trails
from thinwire.stream import keys
from thinwire.stream.events import Maintained, Observer, Observers
from thinwire.stream.records import LEASE_TTL_S, Manifest
from thinwire.stream.retention import anchor_place, decide_kept, is_anchor_due, oldest_kept

# So old leases are removed.
_DEAD_S = 86_400


class Work(NamedTuple):
    """What one round did.

    Attributes:
        merge_count: Merged deltas made.
        anchor_count: Anchors made.
        dropped_count: Merged deltas, anchors and runs of step deltas that are no longer to be used.
        removed: Objects deleted.
        failed_count: What could not be made; the observer was told why.
        is_other: Another maintainer is in charge, so nothing was done.
    """

    merge_count: int = 0
    anchor_count: int = 0
    dropped_count: int = 0
    removed: Removed = Removed(0, 0)
    failed_count: int = 0
    is_other: bool = False


class Maintainer:
    """Makes merged deltas and anchors, prunes, and removes orphans.

    Everything it makes is committed by put-if-absent, and everything it removes was dropped, or
    orphaned, for the policy's ``grace_s``: so any number of them may run at once without harm. A
    lease keeps them from doing the same work twice.

    Args:
        stream: The stream, or its URL.
        work_dir: Where copies of the model are kept: one for the head and one for each merge
            level that is in use.
        base: Where a copy of the model is that the stream begins with by reference.
        is_background: A publisher's own, which leaves the work to any other.
        give_way: Called between pieces of work; may wait, or raise to end the work.
        workers: Threads that decode and encode.
        observer: Told of every event.
    """

    def __init__(
        self,
        stream: Stream | str | os.PathLike[str],
        work_dir: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        is_background: bool = False,
        give_way: Callable[[], None] = lambda: None,
        workers: int = 1,
        observer: Observer | None = None,
    ) -> None:
        self.stream = stream if isinstance(stream, Stream) else open_stream(stream)
        self._observers = Observers(observer)
        self._folder = Path(work_dir)
        self._base = base
        self._callers_give_way = give_way
        self._workers = workers
        self._charge = Charge(self.stream, self._folder, is_background=is_background)
        self._outage = Outage(self.stream.url)
        self._trails: dict[str, Trails] = {}
        self._is_stopped = False
        self._failed_count = 0
        self._wakes: SimpleQueue[None] = SimpleQueue()  # may be put to from a signal handler

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
        """Let go of the copies, and of the lease."""
        self.stop()
        for trails in self._trails.values():
            trails.close()
        self._trails.clear()
        self._charge.end()

    def stop(self) -> None:
        """End :meth:`watch` after the piece of work that runs. From any thread, or a handler."""
        self._is_stopped = True
        self._wakes.put(None)
        self.stream.end_waits()

    def watch(self, every_s: float = 10.0) -> None:
        """Look after the stream until :meth:`stop`; failures that may pass are told and retried.

        Raises:
            ThinwireError: What will not pass by itself.
        """
        while not self._is_stopped:
            try:
                with self._outage:
                    self.run_once()
            except ThinwireError as error:
                if not error.retryable and not isinstance(error, NotFound):
                    raise
                self._refuse(error)
            with suppress(Empty):
                self._wakes.get(timeout=every_s)

    def run_once(self) -> Work:
        """Do everything that is due now.

        Raises:
            NotFound: There is no such stream.
            Unavailable: The store does not answer, or the stream that was there is not.
            ThinwireError: Something failed; what was made stays, what was not is made next time.
        """
        self._failed_count = 0
        self.stream.forget()
        self.stream.check_key()
        now_s = self._charge.take()
        if now_s is None:
            return Work(is_other=True)
        head = self.stream.tip().head
        if head is None:
            return Work()
        policy = self.stream.record().policy
        inventory = Inventory.load(self.stream, head.lineage, head.first)
        # Older versions are gone in any case, whatever age they had.
        counted = max(head.first, head.version - policy.keep_versions + 1)
        after = min(inventory.steps_from, counted) - 1
        ages = ages_s(self.stream, head.lineage, after, now_s)
        oldest = oldest_kept(policy, ages, self._leased(now_s), head.version)
        merge_count = self._merge(inventory, head, oldest)
        anchor_count = self._anchor(inventory, head)
        inventory.publish(self.stream)
        dropped, removed = 0, Removed(0, 0)
        promised = oldest_kept(policy, ages, (), head.version)
        if inventory.is_over or inventory.steps_from > max(head.first, promised):
            if self._has_moved(head):
                # Another maintainer went on from a newer head meanwhile, which promises less.
                return Work(merge_count, anchor_count, 0, removed, self._failed_count)
            self._note_failure(
                Corrupt(
                    f"{self.stream.url}: the catalog has dropped versions that the policy promises;"
                    " nothing is removed until it is right",
                    hint="Someone else wrote it, or the policy was widened lately",
                )
            )
        else:
            dropped, removed = self._tidy(inventory, head, oldest, now_s)
        return Work(merge_count, anchor_count, dropped, removed, self._failed_count)

    def _has_moved(self, head: Manifest) -> bool:
        """Whether the head is another one by now."""
        self.stream.forget()
        now = self.stream.tip().head
        return now is None or (now.lineage, now.version) != (head.lineage, head.version)

    def _give_way(self) -> None:
        """Between pieces of work: keep the lease, and let the caller have its way."""
        self._charge.keep()
        self._callers_give_way()

    def _merge(self, inventory: Inventory, head: Manifest, oldest: int) -> int:
        made = 0
        levels = self.stream.record().policy.merge_levels
        first, steps_from = inventory.begin.version, inventory.steps_from
        known = {*inventory.merges, *inventory.retired_merges()}
        due = due_merges(first, head.version, steps_from, levels, known)
        with suppress(HistoryPruned):
            # What would be dropped again at once is not made.
            kept = decide_kept(oldest, first, inventory.options(_step_bytes(head)))
            due = [pair for pair in due if kept.keeps_merge(*pair)]
        for base, version in due:
            if self._is_stopped:
                break
            self._give_way()
            with self._going_on():
                old = self._trails_of(head).at(version - base, self._manifest(head, base))
                new = self._trails_of(head).at(0, self._manifest(head, version))
                merge = make_merge(self.stream, old, new, self._give_way, workers=self._workers)
                if merge is not None:
                    made += 1
                    inventory.merges[base, version] = merge.payload_bytes
                    inventory.publish(self.stream)
                    self._tell("merge", version, 1, merge.payload_bytes)
        return made

    def _anchor(self, inventory: Inventory, head: Manifest) -> int:
        policy = self.stream.record().policy
        newest = max([*inventory.anchor_sizes(), inventory.begin.version])
        options = inventory.options(_step_bytes(head))
        self._give_way()
        if newest == head.version or self._is_stopped:
            return 0
        if not is_anchor_due(policy, newest, head.version, options, head.raw_bytes):
            return 0
        first, version = inventory.begin.version, head.version
        if not policy.anchor_every:
            version = anchor_place(first, newest, head.version, policy.merge_levels)
        # The copy of the widest level that just came by this version is there already.
        levels = [0, *(n for n in policy.merge_levels if (version - first) % n == 0)]
        level = 0 if version == head.version else max(n for n in levels if n <= 64)
        with self._going_on():
            trail = self._trails_of(head).at(level, self._manifest(head, version))
            anchor = make_anchor(self.stream, trail, self._give_way)
            if anchor is not None:
                inventory.anchors[version] = anchor
                self._tell("anchor", version, len(anchor.files), anchor.payload_bytes)
                return 1
        return 0

    def _tidy(
        self, inventory: Inventory, head: Manifest, oldest: int, now_s: float
    ) -> tuple[int, Removed]:
        """Prune and collect, in this lineage and in those that ended."""
        policy = self.stream.record().policy
        pruned = prune(self.stream, inventory, oldest, _step_bytes(head), now_s)
        dropped, removed = pruned or 0, Removed(0, 0)
        if pruned is None:
            self._note_failure(
                NotFound(
                    f"{self.stream.url}: an anchor or a merged delta is listed, and its objects "
                    "are missing; nothing is removed in this round",
                    hint="`thinwire fsck` says which",
                )
            )
        else:
            removed = collect(self.stream, inventory, head.version, policy, now_s)
        lineage, begin = inventory.begin.previous, inventory.begin
        while lineage and begin.base is not None:
            end = self.stream.require(lineage, begin.base)
            self._remove_copies(lineage)
            with suppress(NotFound):
                past = Inventory.load(self.stream, lineage, end.first)
                ended_s = end.created_ms / 1000
                if oldest >= end.version and ended_s < now_s - policy.keep_age_s:
                    dropped += give_up(self.stream, past, end.version - 1, now_s)
                more = collect(self.stream, past, end.version, policy, now_s, has_ended=True)
                removed = Removed(*(a + b for a, b in zip(removed, more, strict=True)))
            found = self.stream.manifest(lineage, end.first)
            if found is None:
                break
            lineage, begin = found.previous, found
        if dropped:
            self._tell("prune", head.version, dropped, 0)
        if removed.object_count:
            self._tell("collect", head.version, *removed)
        return dropped, removed

    def _leased(self, now_s: float) -> list[int]:
        """The versions that live leases of followers name; removes those of the dead."""
        found = []
        dead = []
        for entry in self.stream.store.list(keys.LEASES):
            age_s = now_s - entry.modified_s
            version = keys.leased_version(entry.key)
            if entry.key == keys.maintainer():
                continue
            if age_s > _DEAD_S:
                dead.append(entry.key)
            elif version is not None and age_s < LEASE_TTL_S:
                found.append(version)
        self.stream.store.delete(dead)
        return found

    def _remove_copies(self, lineage: str) -> None:
        """Copies of the model at versions of a lineage that ended serve nothing any more."""
        trails = self._trails.pop(lineage, None)
        if trails is not None:
            trails.close()
        shutil.rmtree(self._folder / lineage, ignore_errors=True)

    def _trails_of(self, head: Manifest) -> Trails:
        if head.lineage not in self._trails:
            folder = self._folder / head.lineage
            self._trails[head.lineage] = Trails(
                self.stream, folder, self._base, self._observers, self._workers
            )
        return self._trails[head.lineage]

    def _manifest(self, head: Manifest, version: int) -> Manifest:
        found = head if version == head.version else self.stream.manifest(head.lineage, version)
        if found is None:
            raise NotFound(f"{self.stream.url}: version {version} has no manifest")
        return found

    def _going_on(self) -> _GoingOn:
        return _GoingOn(self._note_failure)

    def _note_failure(self, error: ThinwireError) -> None:
        self._failed_count += 1
        self._refuse(error)

    def _tell(self, kind: str, version: int, object_count: int, payload_bytes: int) -> None:
        self._observers.on_event(
            Maintained(
                url=self.stream.url,
                lineage="",
                version=version,
                kind=kind,
                object_count=object_count,
                payload_bytes=payload_bytes,
            )
        )

    def _refuse(self, error: ThinwireError) -> None:
        self._observers.refuse(self.stream.url, "", 0, error)


def _step_bytes(head: Manifest) -> int:
    """About what a step delta has."""
    return head.payload_bytes if head.kind == "delta" else max(1, head.raw_bytes)


class _GoingOn:
    """One thing that cannot be made must not keep the others from being made."""

    def __init__(self, tell: Callable[[ThinwireError], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, ThinwireError) and not error.retryable:
            self._tell(error)
            return True
        return False
