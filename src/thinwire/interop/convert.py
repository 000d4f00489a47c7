"""From one format to another: single deltas, and whole chains.

What a delta changes shows only against its base, so every conversion of one needs the checkpoint
that it was made from; a chain that begins with full weights brings its own. Every new tensor is
verified by the checksum of the format it comes from, and the next state of the chain is made
through a delta of thinwire's, which verifies it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.checkpoint import Checkpoint
from thinwire.codec.delta import Delta
from thinwire.codec.threads import default_workers
from thinwire.errors import InvalidArgument, VersionGap
from thinwire.follow import Stream, open_stream
from thinwire.interop.chain_state import ChainState, write_thinwire
from thinwire.interop.change import Change, CheckpointChange, DeltaChange, ForeignChange
from thinwire.interop.destination import Destination, scratch_folder
from thinwire.interop.foreign import ChainVersion
from thinwire.interop.formats import Format, chain_of, format_named, format_of
from thinwire.interop.mirror import Mirror
from thinwire.interop.mirror_sink import mirror_sink
from thinwire.publish import Publisher
from thinwire.store import open_store

THINWIRE = "thinwire"
_SOURCE = "conversion"


class Converted(NamedTuple):
    """One version that was converted.

    Attributes:
        version: Its number; None: a single delta whose files do not say, to a format that need not.
        base_version: Which version it was made from; None: it is full, or nobody says.
        is_full: Whether it was written as full weights.
        name: What was written: a file or folder below the target.
        source_bytes: Bytes of the files it came from; 0: not counted.
        written_bytes: Bytes of the files it became.
    """

    version: int | None
    base_version: int | None
    is_full: bool
    name: str
    source_bytes: int
    written_bytes: int


def convert_delta(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    base: str | os.PathLike[str],
    version: int | None = None,
    base_version: int | None = None,
    options: Mapping[str, Any] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    single_writer: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Write one delta in another format.

    Args:
        source: A delta of any format that is read here, or of thinwire's.
        target: For "thinwire" the file to write, else the folder, or URL, of the chain.
        to: The format to write.
        base: The checkpoint that the delta was made from.
        version: Which version it makes; None: as its files say.
        base_version: Which version it was made from; None: as its files say, or the one before.
        options: What the format's writer is asked for.
        work_dir: Where new tensors and files wait: room for two models. None: the system's folder
            for temporary files.
        workers: Threads; None: one for each processor, at most eight.
        single_writer: The target has no put-if-absent, and nobody else writes to it.
        overwrite: Replace the file ``target``.

    Raises:
        InvalidArgument: The format is unknown, or a version is needed and nobody says which.
        TensorMismatch, Unsupported: The format has no delta for that.
        FormatError, ApplyError, StoreError: As reading and writing have them; nothing was written.
    """
    workers = default_workers() if workers is None else workers
    checkpoint = Checkpoint.open(base, ignore_subfolders=True)
    with ExitStack() as stack:
        work = stack.enter_context(scratch_folder(work_dir))
        change, said, source_bytes = _open_change(Path(source), checkpoint, work, workers, stack)
        if to == THINWIRE:
            if isinstance(change, DeltaChange):
                raise InvalidArgument(f"{source} is a delta of thinwire's", hint="Copy it")
            size = write_thinwire(change, Path(target), workers, overwrite)
            return Converted(*said, False, Path(target).name, source_bytes, size)
        number, before = _numbers(said, version, base_version)
        destination = _destination(target, format_named(to), options, work, workers, single_writer)
        newest = destination.newest
        if newest is not None and newest.version != before and newest.version < number:
            raise VersionGap(
                f"{destination.store.url} is at version {newest.version}, and this delta was made"
                f" from {before}",
                hint="Convert the versions between first, or give another destination",
                version=number,
            )
        written = destination.write_delta(
            change, version=number, base_version=before, source=str(number)
        )
        return Converted(number, before, False, written.name, source_bytes, written.payload_bytes)


