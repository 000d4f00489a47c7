"""One step of a route: what to fetch, what it starts from, what it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from thinwire.checkpoint.file_names import first_clash, name_fault
from thinwire.codec.container import Head, digests_of
from thinwire.codec.delta_set import DeltaSet
from thinwire.errors import ChecksumMismatch, Corrupt, VersionGap
from thinwire.follow.fetch import Wanted
from thinwire.stream import keys
from thinwire.stream.blocks import ObjectRecord
from thinwire.stream.encoding import digest_of_record
from thinwire.stream.records import Anchor, FileRecord, Link, Manifest, Merge
from thinwire.stream.weights import LayoutRow, TensorRow, layout_digest, weights_digest


class Step(NamedTuple):
    """A step of a route, its key and digests known.

    Attributes:
        kind: What it is; a "reference" is applied to a local copy of its source.
        lineage: Its lineage.
        base: The version it must be applied to; None: it needs none.
        target: The version that it makes.
        weights: The digest of that version's tensors.
        layout: The digest of everything else in its folder.
        shards: The shards of a delta, or of a reference.
        files: The files of an anchor, by name.
        manifest: The target's manifest, where it was read.
    """

    kind: Literal["anchor", "reference", "delta", "merge"]
    lineage: str
    base: Link | None
    target: Link
    weights: str
    layout: str
    shards: list[Wanted]
    files: Mapping[str, Wanted]
    manifest: Manifest | None

    @property
    def payload_bytes(self) -> int:
        """What there is to fetch."""
        parts = [*self.shards, *self.files.values()]
        return sum(wanted.record.size for wanted in parts)


def step_of_version(manifest: Manifest, url: str) -> Step:
    """The step that a version's own manifest describes."""
    assert manifest.kind != "end"
    version, lineage = manifest.version, manifest.lineage
    base = manifest.base if manifest.kind == "delta" else None
    start = version if base is None else base.version
    return Step(
        manifest.kind,
        lineage,
        base,
        Link(version, digest_of_record(manifest)),
        manifest.weights,
        manifest.layout,
        _shards(lineage, start, version, manifest.session, manifest.shards, url),
        _files(lineage, version, manifest.session, manifest.files, url),
        manifest,
    )


def step_of_merge(merge: Merge, url: str) -> Step:
    """The step of a merged delta."""
    base, target = merge.base, merge.target
    shards = _shards(merge.lineage, base.version, target.version, merge.session, merge.shards, url)
    return Step("merge", merge.lineage, base, target, merge.weights, merge.layout, shards, {}, None)


def step_of_anchor(anchor: Anchor, url: str) -> Step:
    """The step of an anchor made later on."""
    version = anchor.target.version
    files = _files(anchor.lineage, version, anchor.session, anchor.files, url)
    target = anchor.target
    return Step(
        "anchor", anchor.lineage, None, target, anchor.weights, anchor.layout, [], files, None
    )


def check_chain(steps: Iterable[Step], have: Link | None, target: Link | None) -> None:
    """Raise unless each step starts where the one before ends, and the last ends at ``target``.

    Raises:
        VersionGap: The chain of manifests is broken: history was changed.
    """
    at = have
    for step in steps:
        if step.base is not None and step.base != at:
            raise gap(step.target.version)
        at = step.target
    if target is not None and at != target:
        raise gap(target.version)


def gap(version: int) -> VersionGap:
    """The error for a version that does not follow what is known."""
    return VersionGap(
        f"version {version} does not follow the version before it that is known here",
        hint="The stream's history was changed; `thinwire fsck` says where. To take what the "
        "stream says now, use reset=True (--reset) or an empty folder",
        version=version,
    )


def check_record(step: Step, manifest: Manifest) -> None:
    """Raise unless a merged delta or an anchor claims what its target's manifest says.

    Raises:
        ChecksumMismatch: It claims to make something else.
    """
    if (step.weights, step.layout) != (manifest.weights, manifest.layout):
        raise ChecksumMismatch(
            f"the {step.kind} to version {step.target.version} claims other weights or files than "
            "the version's manifest",
            hint="`thinwire fsck` shows what is wrong with the stream",
            version=step.target.version,
        )


