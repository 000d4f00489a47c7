"""What the JSON objects of a stream hold. docs/stream.md is the full description.

Every record has one encoding: keys sorted, no blanks, defaults left out. A reader refuses another,
so that a digest or a signature is over the content and not over a way to write it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from thinwire.stream.blocks import ObjectRecord

FORMAT = 1
# A follower's lease counts for so long after it was written.
LEASE_TTL_S = 1800

VersionKind = Literal["anchor", "reference", "delta", "end"]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream is looked after; chosen when it is created. Written with every field.

    Attributes:
        anchor_every: Versions between anchors; 0: when the deltas since the last one cost more to
            fetch than an anchor.
        merge_levels: How many versions merged deltas span, rising, each a multiple of the one
            before.
        keep_versions: How many of the newest versions stay reachable.
        keep_age_s: Versions younger than this stay reachable too.
        grace_s: How old an unreferenced object must be before it is removed: longer than any
            upload or fetch takes.
        accept_new_lineages: Whether followers go along when the stream restarts from older weights.
    """

    anchor_every: int = 0
    merge_levels: tuple[int, ...] = (4, 16, 64, 256, 1024)
    keep_versions: int = 1000
    keep_age_s: int = 86_400
    grace_s: int = 3_600
    accept_new_lineages: bool = False

    def __post_init__(self) -> None:
        """Take a list of levels too."""
        msgspec.structs.force_setattr(self, "merge_levels", tuple(self.merge_levels))


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version and the digest of its manifest's bytes."""

    version: int
    manifest: str


class FileRecord(ObjectRecord, frozen=True, forbid_unknown_fields=True):
    """A file of an anchor."""

    name: str


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where both sides have the first version from: a Hugging Face model, or any folder."""

    kind: Literal["huggingface", "folder"]
    name: str
    revision: str = ""


class Signed(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """What all signed records share."""

    TYPE: ClassVar[str]

    format: int
    type: str
    stream: str
    created_ms: int
    signer: str = ""
    signature: str = ""


class StreamRecord(Signed, frozen=True, kw_only=True):
    """``stream.json``: what makes a stream exist. ``lineage`` is its first one."""

    TYPE = "stream"

    lineage: str
    policy: Policy
    model: str = ""


class Manifest(Signed, frozen=True, kw_only=True):
    """What makes a version exist.

    Attributes:
        kind: "anchor": ``files`` hold all weights. "reference": the weights are those of
            ``source``, and ``shards`` say what they must be. "delta": ``shards`` turn ``base``
            into it. "end": no version; the lineage ends here and goes on in ``successor``.
        lineage: The lineage.
        first: The lineage's first version.
        version: This version.
        session: Random id of the publisher's run; part of the keys of its shards.
        base: The version before. For a first version, the "end" of the lineage it follows.
        previous: For a first version: the lineage it follows, if any.
        weights: The digest of all tensors.
        layout: The digest of the headers of weights files and of all other files.
        content: For a version by reference: BLAKE3 over the BLAKE3 of every tensor.
    """

    TYPE = "version"

    kind: VersionKind
    lineage: str
    first: int
    version: int
    session: str
    base: Link | None = None
    previous: str = ""
    step: int | None = None
    weights: str = ""
    layout: str = ""
    raw_bytes: int = 0
    word_count: int = 0
    changed_count: int = 0
    shards: list[ObjectRecord] = []
    files: list[FileRecord] = []
    source: Source | None = None
    content: str = ""
    successor: str = ""
    metadata: dict[str, Any] = {}

    @property
    def payload_bytes(self) -> int:
        """Bytes of its shards or files."""
        return sum(part.size for part in (*self.shards, *self.files))


class Merge(Signed, frozen=True, kw_only=True):
    """A merged delta: from ``base`` to ``target`` in one go."""

    TYPE = "merge"

    lineage: str
    session: str
    base: Link
    target: Link
    weights: str
    layout: str
    shards: list[ObjectRecord]

    @property
    def payload_bytes(self) -> int:
        """Bytes of its shards."""
        return sum(part.size for part in self.shards)


class Anchor(Signed, frozen=True, kw_only=True):
    """An anchor that was made after its version was published."""

    TYPE = "anchor"

    lineage: str
    session: str
    target: Link
    weights: str
    layout: str
    files: list[FileRecord]

    @property
    def payload_bytes(self) -> int:
        """Bytes of its files."""
        return sum(part.size for part in self.files)


class MergeHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A merged delta in the catalog."""

    base: int
    version: int
    size: int


class AnchorHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An anchor in the catalog."""

    version: int
    size: int


class Retired(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was dropped, and when: its objects stay for a while, for those who are fetching them.

    For "steps", ``base`` and ``version`` say which versions' step deltas: after, and up to.
    """

    kind: Literal["merge", "anchor", "steps"]
    base: int
    version: int
    at_ms: int


class Catalog(Signed, frozen=True, kw_only=True):
    """``catalog.json``: what a joiner may use besides the step deltas. It may be out of date.

    Attributes:
        lineage: The lineage it is of.
        steps_from: Every later version has its step delta; those up to it may be gone.
        merges: The merged deltas.
        anchors: The anchors.
        retired: What is no longer to be used.
        is_over: The lineage ended long ago and nothing of it is kept.
    """

    TYPE = "catalog"

    lineage: str
    steps_from: int = 0
    merges: list[MergeHint] = []
    anchors: list[AnchorHint] = []
    retired: list[Retired] = []
    is_over: bool = False


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``head.json``, a hint: about where the stream is."""

    format: int
    lineage: str
    version: int


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a follower, or a maintainer, says of itself; it ends ``ttl_s`` after it was written."""

    format: int
    holder: str
    lineage: str
    version: int
    ttl_s: int