def convert_chain(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    base: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    single_writer: bool = False,
) -> Iterator[Converted]:
    """Write a whole chain in another format, version after version.

    Args:
        source: The folder of a chain.
        target: The folder, or URL, of the new chain; for "thinwire" of a stream.
        to: The format to write.
        base: The checkpoint that the first delta was made from, where the chain does not begin with
            full weights. It becomes the new chain's first version.
        options: What the format's writer is asked for.
        work_dir: Where the states between are kept: room for three models, for "thinwire" for
            four. None: the system's folder for temporary files.
        workers: Threads; None: one for each processor, at most eight.
        single_writer: The target has no put-if-absent, and nobody else writes to it.

    Raises:
        InvalidArgument: No chain is there, it needs a base, or the stream has versions already.
        VersionGap: A version is missing.
        ThinwireError: As :func:`convert_delta`; the versions before were written.
    """
    workers = default_workers() if workers is None else workers
    found = chain_of(Path(source))
    if found is None:
        raise InvalidArgument(
            f"{os.fspath(source)} holds no chain of a known format",
            hint="Give the folder that holds the versions; for one delta give the delta itself",
        )
    format, versions = found
    with ExitStack() as stack:
        work = stack.enter_context(scratch_folder(work_dir))
        state = ChainState(work / "state", workers)
        writer = stack.enter_context(
            _chain_writer(target, to, options, work, workers, single_writer)
        )
        if base is not None:
            versions = [_version_of_base(Path(base), versions[0]), *versions]
        at: int | None = None
        for row in versions:
            yield _convert_version(format, row, at, state, writer)
            at = row.version


def convert_stream(
    stream: Stream,
    target: str | os.PathLike[str],
    to: str,
    *,
    options: Mapping[str, Any] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    single_writer: bool = False,
    **follower_options: Any,
) -> Iterator[Converted]:
    """Write a stream of thinwire's in another format, from the oldest version that can be reached.

    Args:
        stream: The stream.
        target: The folder, or URL, of the new chain.
        to: The format to write.
        options: What the format's writer is asked for.
        work_dir: Where a copy of the model is kept meanwhile: room for three models. None: the
            system's folder for temporary files.
        workers: Threads; None: one for each processor, at most eight.
        single_writer: The target has no put-if-absent, and nobody else writes to it.
        follower_options: As for :class:`thinwire.Follower`.

    Raises:
        ThinwireError: As a mirror has them; the versions before were written.
    """
    # Whether there is one: a chain in a bucket is none.
    stream.record()
    if to == THINWIRE:
        raise InvalidArgument(
            f"{stream.url} is a stream of thinwire's already",
            hint="Copy its objects, manifests last, or follow it and publish anew",
        )
    with scratch_folder(work_dir) as work:
        sink = mirror_sink(
            stream,
            work / "copy",
            open_store(os.fspath(target), single_writer=single_writer),
            format_named(to),
            options=dict(options or {}),
            full_every=0,
            keep_full=0,
            workers=workers,
        )
        with Mirror(stream, sink, lease=False, **follower_options) as mirror:
            for held, written in mirror.catch_up(from_oldest=True):
                yield Converted(
                    held.version,
                    written.base,
                    written.base is None,
                    written.name,
                    held.payload_bytes,
                    written.payload_bytes,
                )


class _ChainWriter:
    """Writes the versions of a chain to a destination."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self.needs_deltas = not destination.format.writes_full

    def write(self, row: ChainVersion, change: Change | None, state: ChainState) -> Converted:
        """Write one version; ``state`` is at it where there is no change, else at its base."""
        format = self._destination.format
        number = row.version
        if change is not None and format.writes_deltas:
            assert row.base_version is not None
            written = self._destination.write_delta(
                change, version=number, base_version=row.base_version, source=str(number)
            )
            state.advance(change)
        else:
            if change is not None:
                state.advance(change)
            if not format.writes_full and self._destination.newest is None:
                written = self._destination.begin(version=number, source=str(number))
            else:
                written = self._destination.write_full(
                    state.checkpoint(), version=number, source=str(number)
                )
        is_full = written.base is None
        return Converted(
            number, written.base, is_full, written.name, _size(row.path), written.payload_bytes
        )


class _StreamWriter:
    """Publishes the versions of a chain to a stream."""

    needs_deltas = False

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def write(self, row: ChainVersion, change: Change | None, state: ChainState) -> Converted:
        """As :meth:`_ChainWriter.write`; the chain's number becomes the step."""
        if change is not None:
            state.advance(change)
        assert state.path is not None
        held = self._publisher.publish(state.path, step=row.version)
        is_full = held.kind != "delta"
        before = None if is_full else row.base_version
        name = f"version {held.version} of the stream"
        return Converted(row.version, before, is_full, name, _size(row.path), held.payload_bytes)