class Outcome(NamedTuple):
    """What a delta says of itself: the weights before and after it, and the new layout.

    ``old`` is empty where a tensor is carried in full: nothing is said of what it replaces.
    """

    old: str
    weights: str
    layout: str

    @classmethod
    def of_delta(cls, delta: DeltaSet) -> Outcome:
        """That of an opened delta, whole."""
        tensors = [
            (e.name, e.dtype, list(e.shape), e.base_digest, e.new_digest)
            for e in delta.tensors.values()
        ]
        files = [(a.name, a.kind, a.size, a.digest) for a in delta.attachments]
        return cls.of_rows(tensors, files)

    @classmethod
    def of_heads(cls, heads: Iterable[Head]) -> Outcome:
        """That of deltas of which only the head is there."""
        tensors = []
        files = []
        for head in heads:
            at = 0
            for tensor in head.index.tensors:
                digests = head.digests[at : at + digests_of(tensor.kind)]
                at += len(digests)
                old = None if tensor.kind == "full" else digests[0]
                new = None if tensor.kind == "removed" else digests[-1]
                tensors.append((tensor.name, tensor.dtype, tensor.shape, old, new))
            for file, digest in zip(head.index.attachments, head.digests[at:], strict=True):
                files.append((file.name, file.kind, file.size, digest))
        return cls.of_rows(tensors, files)

    @classmethod
    def of_rows(
        cls,
        tensors: Iterable[tuple[str, str, list[int], int | None, int | None]],
        files: Iterable[tuple[str, str, int, int]],
    ) -> Outcome:
        """That of tensors (name, dtype, shape, digests before and after) and files."""
        old: list[TensorRow] = []
        new: list[TensorRow] = []
        is_known = True
        for name, dtype, shape, before, after in tensors:
            is_known &= before is not None
            for found, digest in ((old, before), (new, after)):
                if digest is not None:
                    found.append((name, dtype, shape, f"{digest:016x}"))
        layout: list[LayoutRow] = [
            (name, kind, size, f"{digest:016x}")
            for name, kind, size, digest in files
            if kind != "removed"
        ]
        old_digest = weights_digest(old) if is_known else ""
        return cls(old_digest, weights_digest(new), layout_digest(layout))

    def starts_from(self, weights: str) -> bool:
        """Whether it may have been made from these weights."""
        return self.old in ("", weights)


def check_outcome(outcome: Outcome, step: Step, base_weights: str | None) -> None:
    """Raise unless a delta leads from the base's weights to what the manifest says.

    Raises:
        ChecksumMismatch: It belongs to other weights.
    """
    if base_weights is not None and not outcome.starts_from(base_weights):
        fault = "starts from other weights than those before it"
    elif outcome.weights != step.weights:
        fault = "makes other weights than its manifest says"
    elif outcome.layout != step.layout:
        fault = "makes other files than its manifest says"
    else:
        return
    raise ChecksumMismatch(
        f"the delta to version {step.target.version} {fault}",
        hint="`thinwire fsck` shows what is wrong with the stream",
        version=step.target.version,
    )


def _shards(
    lineage: str,
    base: int,
    version: int,
    session: str,
    records: list[ObjectRecord],
    url: str,
) -> list[Wanted]:
    wanted = []
    for number, record in enumerate(records):
        key = keys.shard(lineage, base, version, session, number, record.digest)
        wanted.append(Wanted(key, record, f"{url}/{key}"))
    return wanted


def _files(
    lineage: str, version: int, session: str, records: list[FileRecord], url: str
) -> dict[str, Wanted]:
    for record in records:
        if fault := name_fault(record.name):
            raise Corrupt(f"anchor {version}: the file name {record.name[:80]!r} {fault}")
    if clash := first_clash(record.name for record in records):
        raise Corrupt(f"anchor {version}: the names {clash[0]!r} and {clash[1]!r} are one")
    wanted = {}
    for record in records:
        key = keys.anchor_file(lineage, version, session, record.name)
        wanted[record.name] = Wanted(key, record, f"{url}/{key}")
    return wanted
