"""What callers are told of a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.stream.encoding import digest_of_record
from thinwire.stream.records import Manifest, VersionKind


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version of a stream.

    Attributes:
        version: Its number, +1 per publish.
        step: The trainer's step, as it was given.
        lineage: The unbroken run of versions it is of.
        kind: "anchor", "reference" or "delta".
        manifest: The digest of its manifest.
        weights: The digest of all its tensors.
        layout: The digest of everything else in its folder.
        payload_bytes: Bytes that publishing it moved.
        raw_bytes: Bytes of all its tensors.
        word_count: Words of all its tensors.
        changed_count: Words that differ from the version before.
        created_ms: When it was published, Unix milliseconds by the publisher's clock.
        metadata: What the trainer gave along.
        signer: The public key that signed it; empty: nobody.
    """

    version: int
    step: int | None
    lineage: str
    kind: VersionKind
    manifest: str
    weights: str
    layout: str
    payload_bytes: int
    raw_bytes: int
    word_count: int
    changed_count: int
    created_ms: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    signer: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> Version:
        """The version that a manifest describes."""
        return cls(
            version=manifest.version,
            step=manifest.step,
            lineage=manifest.lineage,
            kind=manifest.kind,
            manifest=digest_of_record(manifest),
            weights=manifest.weights,
            layout=manifest.layout,
            payload_bytes=manifest.payload_bytes,
            raw_bytes=manifest.raw_bytes,
            word_count=manifest.word_count,
            changed_count=manifest.changed_count,
            created_ms=manifest.created_ms,
            metadata=manifest.metadata,
            signer=manifest.signer,
        )
