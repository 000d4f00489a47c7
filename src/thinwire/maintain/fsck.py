"""Proves a stream whole, or says what is wrong with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.errors import ThinwireError, VersionGap
from thinwire.follow import CheckpointSink, Follower, Stream
from thinwire.follow.fetch import Fetcher, Wanted
from thinwire.follow.reference import local_copy
from thinwire.follow.steps import Step, step_of_anchor, step_of_merge, step_of_version
from thinwire.maintain.inventory import Inventory
from thinwire.stream.encoding import digest_of_record
from thinwire.stream.records import Manifest, Merge


@dataclass(frozen=True)
class Problem:
    """Something that is not what it should be: where, the error's code, and what it says."""

    where: str
    code: str
    message: str


@dataclass
class Report:
    """What :func:`fsck` found.

    Attributes:
        lineage_count: Lineages looked at.
        version_count: Versions whose manifest and place in the chain are right.
        object_count: Shards and files whose bytes are right.
        object_bytes: Their size.
        rebuilt_count: Versions that were rebuilt and are right, with ``deep``.
        problems: What is wrong; empty: the stream is whole.
    """

    lineage_count: int = 0
    version_count: int = 0
    object_count: int = 0
    object_bytes: int = 0
    rebuilt_count: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def fsck(
    stream: Stream,
    *,
    deep: bool = False,
    base: Path | None = None,
    work_dir: Path | None = None,
    on_object: Callable[[str, int], None] | None = None,
) -> Report:
    """Check every manifest, signature, link, shard and file that the stream promises.

    Args:
        stream: The stream; with pinned keys, signatures are checked against them.
        deep: Also rebuild every version, by its step delta and by every merged delta and anchor
            that makes it. Takes room for two copies of the model.
        base: Where a copy of the model is that the stream begins with by reference.
        work_dir: Where to work; None: a temporary folder.
        on_object: Called with the name and size of every object that was read.

    Raises:
        NotFound: There is no such stream; or, with ``deep``, no copy here of what it begins with.
        StoreError: The store cannot be read.
    """
    check = _Check(stream, Report(), on_object)
    with _folder(work_dir) as folder:
        check.folder = folder
        for lineage in check.chain():
            check.objects(lineage)
            if deep:
                check.rebuild(lineage, base)
    return check.report


@dataclass
class _Lineage:
    """A lineage whose chain was checked."""

    versions: dict[int, Manifest]
    inventory: Inventory
    has_ended: bool

    def at(self, version: int) -> Manifest:
        """The manifest of a version.

        Raises:
            VersionGap: It is missing.
        """
        if version not in self.versions:
            raise VersionGap(f"version {version} is missing")
        return self.versions[version]

    @property
    def steps(self) -> list[Manifest]:
        """The versions whose step delta must be there."""
        if self.inventory.is_over:
            return []
        first = self.inventory.begin.version
        return [
            m
            for v, m in self.versions.items()
            if v > max(self.inventory.steps_from, first) or (v == first and self._needs_first)
        ]

    @property
    def _needs_first(self) -> bool:
        return self.inventory.begin.kind == "reference" or self.inventory.has_first_anchor


