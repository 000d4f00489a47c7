"""What nobody needs any more goes: references first, what they name a while later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from thinwire.errors import HistoryPruned, NotFound, VersionGap
from thinwire.follow import Stream
from thinwire.follow.steps import Step, step_of_anchor, step_of_merge, step_of_version
from thinwire.maintain.inventory import Inventory
from thinwire.maintain.upload import shard_keys
from thinwire.store import Entry
from thinwire.stream import keys
from thinwire.stream.records import Manifest, Policy, Retired
from thinwire.stream.retention import Kept, decide_kept


class Removed(NamedTuple):
    """What was deleted."""

    object_count: int
    payload_bytes: int


def prune(
    stream: Stream, inventory: Inventory, oldest: int, step_bytes: int, now_s: float
) -> int | None:
    """Drop the references to what is not needed to keep every version from ``oldest`` reachable.

    The objects stay until :func:`collect` finds that they were dropped long enough ago.

    Returns:
        How many merged deltas and anchors, and whether step deltas, were dropped; None: something
        that should be there is missing. Then nothing may be collected on the word of this
        inventory, from which it was taken out.
    """
    is_sure = True
    while True:
        try:
            kept = decide_kept(oldest, inventory.begin.version, inventory.options(step_bytes))
        except HistoryPruned:
            return 0 if is_sure else None
        retired = list(_retire(inventory, kept, int(now_s * 1000)))
        if not retired or _is_whole(stream, inventory, kept):
            dropped = _drop(stream, inventory, retired)
            return dropped if is_sure else None
        is_sure = False


def _is_whole(stream: Stream, inventory: Inventory, kept: Kept) -> bool:
    """Whether what is kept before the oldest version is there; takes out what is not.

    Before anything is dropped because of it: a catalog, or a listing, says so easily.
    """
    was = (len(inventory.merges), len(inventory.anchors), inventory.has_first_anchor)
    for base, version in [pair for pair in kept.merges if pair[0] < kept.oldest]:
        merge = stream.merge(inventory.begin.lineage, base, version)
        if merge is None or not _are_there(stream, step_of_merge(merge, stream.url)):
            del inventory.merges[base, version]
    for version in kept.anchors:
        anchor = inventory.anchors.get(version)
        step = step_of_version(inventory.begin, stream.url)
        if anchor is not None:
            step = step_of_anchor(anchor, stream.url)
        if _are_there(stream, step):
            continue
        if anchor is not None:
            del inventory.anchors[version]
        elif inventory.begin.kind == "reference":
            raise VersionGap(f"{stream.url}: the shards of the version by reference are missing")
        else:
            inventory.has_first_anchor = False
    return was == (len(inventory.merges), len(inventory.anchors), inventory.has_first_anchor)


def _are_there(stream: Stream, step: Step) -> bool:
    """Whether every object of a step is there. A short answer says nothing, and is raised."""
    try:
        for wanted in (*step.shards, *step.files.values()):
            stream.store.get_range(wanted.key, 0, 0)
    except NotFound:
        return False
    return True


def give_up(stream: Stream, inventory: Inventory, last: int, now_s: float) -> int:
    """Drop everything of a lineage that ended after version ``last``; returns how much."""
    if inventory.is_over:
        return 0
    nothing = Kept(last, frozenset(), frozenset(), last)
    inventory.is_over = True
    return _drop(stream, inventory, list(_retire(inventory, nothing, int(now_s * 1000))))


def _drop(stream: Stream, inventory: Inventory, retired: list[Retired]) -> int:
    """First the catalog, then the manifests; the objects are collected later."""
    if not retired:
        return 0
    for entry in retired:
        if entry.kind == "merge":
            del inventory.merges[entry.base, entry.version]
        elif entry.kind == "steps":
            inventory.steps_from = entry.version
        elif entry.version == inventory.begin.version:
            inventory.has_first_anchor = False
        else:
            del inventory.anchors[entry.version]
    inventory.retired += retired
    inventory.publish(stream)
    lineage = inventory.begin.lineage
    doomed = [keys.merge(lineage, r.base, r.version) for r in retired if r.kind == "merge"]
    doomed += [keys.anchor(lineage, r.version) for r in retired if r.kind == "anchor"]
    stream.store.delete(doomed)
    return len(retired)


def collect(
    stream: Stream,
    inventory: Inventory,
    head: int,
    policy: Policy,
    now_s: float,
    *,
    has_ended: bool = False,
) -> Removed:
    """Delete objects that no manifest names, or that were dropped, once they are old enough.

    Orphans are left by publishers that failed, lost a race or were killed. An object is removed
    only after the manifest that could name it was looked for directly; a listing is not enough. And
    only where the place of its version is taken: a publisher that was suspended before its commit
    may go on at any time, and either its objects are there or its place is taken.

    Args:
        stream: The stream.
        inventory: The lineage's.
        head: The newest version of the lineage that is known: later places may be free.
        policy: How old is old enough.
        now_s: The time by the store's clock.
        has_ended: The lineage ended, and ``head`` is the place of its end.
    """
    limit_s = now_s - policy.grace_s
    lineage = inventory.begin.lineage
    guard = _Guard(stream, inventory, limit_s, head if has_ended else None)
    doomed: list[Entry] = []
    references: list[str] = []
    deltas = stream.store.list(keys.deltas(lineage))
    for name, entries in _folders(deltas, keys.deltas(lineage)):
        versions = keys.versions_of(name)
        if versions is not None and versions[1] <= head and all_old(entries, limit_s):
            wanted = guard.shards(*versions, entries)
            doomed += [entry for entry in entries if entry.key not in wanted]
            if inventory.is_over and not wanted:
                references.append(keys.merge(lineage, *versions))
    anchors = stream.store.list(keys.anchors(lineage))
    for name, entries in _folders(anchors, keys.anchors(lineage)):
        version = keys.version_of(name.partition("-")[0])
        if version is None or version > head or "-" not in name:
            continue
        if not all_old(entries, limit_s):
            continue
        if not guard.needs_anchor(version, name.partition("-")[2]):
            doomed += entries
            if inventory.is_over:
                references.append(keys.anchor(lineage, version))
    # A listing may have hidden them when the lineage was given up; most are gone already.
    stream.store.delete(references)
    stream.store.delete([entry.key for entry in doomed])
    inventory.publish(stream, forget_before_ms=int(limit_s * 1000))
    return Removed(len(doomed), sum(entry.size_bytes for entry in doomed))


def all_old(entries: Iterable[Entry], limit_s: float) -> bool:
    """Whether nothing in a folder is younger than the limit: else someone may be at it."""
    return all(entry.modified_s < limit_s for entry in entries)


class _Guard:
    """Knows which objects of a lineage are named by something."""

    def __init__(
        self, stream: Stream, inventory: Inventory, limit_s: float, end: int | None
    ) -> None:
        self._stream = stream
        self._inventory = inventory
        self._lineage = inventory.begin.lineage
        self._limit_ms = limit_s * 1000
        self._is_over = inventory.is_over
        self._end = end
        folder = keys.manifests(self._lineage)
        after = keys.manifest(self._lineage, inventory.steps_from)
        self._listed = {
            keys.version_of(entry.key.removeprefix(folder).removesuffix(".json"))
            for entry in stream.store.list(folder, after=after)
        }

    def shards(self, base: int, version: int, entries: list[Entry]) -> set[str]:
        """Which of the objects of a delta's folder are needed."""
        names = {entry.key for entry in entries}
        if self._in_use("steps" if version - base == 1 else "merge", base, version):
            return names
        parts = [name.rpartition("/")[2].split("-") for name in names]
        numbers = {part[1] for part in parts if len(part) == 3}
        # One attempt only, and it was committed: looking into every manifest is not needed.
        is_plain = len({part[0] for part in parts}) == 1 and len(numbers) == len(names)
        if version - base > 1:
            if is_plain and (base, version) in self._inventory.merges and not self._is_over:
                return names
            return self._merge_shards(base, version)
        if base == version:
            begin = self._inventory.begin
            is_begin = begin.kind == "reference" and version == begin.version
            return _keys_of(begin) if is_begin and not self._is_over else set()
        if self._is_over or version <= self._inventory.steps_from or version == self._end:
            return set()
        if version in self._listed and is_plain:
            return names
        manifest = self._stream.manifest(self._lineage, version)
        return set() if manifest is None or manifest.kind == "end" else _keys_of(manifest)

    def needs_anchor(self, version: int, session: str) -> bool:
        """Whether the files of an anchor are needed."""
        if self._in_use("anchor", 0, version):
            return True
        if self._is_over:
            return False
        begin = self._inventory.begin
        if version == begin.version and session == begin.session[:16]:
            return begin.kind == "anchor" and self._inventory.has_first_anchor
        anchor = self._inventory.anchors.get(version)
        if anchor is None:
            anchor = self._stream.anchor(self._lineage, version)
        return anchor is not None and session == anchor.session[:16]

    def _merge_shards(self, base: int, version: int) -> set[str]:
        # The manifest itself, not what the catalog says of it.
        merge = None if self._is_over else self._stream.merge(self._lineage, base, version)
        if merge is None:
            return set()
        return set(shard_keys(self._lineage, base, version, merge.session, merge.shards))

    def _in_use(self, kind: str, base: int, version: int) -> bool:
        """Whether something was dropped, but so lately that someone may still be fetching it."""
        for entry in self._inventory.retired:
            if entry.kind != kind or entry.at_ms <= self._limit_ms:
                continue
            if kind == "steps" and entry.base < version <= entry.version:
                return True
            if kind != "steps" and (entry.base, entry.version) == (base, version):
                return True
        return False


