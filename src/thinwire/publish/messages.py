"""What ranks send each other: between processes of one job, which trust one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec
import numpy as np

from thinwire.codec import zstd
from thinwire.publish.held import Runs
from thinwire.publish.ranks import Fault, LineBroken, PeerFailed, Ranks
from thinwire.publish.spreading import Inventory
from thinwire.publish.staging import Found
from thinwire.stream.blocks import ObjectRecord
from thinwire.stream.records import FileRecord, Link, Manifest

T = TypeVar("T")


class SentRun(msgspec.Struct, array_like=True):
    """A run of changes on its way to the rank that encodes the unit."""

    start: int
    positions: bytes | None
    words: bytes

    @classmethod
    def of(cls, found: Found) -> SentRun:
        """To send."""
        positions = None if found.positions is None else found.positions.tobytes()
        return cls(found.start, positions, found.words.tobytes())

    def found(self) -> Found:
        """As it was found."""
        positions = None if self.positions is None else np.frombuffer(self.positions, "<u4")
        return Found(self.start, positions, np.frombuffer(self.words, np.uint8))


class SentChanges(msgspec.Struct, array_like=True):
    """What a source found in a unit."""

    place: int
    source: int
    runs: list[SentRun]


class SentCounts(msgspec.Struct, array_like=True):
    """Words by class field, changed ones, and those changed by one step; of one source.

    With how many chunks of large tensors the rank encodes.
    """

    unit_count: int
    dtype: str
    source: int
    counts: bytes


class Fit(msgspec.Struct, array_like=True):
    """What rank 0 fitted for all, and the most chunks of large tensors that a rank encodes."""

    tables: dict[str, bytes] = {}
    most_units: int = 0
    fault: Fault | None = None


class SentUnit(msgspec.Struct, array_like=True):
    """A coded unit on its way to the rank that assembles its container."""

    place: int
    section: bytes
    changed_count: int
    base_digest: int
    new_digest: int
    steps: tuple[list[int], list[int]]


class TensorRow(msgspec.Struct, array_like=True):
    """A tensor of a container, as the version's digest lists it."""

    name: str
    dtype: str
    shape: list[int]
    old_digest: int | None
    new_digest: int


class Receipt(msgspec.Struct, array_like=True):
    """A container that was uploaded.

    ``files``: name, kind, size and digest of what travels beside the tensors.
    """

    number: int
    record: ObjectRecord
    tensors: list[TensorRow]
    files: list[tuple[str, str, int, int]]
    changed_count: int


class SentPart(msgspec.Struct, array_like=True):
    """A source's raw bytes of a unit."""

    place: int
    source: int
    data: bytes


class FileReceipt(msgspec.Struct, array_like=True):
    """A file that was uploaded.

    Attributes:
        record: Its name, size and digests.
        kind: "header" of a weights file, or "file".
        size: Bytes of the header, or of the whole small file.
        digest: XXH3-64 of these bytes.
        tensors: What the file holds.
    """

    record: FileRecord
    kind: str
    size: int
    digest: int
    tensors: list[TensorRow]


class Hello(msgspec.Struct):
    """What a rank says of itself: where it runs, which stream it sees, what it holds."""

    host: str
    stream: str
    inventory: Inventory
    fault: Fault | None = None


class SentLayout(msgspec.Struct, array_like=True):
    """A layout on its way to all ranks: the runs of each part, and who holds it."""

    shape: tuple[int, ...]
    parts: list[tuple[Runs, ...]]
    holders: list[tuple[int, ...]]


class Met(msgspec.Struct):
    """What rank 0 tells of all: each tensor by name, dtype and the number of its layout."""

    hosts: list[str] = []
    tensors: list[tuple[str, str, int]] = []
    layouts: list[SentLayout] = []
    fault: Fault | None = None


class Start(msgspec.Struct):
    """Where the stream is, as rank 0 found it."""

    lineage: str = ""
    link: Link | None = None
    fault: Fault | None = None


class Order(msgspec.Struct):
    """Where the next version goes, as rank 0 decides."""

    lineage: str = ""
    version: int = 0
    session: str = ""
    is_first: bool = False
    fault: Fault | None = None


class Report(msgspec.Struct):
    """What a rank did."""

    shards: list[Receipt] = []
    files: list[FileReceipt] = []
    fault: Fault | None = None
    is_peers: bool = False
    is_line_broken: bool = False
    replicas: dict[str, int] = {}


class Verdict(msgspec.Struct):
    """What became of an attempt: the version, or why there is none."""

    manifest: Manifest | None = None
    fault: Fault | None = None
    is_foreign: bool = False


def pack(message: msgspec.Struct) -> bytes:
    """A message that names the same things many times over, for its way to other ranks."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(8, "little") + zstd.compress(data, 3)


def unpack(data: bytes) -> bytes:
    """What another rank of this job packed."""
    return zstd.decompress(data[8:], int.from_bytes(data[:8], "little"), "what a rank said")


def exchanged(ranks: Ranks, outgoing: Mapping[int, list[T]], kind: type[list[T]]) -> Iterator[T]:
    """Exchange messages with other ranks, and go through what came."""
    sent = {rank: msgspec.msgpack.encode(items) for rank, items in outgoing.items()}
    return _decoded(ranks.exchange(sent), kind)


@contextmanager
def in_step(ranks: Ranks) -> Iterator[None]:
    """Around all exchanges of an attempt: where something fails here, the others learn of it.

    They are in their next exchange, or will be, and would wait for this rank. An empty one ends
    the attempt: so there is always a next one until then.
    """
    try:
        yield
        ranks.exchange({})
    except (PeerFailed, LineBroken):
        raise
    except BaseException:
        decline(ranks)
        raise


def _decoded(received: Mapping[int, bytes | memoryview], kind: type[list[T]]) -> Iterator[T]:
    for data in received.values():
        yield from msgspec.msgpack.decode(data, type=kind)


def decline(ranks: Ranks) -> None:
    """Let the others know, instead of sending what they wait for, that this rank failed."""
    # The error that led here is the one to tell.
    with suppress(Exception):
        ranks.exchange(None)
