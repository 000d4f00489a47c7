"""What a version is made of: objects, their sizes, what it takes to put and get them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from thinwire.capacity import tables
from thinwire.capacity.scenario import Scenario
from thinwire.publish.source import FILE_BYTES
from thinwire.publish.units import CONTAINER_RAW_BYTES, MAX_CONTAINERS
from thinwire.stream.blocks import ObjectRecord, block_bytes_for
from thinwire.stream.encoding import encode
from thinwire.stream.records import FORMAT, FileRecord, Link, Manifest

# As follow/fetch.py, store/object_store.py and maintain/upload.py have them;
# tests/capacity/test_constants.py compares.
RANGE_BYTES = 8 << 20
FETCHES_AT_ONCE = 16
PART_BYTES = 8 << 20
MAX_PARTS = 9_000
PARTS_AT_ONCE = 8
FILES_AT_ONCE = 4
# What S3 takes: one PUT, one object, one part, and the parts of an object.
S3_PUT_BYTES = 5 << 30
S3_OBJECT_BYTES = 5 << 40
S3_PART_BYTES = 5 << 30
S3_PARTS = 10_000

_ID = "0" * 32
_DIGEST = "0" * 64


@dataclass(frozen=True)
class Objects:
    """Some objects of one size.

    Attributes:
        count: How many.
        size: Bytes of each.
    """

    count: int
    size: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all."""
        return self.count * self.size

    @property
    def puts(self) -> int:
        """Requests that upload them: a large one goes in parts, with two requests more."""
        part = part_bytes(self.size)
        each = 1 if self.size <= part else -(-self.size // part) + 2
        return self.count * each

    def gets(self, memory_bytes: int) -> int:
        """Requests that fetch them."""
        return self.count * gets_of(self.size, memory_bytes)


@dataclass(frozen=True)
class Payload:
    """A version as objects.

    Attributes:
        delta: Its shards.
        delta_manifest_bytes: The manifest that names them.
        anchor: The weights files of all weights.
        anchor_manifest_bytes: The manifest that names those.
        bits_per_change: Of the shards, for each changed weight.
        bits_source: Where that comes from.
    """

    delta: Objects
    delta_manifest_bytes: int
    anchor: Objects
    anchor_manifest_bytes: int
    bits_per_change: float
    bits_source: str


def payload_of(scenario: Scenario) -> Payload:
    """The objects of a step delta and of an anchor."""
    bits, source = scenario.bits_per_change, "given"
    if not bits:
        bits = tables.between(tables.BITS_PER_CHANGE, scenario.changed)
        source = "docs/changes.md, docs/benchmarks.md: measured on BF16, between the nearest shares"
    delta = objects_of(scenario, int(scenario.changed_count * bits / 8))
    containers = container_count(scenario)
    files = containers * math.ceil(math.ceil(scenario.raw_bytes / containers) / FILE_BYTES)
    anchor = Objects(files, -(-scenario.raw_bytes // files))
    return Payload(
        delta,
        manifest_bytes(delta.count, delta.size, is_anchor=False, is_signed=scenario.is_signed),
        anchor,
        manifest_bytes(files, anchor.size, is_anchor=True, is_signed=scenario.is_signed),
        bits,
        source,
    )


def container_count(scenario: Scenario) -> int:
    """Shards of a step delta: a few ranks assemble them, none of much more than
    32 GiB of weights."""
    if scenario.ranks == 1:
        return max(1, -(-scenario.raw_bytes // scenario.shard_raw_bytes))
    count = max(min(scenario.ranks, MAX_CONTAINERS), -(-scenario.raw_bytes // CONTAINER_RAW_BYTES))
    return max(1, min(count, scenario.tensors))


def objects_of(scenario: Scenario, total_bytes: int) -> Objects:
    """A delta of so many bytes in its shards."""
    count = container_count(scenario)
    return Objects(count, max(1, -(-total_bytes // count)))


def gets_of(size: int, memory_bytes: int) -> int:
    """Requests that fetch an object whole: one, or ranges of whole blocks of about 8 MiB."""
    if size <= min(RANGE_BYTES, memory_bytes // 4):
        return 1
    block = block_bytes_for(size)
    return math.ceil(math.ceil(size / block) / max(1, RANGE_BYTES // block))


def range_bytes(size: int) -> int:
    """Bytes of such a range."""
    block = block_bytes_for(size)
    return min(size, max(1, RANGE_BYTES // block) * block)


def fetches_at_once(size: int, memory_bytes: int) -> int:
    """Ranges of an object that are on their way at a time."""
    largest = range_bytes(size)
    return max(1, min(FETCHES_AT_ONCE, -(-size // largest), memory_bytes // (8 * largest)))


def windowed(bytes_per_s: float, at_once: int, each_bytes: int, rtt_s: float) -> float:
    """Bytes a second of requests that each wait a round trip, some of them at a time."""
    cycle_s = rtt_s + each_bytes / bytes_per_s
    return min(bytes_per_s, at_once * each_bytes / cycle_s)


def part_bytes(size: int) -> int:
    """Bytes of a part of an upload."""
    return max(PART_BYTES, -(-size // MAX_PARTS))


@lru_cache(maxsize=64)
def manifest_bytes(count: int, size: int, *, is_anchor: bool, is_signed: bool) -> int:
    """Bytes of the manifest of a version of ``count`` objects: one is made and encoded."""
    block = block_bytes_for(size)
    digests = [_DIGEST] * max(1, -(-size // block))
    shards: list[ObjectRecord] = []
    files: list[FileRecord] = []
    for number in range(count):
        if is_anchor:
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            files.append(FileRecord(size=size, block=block, blocks=digests, name=name))
        else:
            shards.append(ObjectRecord(size, block, digests))
    made = Manifest(
        format=FORMAT,
        type=Manifest.TYPE,
        stream=_ID,
        created_ms=1_800_000_000_000,
        signer=_DIGEST if is_signed else "",
        signature=_DIGEST * 2 if is_signed else "",
        kind="anchor" if is_anchor else "delta",
        lineage=_ID,
        first=1,
        version=1 if is_anchor else 1000,
        session=_ID,
        base=None if is_anchor else Link(999, _DIGEST),
        step=1000,
        weights=_DIGEST,
        layout=_DIGEST,
        raw_bytes=size * count,
        word_count=size * count,
        changed_count=0 if is_anchor else size * count,
        shards=shards,
        files=files,
    )
    return len(encode(made))
