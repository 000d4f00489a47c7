"""Strategies of records as publishers and maintainers write them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from thinwire.stream.blocks import MIN_BLOCK_BYTES, ObjectRecord
from thinwire.stream.keys import MAX_VERSION
from thinwire.stream.records import (
    FORMAT,
    Anchor,
    AnchorHint,
    Catalog,
    FileRecord,
    Head,
    Lease,
    Link,
    Manifest,
    Merge,
    MergeHint,
    Policy,
    Retired,
    Source,
    StreamRecord,
)

HEX = "0123456789abcdef"
IDS = st.text(HEX, min_size=32, max_size=32)
DIGESTS = st.text(HEX, min_size=64, max_size=64)
VERSIONS = st.integers(1, MAX_VERSION - 1)
COUNTS = st.integers(0, 2**48)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
METADATA = st.dictionaries(TEXT, JSON, max_size=3)
LINKS = st.builds(Link, VERSIONS, DIGESTS)


@st.composite
def object_records(draw: st.DrawFn) -> ObjectRecord:
    size = draw(st.integers(0, 4 * MIN_BLOCK_BYTES))
    count = max(1, -(-size // MIN_BLOCK_BYTES))
    blocks = draw(st.lists(DIGESTS, min_size=count, max_size=count))
    return ObjectRecord(size, MIN_BLOCK_BYTES, blocks)


@st.composite
def file_records(draw: st.DrawFn) -> FileRecord:
    record = draw(object_records())
    return FileRecord(record.size, record.block, record.blocks, draw(TEXT))


PARTS = st.lists(object_records(), min_size=1, max_size=3)
FILES = st.lists(file_records(), min_size=1, max_size=3)


def signed(kind: str) -> dict[str, Any]:
    return {
        "format": st.just(FORMAT),
        "type": st.just(kind),
        "stream": IDS,
        "created_ms": st.integers(0, 2**53),
    }


@st.composite
def manifests(draw: st.DrawFn, kind: str | None = None) -> Manifest:
    kind = kind or draw(st.sampled_from(["anchor", "reference", "delta", "end"]))
    is_first = kind in ("anchor", "reference")
    first = draw(VERSIONS)
    version = first if is_first else draw(st.integers(first + 1, MAX_VERSION))
    facts: dict[str, Any] = {name: draw(value) for name, value in signed("version").items()}
    facts |= {"kind": kind, "lineage": draw(IDS), "session": draw(IDS)}
    facts |= {"first": first, "version": version}
    if not is_first:
        facts["base"] = Link(version - 1, draw(DIGESTS))
    elif draw(st.booleans()):
        facts |= {"base": Link(version, draw(DIGESTS)), "previous": draw(IDS)}
    if kind == "end":
        successor = draw(IDS.filter(lambda other: other != facts["lineage"]))
        return Manifest(**facts, successor=successor)
    facts |= {
        "step": draw(st.none() | st.integers(1 - 2**62, 2**62 - 1)),
        "weights": draw(DIGESTS),
        "layout": draw(DIGESTS),
        "raw_bytes": draw(COUNTS),
        "word_count": draw(COUNTS),
        "changed_count": draw(COUNTS),
        "metadata": draw(METADATA),
    }
    if kind == "anchor":
        facts["files"] = draw(FILES)
    else:
        facts["shards"] = draw(PARTS)
    if kind == "reference":
        name, revision = draw(PRINTABLE), draw(PRINTABLE)
        source = Source(draw(st.sampled_from(["huggingface", "folder"])), name, revision)
        facts |= {"source": source, "content": draw(DIGESTS)}
    return Manifest(**facts)


@st.composite
def merges(draw: st.DrawFn) -> Merge:
    facts = {name: draw(value) for name, value in signed("merge").items()}
    base = draw(VERSIONS)
    target = draw(st.integers(base + 1, MAX_VERSION))
    return Merge(
        **facts,
        lineage=draw(IDS),
        session=draw(IDS),
        base=Link(base, draw(DIGESTS)),
        target=Link(target, draw(DIGESTS)),
        weights=draw(DIGESTS),
        layout=draw(DIGESTS),
        shards=draw(PARTS),
    )


POLICIES = st.builds(
    Policy,
    anchor_every=st.integers(0, 10**6),
    merge_levels=st.sampled_from([[], [2], [4, 16, 64, 256, 1024], [3, 9, 18]]),
    keep_versions=st.integers(0, MAX_VERSION),
    keep_age_s=st.integers(0, MAX_VERSION),
    grace_s=st.integers(0, MAX_VERSION),
    accept_new_lineages=st.booleans(),
)
STREAM_RECORDS = st.builds(
    StreamRecord, **signed("stream"), lineage=IDS, model=TEXT, policy=POLICIES
)
ANCHORS = st.builds(
    Anchor,
    **signed("anchor"),
    lineage=IDS,
    session=IDS,
    target=LINKS,
    weights=DIGESTS,
    layout=DIGESTS,
    files=FILES,
)
MERGE_HINTS = VERSIONS.flatmap(
    lambda base: st.builds(MergeHint, st.just(base), st.integers(base + 1, MAX_VERSION), COUNTS)
)
RETIRED = VERSIONS.flatmap(
    lambda base: st.builds(
        Retired,
        st.sampled_from(["merge", "anchor", "steps"]),
        st.just(base),
        st.integers(base, MAX_VERSION),
        COUNTS,
    )
)
CATALOGS = st.builds(
    Catalog,
    **signed("catalog"),
    lineage=IDS,
    steps_from=st.integers(0, MAX_VERSION),
    merges=st.lists(MERGE_HINTS, max_size=2),
    anchors=st.lists(st.builds(AnchorHint, VERSIONS, COUNTS), max_size=2),
    retired=st.lists(RETIRED, max_size=2),
    is_over=st.booleans(),
)
SIGNED = st.one_of(manifests(), merges(), STREAM_RECORDS, ANCHORS, CATALOGS)
HINTS = st.one_of(
    st.builds(Head, st.just(FORMAT), IDS, VERSIONS),
    st.builds(Lease, st.just(FORMAT), IDS, IDS, VERSIONS, st.integers(0, 10**6)),
)
