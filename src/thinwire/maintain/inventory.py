"""What a lineage has besides its step deltas, and the catalog that tells followers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from thinwire.errors import NotFound
from thinwire.follow import Stream
from thinwire.stream import keys
from thinwire.stream.encoding import seal
from thinwire.stream.records import (
    FORMAT,
    Anchor,
    AnchorHint,
    Catalog,
    Manifest,
    MergeHint,
    Retired,
)
from thinwire.stream.routes import Options


@dataclass
class Inventory:
    """A lineage's merged deltas and anchors.

    Attributes:
        begin: The lineage's first version.
        merges: Bytes of each merged delta by (base, version).
        anchors: The anchors made later on, by version.
        has_first_anchor: Whether the first version's own files are still to be used.
        steps_from: Step deltas of later versions are there.
        retired: What was dropped and may still be in use.
        is_over: Nothing of the lineage is kept.
    """

    begin: Manifest
    merges: dict[tuple[int, int], int]
    anchors: dict[int, Anchor]
    has_first_anchor: bool
    steps_from: int
    retired: list[Retired]
    is_over: bool

    @classmethod
    def load(cls, stream: Stream, lineage: str, first: int) -> Inventory:
        """Read it: what the catalog says, and what a listing shows besides.

        A listing may miss something, and so may the catalog; nothing is removed on their word.

        Raises:
            NotFound: The lineage has no first version.
        """
        begin = stream.manifest(lineage, first)
        if begin is None or begin.kind == "end":
            raise NotFound(f"lineage {lineage} of {stream.url} has no first version")
        catalog = stream.catalog(lineage)
        sizes = {(merge.base, merge.version): merge.size for merge in catalog.merges}
        merges = {}
        # Only what is there: the catalog may still, or again, name what was removed.
        for pair in stream.listed_merges(lineage):
            if pair not in sizes:
                found = stream.merge(lineage, *pair)
                if found is None:
                    continue
                sizes[pair] = found.payload_bytes
            merges[pair] = sizes[pair]
        versions_listed = {hint.version for hint in catalog.anchors} - {first}
        is_first_listed = any(hint.version == first for hint in catalog.anchors)
        anchors = {}
        for version in sorted(versions_listed | set(stream.listed_anchors(lineage))):
            anchor = stream.anchor(lineage, version)
            if anchor is not None:
                anchors[version] = anchor
        return cls(
            begin,
            merges,
            anchors,
            begin.kind == "anchor" and (catalog.steps_from <= first or is_first_listed),
            max(first, catalog.steps_from),
            list(catalog.retired),
            catalog.is_over,
        )

    def options(self, step_bytes: int) -> Options:
        """What a way may go by. The copies of a first version by reference count as an anchor."""
        anchors = self.anchor_sizes()
        if not anchors and self.begin.kind == "reference":
            anchors = {self.begin.version: self.begin.payload_bytes}
        return Options(anchors, dict(self.merges), self.steps_from, step_bytes)

    def anchor_sizes(self) -> dict[int, int]:
        """Bytes of each anchor by version."""
        sizes = {version: anchor.payload_bytes for version, anchor in self.anchors.items()}
        if self.has_first_anchor:
            sizes[self.begin.version] = self.begin.payload_bytes
        return sizes

    def catalog(self) -> Catalog:
        """What followers are told."""
        return Catalog(
            format=FORMAT,
            type=Catalog.TYPE,
            stream=self.begin.stream,
            created_ms=time.time_ns() // 1_000_000,
            lineage=self.begin.lineage,
            steps_from=self.steps_from,
            merges=[MergeHint(*pair, size) for pair, size in sorted(self.merges.items())],
            anchors=[AnchorHint(v, size) for v, size in sorted(self.anchor_sizes().items())],
            retired=self.retired,
            is_over=self.is_over,
        )

    def retired_merges(self) -> list[tuple[int, int]]:
        """The merged deltas that were dropped lately."""
        return [(entry.base, entry.version) for entry in self.retired if entry.kind == "merge"]

    def publish(self, stream: Stream, forget_before_ms: int = 0) -> None:
        """Write the catalog, if it says anything new, heeding what another maintainer dropped.

        Args:
            stream: The stream.
            forget_before_ms: What was dropped before is not mentioned any more.

        Raises:
            Unavailable: The stream is gone meanwhile: its store is away.
        """
        now = stream.catalog(self.begin.lineage)
        self._heed(now)
        self.retired = [entry for entry in self.retired if entry.at_ms > forget_before_ms]
        catalog = self.catalog()
        same: dict[str, Any] = {"created_ms": 0, "signer": "", "signature": ""}
        signer = "" if stream.signing_key is None else stream.signing_key.public
        is_new = msgspec.structs.replace(catalog, **same) != msgspec.structs.replace(now, **same)
        if is_new or signer != now.signer:
            stream.check_there()
            _, data = seal(catalog, stream.signing_key)
            stream.store.put(keys.catalog(catalog.lineage), data)

    def _heed(self, now: Catalog) -> None:
        ours = {(entry.kind, entry.base, entry.version) for entry in self.retired}
        for entry in now.retired:
            if (entry.kind, entry.base, entry.version) in ours:
                continue
            self.retired.append(entry)
            if entry.kind == "merge":
                self.merges.pop((entry.base, entry.version), None)
            elif entry.kind == "anchor":
                self.anchors.pop(entry.version, None)
                self.has_first_anchor &= entry.version != self.begin.version
        self.steps_from = max(self.steps_from, now.steps_from)
        self.is_over |= now.is_over
