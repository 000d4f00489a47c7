"""Which steps lead a follower to a version, from what the stream has to offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from thinwire.errors import HistoryPruned, NotFound, VersionGap
from thinwire.follow.sink import Mark
from thinwire.follow.steps import (
    Step,
    check_chain,
    step_of_anchor,
    step_of_merge,
    step_of_version,
)
from thinwire.follow.stream import Stream
from thinwire.stream.encoding import link_of
from thinwire.stream.records import Catalog, Link, Manifest, Merge, Source
from thinwire.stream.routes import Hop, Options, plan_route

# Up to so many manifests are read, and the whole chain checked, before anything is fetched.
_EAGER_STEPS = 64
_GUESSED_STEP_BYTES = 1 << 20


class Router:
    """Plans ways to versions of one stream, around what turned out to be unusable.

    Args:
        stream: The stream.
        has_copy: Whether there is a copy here of the source of a version by reference.
    """

    def __init__(self, stream: Stream, has_copy: Callable[[Source], bool]) -> None:
        self._stream = stream
        self._has_copy = has_copy
        self._avoided: set[tuple[str, int, int]] = set()

    def find(self, version: int, head: Manifest) -> Manifest:
        """The manifest of a version, also of an earlier lineage.

        Raises:
            NotFound: The stream has no such version.
        """
        lineage, first, newest = head.lineage, head.first, head.version
        while version < first:
            begin = self._stream.manifest(lineage, first)
            if begin is None or begin.base is None:
                break
            end = self._stream.require(begin.previous, begin.base)
            lineage, first, newest = end.lineage, end.first, end.version - 1
        found = None
        if first <= version <= newest:
            found = self._stream.manifest(lineage, version)
        if found is None or found.kind == "end":
            raise NotFound(
                f"{self._stream.url} has no version {version}; the newest is {head.version}",
                hint="`thinwire log URL` shows what there is",
                version=version,
            )
        return found

    def avoid(self, step: Step) -> None:
        """Plan no way over a step that turned out to be unusable."""
        base = 0 if step.base is None else step.base.version
        self._avoided.add((step.kind, base, step.target.version))

    def forget(self) -> None:
        """Avoid nothing any more."""
        self._avoided.clear()

    def way(self, mark: Mark | None, wanted: Manifest) -> Iterator[Step]:
        """The steps of the cheapest way from what is held to a version, each linked to the next.

        Raises:
            HistoryPruned: There is no way.
            NotFound: The stream begins by reference, and no copy of the source is here.
            VersionGap: The chain of manifests is broken.
        """
        target = link_of(wanted)
        catalog = self._stream.catalog(wanted.lineage)
        if catalog.is_over:
            raise HistoryPruned(
                f"the lineage of version {wanted.version} ended, and nothing of it is kept",
                hint="Choose a newer version",
                version=wanted.version,
            )
        have = mark.link if mark is not None and mark.lineage == wanted.lineage else None
        begin = self._begin(wanted) if have is None else None
        options = self._options(catalog, begin, wanted)
        merges = {(m.base.version, m.target.version): m for m in catalog.merges}
        route = plan_route(None if have is None else have.version, wanted.version, options)
        steps = self._expand(route, merges, begin, wanted)
        if sum(hop.version - hop.base for hop in route if hop.kind == "steps") <= _EAGER_STEPS:
            known = list(steps)
            check_chain(known, have, target)
            return iter(known)
        return _checked(steps, have, target)

    def _begin(self, wanted: Manifest) -> Manifest | None:
        if wanted.version == wanted.first:
            return wanted
        return self._stream.manifest(wanted.lineage, wanted.first)

    def _options(self, catalog: Catalog, begin: Manifest | None, wanted: Manifest) -> Options:
        anchors = {hint.version: hint.size for hint in catalog.anchors}
        if begin is not None:
            self._add_begin(anchors, begin, catalog.steps_from)
        merges = {(m.base.version, m.target.version): m.payload_bytes for m in catalog.merges}
        avoided = self._avoided
        return Options(
            anchors={
                version: size
                for version, size in anchors.items()
                if not {("anchor", 0, version), ("reference", 0, version)} & avoided
            },
            merges={m: size for m, size in merges.items() if ("merge", *m) not in avoided},
            steps_from=max(wanted.first, catalog.steps_from),
            step_bytes=wanted.payload_bytes if wanted.kind == "delta" else _GUESSED_STEP_BYTES,
            broken=frozenset(version for kind, _, version in avoided if kind == "delta"),
        )

    def _add_begin(self, anchors: dict[int, int], begin: Manifest, steps_from: int) -> None:
        """Add a lineage's first version to the anchors, if it can be used here."""
        if begin.kind == "anchor":
            # Further on, the catalog lists it as long as it is there.
            if steps_from <= begin.version:
                anchors[begin.version] = begin.payload_bytes
        elif begin.source is not None and self._has_copy(begin.source):
            anchors[begin.version] = begin.payload_bytes
        elif begin.source is not None and not anchors:
            raise NotFound(
                f"{self._stream.url} begins with {begin.source.name[:200]!r} by reference, and no "
                "copy of it was found here",
                hint="Fetch that model and revision, or say where your copy is (base=, --base)",
                source=begin.source.name,
            )

    def _expand(
        self,
        route: list[Hop],
        merges: dict[tuple[int, int], Merge],
        begin: Manifest | None,
        wanted: Manifest,
    ) -> Iterator[Step]:
        url, lineage = self._stream.url, wanted.lineage
        for hop in route:
            if hop.kind == "merge":
                yield step_of_merge(merges[hop.base, hop.version], url)
            elif hop.kind == "anchor":
                yield self._anchor_step(hop.version, begin, wanted)
            else:
                for version in range(hop.base + 1, hop.version + 1):
                    manifest = wanted
                    if version != wanted.version:
                        manifest = self._manifest(lineage, version)
                    yield step_of_version(manifest, url)

    def _manifest(self, lineage: str, version: int) -> Manifest:
        found = self._stream.manifest(lineage, version)
        if found is None or found.kind == "end":
            raise VersionGap(
                f"version {version} is missing in {self._stream.url}, though later ones are there",
                hint="Someone removed its manifest; `thinwire fsck` shows what else",
                version=version,
            )
        return found

    def _anchor_step(self, version: int, begin: Manifest | None, wanted: Manifest) -> Step:
        if begin is not None and version == begin.version:
            return step_of_version(begin, self._stream.url)
        anchor = self._stream.anchor(wanted.lineage, version)
        if anchor is not None:
            return step_of_anchor(anchor, self._stream.url)
        return step_of_version(self._manifest(wanted.lineage, version), self._stream.url)


def _checked(steps: Iterator[Step], have: Link | None, target: Link) -> Iterator[Step]:
    """The steps, the chain checked as they come."""
    at = have
    for step in steps:
        check_chain([step], at, target if step.target.version == target.version else None)
        at = step.target
        yield step