def _keys_of(manifest: Manifest) -> set[str]:
    base = manifest.base.version if manifest.kind == "delta" and manifest.base else manifest.version
    names = shard_keys(manifest.lineage, base, manifest.version, manifest.session, manifest.shards)
    return set(names)


def _retire(inventory: Inventory, kept: Kept, at_ms: int) -> Iterator[Retired]:
    for base, version in inventory.merges:
        if (base, version) not in kept.merges:
            yield Retired("merge", base, version, at_ms)
    for version in inventory.anchor_sizes():
        if version not in kept.anchors:
            yield Retired("anchor", 0, version, at_ms)
    if kept.steps_from > inventory.steps_from:
        yield Retired("steps", inventory.steps_from, kept.steps_from, at_ms)


def _folders(entries: Iterator[Entry], prefix: str) -> Iterator[tuple[str, list[Entry]]]:
    """A sorted listing, folder by folder."""
    for name, group in groupby(entries, lambda e: e.key.removeprefix(prefix).partition("/")[0]):
        yield name, list(group)


def ages_s(stream: Stream, lineage: str, after: int, now_s: float) -> Mapping[int, float]:
    """The age of each version after ``after`` by the store's clock."""
    folder = keys.manifests(lineage)
    ages = {}
    for entry in stream.store.list(folder, after=keys.manifest(lineage, after)):
        version = keys.version_of(entry.key.removeprefix(folder).removesuffix(".json"))
        if version is not None:
            ages[version] = now_s - entry.modified_s
    return ages
