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
from typing import Any, BinaryIO, NamedTuple, cast

from thinwire.checkpoint import Checkpoint, apply_checkpoint, apply_in_place
from thinwire.checkpoint.disk import (
    map_file,
    os_errors,
    put_in_place,
    remove,
    remove_quietly,
    temporary_sibling,
)
from thinwire.checkpoint.folder import refuse_inside
from thinwire.codec.container import Attachment
from thinwire.codec.delta import Delta
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import write_delta
from thinwire.errors import AlreadyExists, InvalidArgument, VersionGap
from thinwire.follow import Stream
from thinwire.interop.change import Change, DeltaChange, ForeignChange, spooled_pairs
from thinwire.interop.destination import Destination, scratch_folder
from thinwire.interop.foreign import ChainVersion
from thinwire.interop.formats import Format, chain_of, format_named, format_of
from thinwire.interop.mirror import Mirror, mirror_sink
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
    workers: int = 1,
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
        workers: Threads.
        overwrite: Replace the file ``target``.

    Raises:
        InvalidArgument: The format is unknown, or a version is needed and nobody says which.
        TensorMismatch, Unsupported: The format has no delta for that.
        FormatError, ApplyError, StoreError: As reading and writing have them; nothing was written.
    """
    checkpoint = Checkpoint.open(base, ignore_subfolders=True)
    with ExitStack() as stack:
        change, said, source_bytes = _open_change(Path(source), checkpoint, stack)
        if to == THINWIRE:
            if isinstance(change, DeltaChange):
                raise InvalidArgument(f"{source} is a delta of thinwire's", hint="Copy it")
            size = _write_thinwire(change, Path(target), workers, overwrite)
            return Converted(*said, False, Path(target).name, source_bytes, size)
        number, before = _numbers(said, version, base_version)
        work = stack.enter_context(scratch_folder(None))
        destination = _destination(target, format_named(to), options, work)
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
    workers: int = 1,
) -> Iterator[Converted]:
    """Write a whole chain in another format, version after version.

    Args:
        source: The folder of a chain.
        target: The folder, or URL, of the new chain; for "thinwire" of a stream.
        to: The format to write.
        base: The checkpoint that the first delta was made from, where the chain does not begin with
            full weights. It becomes the new chain's first version.
        options: What the format's writer is asked for.
        work_dir: Where the states between are kept: room for one model, for "thinwire" for two.
            None: the system's folder for temporary files.
        workers: Threads.

    Raises:
        InvalidArgument: No chain is there, or it needs a base.
        VersionGap: A version is missing.
        ThinwireError: As :func:`convert_delta`; the versions before were written.
    """
    found = chain_of(Path(source))
    if found is None:
        raise InvalidArgument(
            f"{os.fspath(source)} holds no chain of a known format",
            hint="Give the folder that holds the versions; for one delta give the delta itself",
        )
    format, versions = found
    with ExitStack() as stack:
        work = stack.enter_context(scratch_folder(work_dir))
        state = _State(work / "state", workers)
        writer = stack.enter_context(_chain_writer(target, to, options, work, workers))
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
    workers: int = 1,
    **follower_options: Any,
) -> Iterator[Converted]:
    """Write a stream of thinwire's in another format, from the oldest version that can be reached.

    Args:
        stream: The stream.
        target: The folder, or URL, of the new chain.
        to: The format to write.
        options: What the format's writer is asked for.
        work_dir: Where a copy of the model is kept meanwhile; None: the system's folder for
            temporary files.
        workers: Threads.
        follower_options: As for :class:`thinwire.Follower`.

    Raises:
        ThinwireError: As a mirror has them; the versions before were written.
    """
    if to == THINWIRE:
        raise InvalidArgument(
            f"{stream.url} is a stream of thinwire's already",
            hint="Copy its objects, manifests last, or follow it and publish anew",
        )
    with scratch_folder(work_dir) as work:
        sink = mirror_sink(
            stream,
            work / "copy",
            open_store(os.fspath(target)),
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


class _State:
    """The version that a chain has come to, as a checkpoint on disk."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.path: Path | None = None
        self._folder = folder
        self._workers = workers

    def begin(self, path: Path) -> None:
        """Go on from full weights, which are only read."""
        remove(self._folder)
        self.path = path

    def checkpoint(self) -> Checkpoint:
        """What the chain has come to, opened."""
        assert self.path is not None
        return Checkpoint.open(self.path, ignore_subfolders=True)

    def advance(self, change: Change) -> None:
        """Go on to what a change of this state makes."""
        assert self.path is not None
        delta = self._folder.with_name("step.tw")
        try:
            _write_thinwire(change, delta, self._workers, overwrite=True)
            if self.path == self._folder:
                apply_in_place(self.path, delta, workers=self._workers)
            else:
                apply_checkpoint(self.path, delta, self._folder, workers=self._workers)
                self.path = self._folder
        finally:
            remove_quietly(delta)


