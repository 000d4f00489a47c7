"""Which steps lead a follower to a version, from what the stream has to offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from thinwire.errors import FormatError, HistoryPruned, NotFound, StreamError, VersionGap
from thinwire.follow.sink import Mark
from thinwire.follow.steps import (
    Step,
    check_chain,
    gap,
    step_of_anchor,
    step_of_merge,
    step_of_version,
)
from thinwire.follow.stream import Stream
from thinwire.stream.encoding import link_of
from thinwire.stream.records import Catalog, Link, Manifest, Source
from thinwire.stream.routes import Hop, Options, plan_route

_GUESSED_STEP_BYTES = 1 << 20


class Way(NamedTuple):
    """A way to a version: the version that it begins with, and its steps."""

    begins: int
    steps: Iterator[Step]


class Router:
    """Plans ways to versions of one stream, around what turned out to be unusable.

    Args:
        stream: The stream.
        has_copy: Whether there is a copy here of the source of a version by reference.

    Attributes:
        pruned: What the catalog says of the version that was asked for last; None: it is there.
    """

    def __init__(self, stream: Stream, has_copy: Callable[[Source], bool]) -> None:
        self._stream = stream
        self._has_copy = has_copy
        self._avoided: set[tuple[str, int, int]] = set()
        self.pruned: HistoryPruned | None = None

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
        self.pruned = None

    def way(self, mark: Mark | None, wanted: Manifest, after: int = 0) -> Way:
        """The cheapest way from what is held to a version, each step linked to the one before.

        The catalog is a hint. What it names is looked at before it is used, and where it leads
        nowhere, a listing shows what there is.

        Args:
            mark: What is held; None: nothing that a way could begin with.
            wanted: The version.
            after: Use only anchors of later versions than this one.

        Raises:
            HistoryPruned: There is no way.
            NotFound: The stream begins by reference, and no copy of the source is here.
            VersionGap: The chain of manifests is broken.
        """
        catalog = self._stream.catalog(wanted.lineage)
        try:
            return self._plan(mark, wanted, catalog, after)
        except HistoryPruned as error:
            if not self._avoided:
                self.pruned = error
            try:
                return self._plan(mark, wanted, self._stream.listed(wanted.lineage), after)
            except HistoryPruned:
                raise error from None

    def _plan(self, mark: Mark | None, wanted: Manifest, catalog: Catalog, after: int) -> Way:
        if catalog.is_over:
            raise HistoryPruned(
                f"the lineage of version {wanted.version} ended, and nothing of it is kept",
                hint="Choose a newer version",
                version=wanted.version,
            )
        have = mark.link if mark is not None and mark.lineage == wanted.lineage else None
        begin = self._begin(wanted) if have is None else None
        while True:
            options = self._options(catalog, begin, wanted, after)
            route = plan_route(None if have is None else have.version, wanted.version, options)
            try:
                legs = self._resolve(route, begin, have, wanted)
            except _Unusable as unusable:
                hop = unusable.hop
                self._avoided.add((hop.kind, hop.base, hop.version))
                continue
            if not legs:
                raise gap(wanted.version)
            begins = legs[0][0].target if have is None else have
            return Way(begins.version, self._expand(legs))

    def _resolve(
        self,
        route: list[Hop],
        begin: Manifest | None,
        have: Link | None,
        wanted: Manifest,
    ) -> list[tuple[Step, Step]]:
        """The first and the last step of each hop, read, and linked to the hop before."""
        url, lineage = self._stream.url, wanted.lineage
        legs: list[tuple[Step, Step]] = []
        at = have
        for hop, before in zip(route, [None, *route], strict=False):
            if hop.kind == "merge":
                step = self._merge_step(hop, lineage)
                leg = (step, step)
            elif hop.kind == "anchor":
                step = self._anchor_step(hop, begin, wanted)
                leg = (step, step)
            else:
                last = wanted
                if hop.version != wanted.version:
                    last = self._manifest(lineage, hop.version)
                first = last
                if hop.base + 1 != hop.version:
                    first = self._manifest(lineage, hop.base + 1)
                leg = (step_of_version(first, url), step_of_version(last, url))
            if leg[0].base is not None and leg[0].base != at:
                raise _blame(hop if hop.kind == "merge" else before, leg[0])
            at = leg[1].target
            legs.append(leg)
        if legs and at != link_of(wanted):
            raise _blame(route[-1], legs[-1][1])
        return legs

    def _expand(self, legs: list[tuple[Step, Step]]) -> Iterator[Step]:
        """Every step, those in the middle of a run read and checked as they come."""
        for first, last in legs:
            yield first
            at = first.target
            for version in range(first.target.version + 1, last.target.version):
                manifest = self._manifest(first.lineage, version)
                step = step_of_version(manifest, self._stream.url)
                check_chain([step], at, None)
                at = step.target
                yield step
            if last.target != first.target:
                check_chain([last], at, None)
                yield last

    def _begin(self, wanted: Manifest) -> Manifest | None:
        if wanted.version == wanted.first:
            return wanted
        return self._stream.manifest(wanted.lineage, wanted.first)

    def _options(
        self, catalog: Catalog, begin: Manifest | None, wanted: Manifest, after: int
    ) -> Options:
        anchors = {hint.version: hint.size for hint in catalog.anchors}
        if begin is not None:
            self._add_begin(anchors, begin, catalog.steps_from)
        merges = {(merge.base, merge.version): merge.size for merge in catalog.merges}
        avoided = self._avoided
        return Options(
            anchors={
                version: size
                for version, size in anchors.items()
                if version > after
                and not {("anchor", 0, version), ("reference", 0, version)} & avoided
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

    def _manifest(self, lineage: str, version: int) -> Manifest:
        found = self._stream.manifest(lineage, version)
        if found is None or found.kind == "end":
            raise VersionGap(
                f"version {version} is missing in {self._stream.url}, though later ones are there",
                hint="Someone removed its manifest; `thinwire fsck` shows what else",
                version=version,
            )
        return found

    def _merge_step(self, hop: Hop, lineage: str) -> Step:
        try:
            merge = self._stream.merge(lineage, hop.base, hop.version)
        except (FormatError, StreamError):
            raise _Unusable(hop) from None
        if merge is None:
            raise _Unusable(hop)
        return step_of_merge(merge, self._stream.url)

    def _anchor_step(self, hop: Hop, begin: Manifest | None, wanted: Manifest) -> Step:
        url = self._stream.url
        if begin is not None and hop.version == begin.version:
            return step_of_version(begin, url)
        try:
            anchor = self._stream.anchor(wanted.lineage, hop.version)
            if anchor is not None:
                return step_of_anchor(anchor, url)
            manifest = self._manifest(wanted.lineage, hop.version)
        except (FormatError, StreamError):
            raise _Unusable(hop) from None
        if manifest.kind != "anchor":
            raise _Unusable(hop)
        return step_of_version(manifest, url)


class _Unusable(Exception):
    """What a hint named is not there, or does not fit."""

    def __init__(self, hop: Hop) -> None:
        super().__init__()
        self.hop = hop


def _blame(hop: Hop | None, step: Step) -> _Unusable | VersionGap:
    """A merged delta or an anchor is at fault, if there is one; else the chain itself is."""
    if hop is not None and hop.kind != "steps":
        return _Unusable(hop)
    return gap(step.target.version)