@contextmanager
def _chain_writer(
    target: str | os.PathLike[str],
    to: str,
    options: Mapping[str, Any] | None,
    work: Path,
    workers: int,
    single_writer: bool,
) -> Iterator[_ChainWriter | _StreamWriter]:
    if to != THINWIRE:
        destination = _destination(target, format_named(to), options, work, workers, single_writer)
        if destination.newest is not None:
            raise InvalidArgument(
                f"{destination.store.url} has versions already: they would be of two chains",
                hint="Give a new destination",
            )
        yield _ChainWriter(destination)
        return
    if options:
        raise InvalidArgument("a stream takes no options of a format", hint="Leave them out")
    stream = open_stream(target, single_writer=single_writer)
    with Publisher(stream, work / "publisher", maintain=False, workers=workers) as publisher:
        if publisher.head is not None:
            raise InvalidArgument(
                f"{stream.url} has versions already: a chain would begin anew after them",
                hint="Give a new stream",
            )
        yield _StreamWriter(publisher)


def _version_of_base(base: Path, first: ChainVersion) -> ChainVersion:
    if first.base_version is None:
        raise InvalidArgument(
            f"{first.path}: the chain begins with full weights",
            hint="Leave the base out",
        )
    return ChainVersion(first.base_version, None, base, base.name)


def _convert_version(
    format: Format,
    row: ChainVersion,
    at: int | None,
    state: ChainState,
    writer: _ChainWriter | _StreamWriter,
) -> Converted:
    if row.is_full:
        if state.path is not None and writer.needs_deltas:
            # Where there are no full versions, the way from the last one is a delta as any other.
            base = state.checkpoint()
            new = Checkpoint.open(row.path, ignore_subfolders=True)
            return writer.write(row._replace(base_version=at), CheckpointChange(base, new), state)
        state.begin(row.path)
        return writer.write(row, None, state)
    if state.path is None:
        raise InvalidArgument(
            f"{row.path}: the chain begins with a delta",
            hint=f"Give the checkpoint of version {row.base_version} (--base)",
        )
    if at is not None and row.base_version != at:
        raise VersionGap(
            f"{row.path} was made from version {row.base_version}, and the one before it is {at}",
            hint="Fetch the missing version",
            version=row.version,
        )
    with format.open_delta(row.path) as delta:
        base = state.checkpoint()
        change = ForeignChange(base, delta)
        delta.check_weights(base)
        return writer.write(row, change, state)


def _open_change(
    source: Path, base: Checkpoint, work: Path, workers: int, stack: ExitStack
) -> tuple[Change, tuple[int | None, int | None], int]:
    """A delta against its base, the versions that its files name, and their bytes."""
    format = format_of(source)
    if format is None:
        delta = stack.enter_context(Delta.open(source))
        change = DeltaChange(base, delta, work, workers=workers)
        return change, (None, None), delta.file_bytes
    foreign = stack.enter_context(format.open_delta(source))
    foreign_change = ForeignChange(base, foreign)
    foreign.check_weights(base)
    facts = foreign.facts
    return foreign_change, (facts.version, facts.base_version), facts.file_bytes


def _numbers(
    said: tuple[int | None, int | None], version: int | None, base_version: int | None
) -> tuple[int, int]:
    number = said[0] if version is None else version
    if number is None:
        raise InvalidArgument(
            "the delta does not say which version it makes", hint="Give its number (--version)"
        )
    before = said[1] if base_version is None else base_version
    return number, number - 1 if before is None else before


def _destination(
    target: str | os.PathLike[str],
    format: Format,
    options: Mapping[str, Any] | None,
    work: Path,
    workers: int,
    single_writer: bool,
) -> Destination:
    return Destination(
        open_store(os.fspath(target), single_writer=single_writer),
        format,
        _SOURCE,
        options=options,
        full_every=0,
        keep_full=0,
        work_dir=work / "out",
        workers=workers,
    )


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
