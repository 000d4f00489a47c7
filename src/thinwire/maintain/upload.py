"""Deltas and checkpoints to the store, with the records that the manifest names."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from thinwire.checkpoint.disk import os_errors
from thinwire.codec.chunk import Spec
from thinwire.codec.container import Attachment
from thinwire.codec.delta import Delta
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.plan import Pair
from thinwire.codec.threads import map_in_order
from thinwire.codec.write import write_delta
from thinwire.store import Store
from thinwire.stream import keys
from thinwire.stream.blocks import ObjectRecord, record_of_file
from thinwire.stream.records import FileRecord

# Tensors of so many bytes go into one shard; larger models into several, each of bearable size.
SHARD_RAW_BYTES = 32 << 30
_PARALLEL = 4


class Shards(NamedTuple):
    """The shards of one delta, in files of this machine."""

    paths: list[Path]
    records: list[ObjectRecord]
    changed_count: int

    def open(self) -> DeltaSet:
        """All of them as one delta."""
        return DeltaSet([Delta.open(path) for path in self.paths])

    def remove(self) -> None:
        """Remove the files."""
        for path in self.paths:
            path.unlink(missing_ok=True)


def write_shards(
    folder: Path,
    pairs: Sequence[Pair],
    attachments: Sequence[Attachment],
    *,
    spec: Spec | None,
    workers: int,
    shard_raw_bytes: int = SHARD_RAW_BYTES,
    on_bytes: Callable[[int], None] | None = None,
) -> Shards:
    """Encode pairs into files in ``folder``; the first one carries the attachments.

    Raises:
        ThinwireError: As ``write_delta``; no file is left.
    """
    shards = Shards([], [], 0)
    changed_count = 0
    try:
        for number, part in enumerate(_parts(pairs, shard_raw_bytes)):
            path = folder / f"{secrets.token_hex(8)}.tw"
            shards.paths.append(path)
            with os_errors("cannot write", path), path.open("xb") as file:
                summary = write_delta(
                    cast(BinaryIO, file),
                    part,
                    attachments if number == 0 else (),
                    spec=spec,
                    workers=workers,
                    spool_dir=folder,
                    on_bytes=on_bytes,
                )
            changed_count += summary.changed_count
            shards.records.append(record_of_file(path))
    except BaseException:
        shards.remove()
        raise
    return shards._replace(changed_count=changed_count)


def shard_keys(
    lineage: str, base: int, version: int, session: str, records: Sequence[ObjectRecord]
) -> list[str]:
    """Where the shards of a delta go."""
    return [
        keys.shard(lineage, base, version, session, number, record.digest)
        for number, record in enumerate(records)
    ]


def put_files(
    store: Store,
    files: Sequence[tuple[str, Path]],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Upload files, a few at a time; ``on_bytes`` is told the size of each that is there.

    Raises:
        StoreError: One could not be uploaded; others may have been.
    """

    def put(file: tuple[str, Path]) -> int:
        key, path = file
        store.put_file(key, path)
        return path.stat().st_size

    for size_bytes in map_in_order(put, files, max(1, min(_PARALLEL, len(files)))):
        if on_bytes:
            on_bytes(size_bytes)


def file_record(name: str, path: Path) -> FileRecord:
    """The record of a file of an anchor."""
    record = record_of_file(path)
    return FileRecord(size=record.size, block=record.block, blocks=record.blocks, name=name)


def _parts(pairs: Sequence[Pair], most_bytes: int) -> list[list[Pair]]:
    parts: list[list[Pair]] = [[]]
    size = 0
    for pair in pairs:
        data = pair.new if pair.new is not None else pair.base
        pair_bytes = 0 if data is None else data.size
        if parts[-1] and size + pair_bytes > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(pair)
        size += pair_bytes
    return parts