class _Check:
    def __init__(
        self, stream: Stream, report: Report, on_object: Callable[[str, int], None] | None
    ) -> None:
        self._stream = stream
        self._on_object = on_object
        self._fetcher = Fetcher(stream.store)
        self.report = report
        self.folder = Path()

    def chain(self) -> Iterator[_Lineage]:
        """Walk every manifest from the first lineage on."""
        lineage: str = self._stream.record().lineage
        seen: set[str] = set()
        first, end = 1, None
        while True:
            self.report.lineage_count += 1
            versions: dict[int, Manifest] = {}
            version, last = first, end
            end = None
            while True:
                try:
                    found = self._stream.manifest(lineage, version)
                except ThinwireError as error:
                    if error.retryable:
                        raise
                    self._problem(f"version {version}", error)
                    break
                if found is None:
                    break
                self._check_link(found, last, version == first)
                last = found
                if found.kind == "end":
                    end = found
                    break
                versions[version] = found
                self.report.version_count += 1
                version += 1
            self._check_hole(lineage, version, end)
            if versions:
                with self._noting(f"lineage {lineage}"):
                    inventory = Inventory.load(self._stream, lineage, first)
                    yield _Lineage(versions, inventory, end is not None)
            seen.add(lineage)
            if end is None:
                self._check_reached(seen)
                return
            if end.successor in seen:
                circle = VersionGap(f"the lineage that ends at {end.version} leads back to itself")
                self._problem(f"version {end.version}", circle)
                return
            lineage, first = end.successor, end.version

    def objects(self, lineage: _Lineage) -> None:
        """Read every object that the lineage promises."""
        self._check_promise(lineage)
        for step in self._steps(lineage):
            for wanted in [*step.shards, *step.files.values()]:
                with self._noting(wanted.what):
                    self._read(wanted)

    def _check_promise(self, lineage: _Lineage) -> None:
        """A catalog may have dropped only what the policy does not promise."""
        if lineage.has_ended:
            return
        head = max(lineage.versions)
        oldest = max(head - self._stream.record().policy.keep_versions + 1, min(lineage.versions))
        steps_from = lineage.inventory.steps_from
        if lineage.inventory.is_over or steps_from > oldest:
            error = VersionGap(
                f"the catalog dropped versions up to {steps_from}, of which {oldest}"
                " and later ones are promised"
            )
            self._problem("catalog", error)

    def rebuild(self, lineage: _Lineage, base: Path | None) -> None:
        """Rebuild every version in every way."""
        inventory = lineage.inventory
        if inventory.is_over:
            return
        if inventory.begin.source is not None:
            # That there is no copy here says nothing about the stream.
            local_copy(inventory.begin.source, base)
        with self._copy("steps", base) as follower:
            for manifest in lineage.versions.values():
                if manifest.version < self._reachable_from(lineage):
                    continue
                with self._noting(f"version {manifest.version}"):
                    follower.bring_to(manifest)
                    self._prove(follower, manifest)
                    self.report.rebuilt_count += 1
        levels = sorted({version - begin for begin, version in inventory.merges})
        for level in levels:
            with self._copy(f"merge-{level}", base) as follower:
                for begin, version in sorted(inventory.merges):
                    if version - begin == level:
                        with self._noting(f"merged delta {begin} to {version}"):
                            follower.bring_to(lineage.at(begin))
                            follower.take(
                                step_of_merge(
                                    self._merge(lineage, (begin, version)), self._stream.url
                                ),
                                lineage.at(version),
                            )
        for version, anchor in inventory.anchors.items():
            with self._copy("anchor", base) as follower, self._noting(f"anchor {version}"):
                step = step_of_anchor(anchor, self._stream.url)
                follower.take(step, lineage.at(version))

    def _prove(self, follower: Follower, manifest: Manifest) -> None:
        if not follower.prove():
            raise VersionGap(f"version {manifest.version} was rebuilt with other weights")

    def _reachable_from(self, lineage: _Lineage) -> int:
        inventory = lineage.inventory
        anchors = [*inventory.anchor_sizes()]
        if inventory.begin.kind == "reference":
            anchors.append(inventory.begin.version)
        return max(inventory.steps_from, min(anchors, default=inventory.steps_from))

    def _steps(self, lineage: _Lineage) -> Iterator[Step]:
        url = self._stream.url
        for manifest in lineage.steps:
            with self._noting(f"version {manifest.version}"):
                yield step_of_version(manifest, url)
        if lineage.inventory.is_over:
            return
        for pair in lineage.inventory.merges:
            with self._noting(f"merged delta {pair[0]} to {pair[1]}"):
                merge = self._merge(lineage, pair)
                self._check_ends(lineage, merge.base.version, merge.base.manifest, None)
                self._check_ends(
                    lineage, merge.target.version, merge.target.manifest, merge.weights
                )
                yield step_of_merge(merge, url)
        for version, anchor in lineage.inventory.anchors.items():
            with self._noting(f"anchor {version}"):
                self._check_ends(lineage, version, anchor.target.manifest, anchor.weights)
                yield step_of_anchor(anchor, url)

    def _merge(self, lineage: _Lineage, pair: tuple[int, int]) -> Merge:
        found = self._stream.merge(lineage.inventory.begin.lineage, *pair)
        if found is None:
            raise VersionGap("its manifest is missing")
        return found

    def _check_ends(
        self, lineage: _Lineage, version: int, digest: str, weights: str | None
    ) -> None:
        manifest = lineage.versions.get(version)
        if manifest is None or digest_of_record(manifest) != digest:
            raise VersionGap(f"it names another version {version} than the stream has")
        if weights is not None and manifest.weights != weights:
            raise VersionGap(f"it names other weights for version {version}")

    def _check_link(self, found: Manifest, last: Manifest | None, is_first: bool) -> None:
        if last is None:
            fits = found.base is None
        else:
            fits = found.base is not None and found.base.manifest == digest_of_record(last)
        if is_first and last is not None:
            fits = fits and found.previous == last.lineage
        if not fits:
            error = VersionGap(f"version {found.version} does not follow the manifest before it")
            self._problem(f"version {found.version}", error)

    def _check_hole(self, lineage: str, version: int, end: Manifest | None) -> None:
        """Later manifests than the last one of an unbroken run mean that one is missing."""
        if end is not None:
            return
        head = self._stream.head_hint()
        hinted = head.version if head is not None and head.lineage == lineage else 0
        newest = max(hinted, self._stream.newest_listed(lineage))
        if newest >= version:
            error = VersionGap(f"version {version} is missing, though {newest} was published")
            self._problem(f"version {version}", error)

    def _check_reached(self, seen: set[str]) -> None:
        """A published head in a lineage that no chain leads to means that manifests are missing."""
        head = self._stream.head_hint()
        if head is None or head.lineage in seen:
            return
        if self._stream.manifest(head.lineage, head.version) is not None:
            error = VersionGap(f"no chain of manifests leads to version {head.version}")
            self._problem(f"version {head.version}", error)

    def _read(self, wanted: Wanted) -> None:
        path = self.folder / "object"
        try:
            if self._fetcher.is_small(wanted.record):
                self._fetcher.bytes_of(wanted)
            else:
                self._fetcher.into_file(wanted, path)
        finally:
            path.unlink(missing_ok=True)
        self.report.object_count += 1
        self.report.object_bytes += wanted.record.size
        if self._on_object:
            self._on_object(wanted.what, wanted.record.size)

    @contextmanager
    def _copy(self, name: str, base: Path | None) -> Iterator[Follower]:
        folder = self.folder / name
        with Follower(
            self._stream, CheckpointSink(folder), base=base, accept_new_lineages=True, lease=False
        ) as follower:
            yield follower
        shutil.rmtree(folder)

    @contextmanager
    def _noting(self, where: str) -> Iterator[None]:
        try:
            yield
        except ThinwireError as error:
            # A store that does not answer says nothing about the stream.
            if error.retryable:
                raise
            self._problem(where, error)

    def _problem(self, where: str, error: ThinwireError) -> None:
        self.report.problems.append(Problem(where, error.code, str(error)))


@contextmanager
def _folder(work_dir: Path | None) -> Iterator[Path]:
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="thinwire-fsck-", dir=work_dir) as folder:
        yield Path(folder)
