"""What lies at a key: the layout of a stream read backwards, for those who are asked by key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from thinwire.stream import keys
from thinwire.stream.blocks import ObjectRecord
from thinwire.stream.records import Anchor, Manifest, Merge

PlaceKind = Literal[
    "stream", "head", "catalog", "manifest", "merge", "anchor", "shard", "file", "lease"
]
# What may be written again at its key.
HINTS: frozenset[PlaceKind] = frozenset({"stream", "head", "catalog"})
# What maintainers may delete, and make again otherwise.
REMADE: frozenset[PlaceKind] = frozenset({"merge", "anchor"})
# What holds weights; all else are records.
DATA: frozenset[PlaceKind] = frozenset({"shard", "file"})

_SHARD = re.compile(r"[0-9a-f]{16}-[0-9]{4}-[0-9a-f]{32}\.tw")
_SESSION = re.compile(r"[0-9a-f]{16}")
_JSON = ".json"


class Place(NamedTuple):
    """What a key names.

    Attributes:
        kind: What lies there.
        key: The key.
        lineage: Its lineage, or "".
        base: Of a merge or a shard: the version it starts from.
        version: The version, or 0.
        holder: Of a lease: who holds it.
    """

    kind: PlaceKind
    key: str
    lineage: str = ""
    base: int = 0
    version: int = 0
    holder: str = ""


def place_of(key: str) -> Place | None:
    """What lies at a key of a stream; None: nothing that followers read or write."""
    if key == keys.STREAM:
        return Place("stream", key)
    if key == keys.HEAD:
        return Place("head", key)
    lineage, _, rest = key.partition("/")
    if lineage == keys.LEASES[:-1]:
        return _lease(key, rest)
    if not keys.is_lineage(lineage):
        return None
    if rest == "catalog.json":
        return Place("catalog", key, lineage)
    folder, _, name = rest.partition("/")
    if folder == "manifests":
        return _versioned("manifest", key, lineage, name)
    if folder == "merges":
        versions = keys.versions_of(name.removesuffix(_JSON)) if name.endswith(_JSON) else None
        return None if versions is None else Place("merge", key, lineage, *versions)
    if folder == "deltas":
        return _shard(key, lineage, name)
    if folder == "anchors":
        if "/" not in name:
            return _versioned("anchor", key, lineage, name)
        return _file(key, lineage, name)
    return None


def record_keys(place: Place) -> list[str]:
    """The keys of the records of which one names what lies at a place; the likelier first."""
    lineage, version = place.lineage, place.version
    if place.kind == "shard":
        named = [keys.merge(lineage, place.base, version)] if version > place.base else []
        is_step = version - place.base <= 1
        return [keys.manifest(lineage, version), *named] if is_step else named
    if place.kind == "file":
        return [keys.manifest(lineage, version), keys.anchor(lineage, version)]
    return []


def objects_of(record: Manifest | Merge | Anchor) -> Mapping[str, ObjectRecord]:
    """The objects that a record names, by their keys."""
    lineage, session = record.lineage, record.session
    found: dict[str, ObjectRecord] = {}
    if isinstance(record, Merge):
        base, version = record.base.version, record.target.version
    elif isinstance(record, Anchor):
        base = version = record.target.version
    else:
        version = record.version
        base = record.base.version if record.kind == "delta" and record.base else version
    if not isinstance(record, Anchor):
        for number, shard in enumerate(record.shards):
            found[keys.shard(lineage, base, version, session, number, shard.digest)] = shard
    if not isinstance(record, Merge):
        for file in record.files:
            found[keys.anchor_file(lineage, version, session, file.name)] = file
    return found


def _versioned(kind: PlaceKind, key: str, lineage: str, name: str) -> Place | None:
    version = keys.version_of(name.removesuffix(_JSON)) if name.endswith(_JSON) else None
    return None if version is None else Place(kind, key, lineage, version=version)


def _shard(key: str, lineage: str, name: str) -> Place | None:
    folder, _, shard = name.partition("/")
    versions = keys.versions_of(folder)
    if versions is None or _SHARD.fullmatch(shard) is None:
        return None
    return Place("shard", key, lineage, *versions)


def _file(key: str, lineage: str, name: str) -> Place | None:
    folder, _, file_name = name.partition("/")
    number, _, session = folder.partition("-")
    version = keys.version_of(number)
    if version is None or _SESSION.fullmatch(session) is None or not file_name:
        return None
    return Place("file", key, lineage, version=version)


def _lease(key: str, name: str) -> Place | None:
    number, _, holder = name.removesuffix(_JSON).partition("-")
    version = keys.version_of(number)
    if version is None or not name.endswith(_JSON) or not keys.is_lineage(holder):
        return None
    return Place("lease", key, version=version, holder=holder)