class _ChainWriter:
    """Writes the versions of a chain to a destination."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def write(self, row: ChainVersion, change: Change | None, state: _State) -> Converted:
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

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def write(self, row: ChainVersion, change: Change | None, state: _State) -> Converted:
        """As :meth:`_ChainWriter.write`; the chain's number becomes the step."""
        if change is not None:
            state.advance(change)
        assert state.path is not None
        held = self._publisher.publish(state.path, step=row.version)
        is_full = held.kind != "delta"
        before = None if is_full else row.base_version
        name = f"version {held.version}"
        return Converted(row.version, before, is_full, name, _size(row.path), held.payload_bytes)


@contextmanager
def _chain_writer(
    target: str | os.PathLike[str],
    to: str,
    options: Mapping[str, Any] | None,
    work: Path,
    workers: int,
) -> Iterator[_ChainWriter | _StreamWriter]:
    if to != THINWIRE:
        yield _ChainWriter(_destination(target, format_named(to), options, work))
        return
    if options:
        raise InvalidArgument("a stream takes no options of a format", hint="Leave them out")
    with Publisher(target, work / "publisher", maintain=False, workers=workers) as publisher:
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
    state: _State,
    writer: _ChainWriter | _StreamWriter,
) -> Converted:
    if row.is_full:
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
    source: Path, base: Checkpoint, stack: ExitStack
) -> tuple[Change, tuple[int | None, int | None], int]:
    """A delta against its base, the versions that its files name, and their bytes."""
    format = format_of(source)
    if format is None:
        delta = stack.enter_context(Delta.open(source))
        return DeltaChange(base, delta), (None, None), delta.file_bytes
    foreign = stack.enter_context(format.open_delta(source))
    change = ForeignChange(base, foreign)
    foreign.check_weights(base)
    facts = foreign.facts
    return change, (facts.version, facts.base_version), facts.file_bytes


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
    target: str | os.PathLike[str], format: Format, options: Mapping[str, Any] | None, work: Path
) -> Destination:
    return Destination(
        open_store(os.fspath(target)),
        format,
        _SOURCE,
        options=options,
        full_every=0,
        keep_full=0,
        work_dir=work / "out",
    )


def _write_thinwire(change: Change, target: Path, workers: int, overwrite: bool) -> int:
    """Write a change as a delta of thinwire's; returns its bytes."""
    if os.path.lexists(target) and not overwrite:
        raise AlreadyExists(
            f"{target} exists", hint="Choose another path, or pass --overwrite", path=str(target)
        )
    refuse_inside(target.absolute(), change.base)
    temporary = temporary_sibling(target)
    try:
        with (
            spooled_pairs(change, target.absolute().parent) as pairs,
            os_errors("cannot write", target),
            temporary.open("xb") as file,
        ):
            summary = write_delta(
                cast(BinaryIO, file),
                pairs,
                _attachments(change),
                workers=workers,
                spool_dir=target.absolute().parent,
            )
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, target, overwrite=overwrite)
    except BaseException:
        remove_quietly(temporary)
        raise
    return summary.file_bytes


def _attachments(change: Change) -> list[Attachment]:
    """The base's headers, which stay, and the files that differ from the base's."""
    rows = []
    for name in change.layout:
        data = change.base.weights[name].header_bytes
        rows.append(Attachment(name, "header", None, len(data), xxh3_64(data)))
    for name in sorted(change.file_names):
        view = change.read_file(name)
        old = change.base.files.get(name)
        is_same = old is not None and map_file(old).data == view
        carried = None if is_same else bytes(view)
        rows.append(Attachment(name, "file", carried, len(view), xxh3_64(view)))
    return rows


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
