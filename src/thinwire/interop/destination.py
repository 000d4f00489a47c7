"""Where a chain of another system's versions is kept: a folder or a bucket.

Beside the chain lies ``thinwire-mirror.json``: of which stream it is a copy, in which format, which
versions of it are there, and which one is being written. A version is named after its own commit,
so it is whole; one that was cut short is written again. What thinwire did not write is not
replaced.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors, remove_quietly
from thinwire.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound
from thinwire.interop.change import Change
from thinwire.interop.foreign import OutFile
from thinwire.interop.formats import Format
from thinwire.store import Store

RECORD = "thinwire-mirror.json"
MAX_RECORD_BYTES = 64 << 20
_UPLOADS = 4


class MirroredVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version at the destination.

    Attributes:
        version: Its number.
        base: The number of the version that it was made from; None: full weights.
        name: As the system calls it: the folder, or the file, that is its own.
        source: What it is a copy of: a digest.
        keys: Its objects in the order in which they were written.
        payload_bytes: Bytes of all its objects.
    """

    version: int
    base: int | None
    name: str
    source: str
    keys: list[str]
    payload_bytes: int


class MirrorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a destination says of itself.

    Attributes:
        format: The format's name.
        stream: The stream that it is a copy of, by its id.
        versions: Those that are there, oldest first.
        writing: The name of the one that is being written; empty: none.
    """

    format: str
    stream: str
    versions: list[MirroredVersion]
    writing: str = ""


class Destination:
    """A chain in another system's format, version after version. One writer at a time.

    Args:
        store: Where it lies.
        format: In which format.
        stream: The id of what it is a copy of.
        options: What the format's writer is asked for.
        full_every: After so many deltas a full version is due; None: as the format has it.
        keep_full: Full versions to keep, with the deltas after the oldest of them; 0: all.
        work_dir: Where files wait before they are uploaded.

    Raises:
        InvalidArgument: Something else is there, or an option is not one.
    """

    def __init__(
        self,
        store: Store,
        format: Format,
        stream: str,
        *,
        options: Mapping[str, Any] | None = None,
        full_every: int | None = None,
        keep_full: int = 2,
        work_dir: Path,
    ) -> None:
        self.store = store
        self.format = format
        self.options = dict(options or {})
        format.check_options(self.options)
        self._full_every = format.full_every if full_every is None else full_every
        self._keep_full = keep_full
        self._work_dir = work_dir
        self.record = self._claim(stream)

    @property
    def newest(self) -> MirroredVersion | None:
        """The newest version that is there."""
        return self.record.versions[-1] if self.record.versions else None

    def takes_delta(self, base_version: int, version: int) -> bool:
        """Whether the next version may be a delta from ``base_version``."""
        newest = self.newest
        if newest is None or not self.format.writes_deltas:
            return False
        if newest.version != base_version:
            return False
        if self.format.is_contiguous and version != base_version + 1:
            return False
        return not (self.format.writes_full and 0 < self._full_every <= self._deltas_since_full())

    def write_delta(
        self, change: Change, *, version: int, base_version: int, source: str, **options: Any
    ) -> MirroredVersion:
        """Write a delta and commit it; what is no longer kept goes.

        Raises:
            TensorMismatch, Unsupported: The format has no delta for that; nothing was written.
            StoreError: The store failed. Calling it again writes the same.
        """
        if self.format.names_anchor:
            full = [row.version for row in self.record.versions if row.base is None]
            options["anchor_version"] = full[-1] if full else None
        with self._staging() as staging:
            files = self.format.write_delta(
                change,
                staging,
                version=version,
                base_version=base_version,
                **self.options,
                **options,
            )
            return self._ship(files, version, base_version, source)

    def write_full(
        self, checkpoint: Checkpoint, *, version: int, source: str, **options: Any
    ) -> MirroredVersion:
        """Write full weights and commit them; what is no longer kept goes.

        Raises:
            InvalidArgument, Unsupported: The format cannot carry them; nothing was written.
            StoreError: The store failed. Calling it again writes the same.
        """
        with self._staging() as staging:
            files = self.format.write_full(checkpoint, staging, version=version, **options)
            return self._ship(files, version, None, source)

    def begin(self, *, version: int, source: str) -> MirroredVersion:
        """Note down a version that both sides hold already, where the format has no full ones."""
        begun = MirroredVersion(version, None, "", source, [], 0)
        self._save(msgspec.structs.replace(self.record, versions=[begun]))
        return begun

    def _ship(
        self, files: list[OutFile], version: int, base: int | None, source: str
    ) -> MirroredVersion:
        sizes = []
        for file in files:
            with os_errors("cannot read", file.path):
                sizes.append(file.path.stat().st_size)
        keys = [file.key for file in files]
        name = keys[0].partition("/")[0] if self.format.has_folders else keys[-1]
        self._begin_writing(name, keys)
        with ThreadPoolExecutor(_UPLOADS) as pool:
            # list(): an upload that failed is raised here, before anything is committed.
            list(pool.map(lambda file: self.store.put_file(file.key, file.path), files[:-1]))
        self.store.put_file(files[-1].key, files[-1].path)
        written = MirroredVersion(version, base, name, source, keys, sum(sizes))
        others = [other for other in self.record.versions if other.name != name]
        kept, doomed = self._sort_out([*others, written])
        self._save(msgspec.structs.replace(self.record, versions=kept, writing=""))
        self._delete(doomed, kept)
        return written

    def _begin_writing(self, name: str, keys: list[str]) -> None:
        """Say what is being written, so that nobody wonders whose it is if it is cut short."""
        if self.record.writing:
            self._clear_rest(self.record.writing, keys)
        if self.record.writing != name:
            for key in {keys[0], keys[-1]} - self._named():
                self._refuse_existing(key)
            self._save(msgspec.structs.replace(self.record, writing=name))

    def _refuse_existing(self, key: str) -> None:
        """Refuse to replace what lay there before this mirror began."""
        try:
            self.store.get_range(key, 0, 0)
        except NotFound:
            return
        raise AlreadyExists(
            f"{self.store.url}/{key} exists, and thinwire did not write it",
            hint="Give another destination",
            key=key,
        )

    def _clear_rest(self, name: str, keys: list[str]) -> None:
        """Remove what an attempt that was cut short left, but for what is written again."""
        found = [name]
        if self.format.has_folders:
            found = [entry.key for entry in self.store.list(f"{name}/")]
        named = self._named()
        rest = [key for key in found if key not in named and key not in keys]
        if rest:
            self.store.delete(rest)

    def _sort_out(
        self, versions: list[MirroredVersion]
    ) -> tuple[list[MirroredVersion], list[MirroredVersion]]:
        """What stays and what goes: everything before the oldest full version that is kept."""
        full = [number for number, row in enumerate(versions) if row.base is None]
        if not self._keep_full or len(full) <= self._keep_full:
            return versions, []
        first = full[-self._keep_full]
        return versions[first:], versions[:first]

    def _delete(self, doomed: list[MirroredVersion], kept: list[MirroredVersion]) -> None:
        used = {key for row in kept for key in row.keys}
        # What makes a version exist goes first, so that nobody begins to read what is going.
        last = [row.keys[-1] for row in doomed if row.keys and row.keys[-1] not in used]
        rest = [key for row in doomed for key in row.keys[:-1] if key not in used]
        if last:
            self.store.delete(last)
        if rest:
            self.store.delete(rest)

    def _named(self) -> set[str]:
        return {key for row in self.record.versions for key in row.keys}

    def _deltas_since_full(self) -> int:
        count = 0
        for row in reversed(self.record.versions):
            if row.base is None:
                break
            count += 1
        return count

    def _claim(self, stream: str) -> MirrorRecord:
        mine = MirrorRecord(self.format.name, stream, [])
        try:
            self.store.put_if_absent(RECORD, msgspec.json.encode(mine))
        except AlreadyExists:
            pass
        else:
            return mine
        found = self._read()
        if (found.format, found.stream) != (mine.format, mine.stream):
            raise InvalidArgument(
                f"{self.store.url} is a mirror of another stream, or in another format"
                f" ({found.format})",
                hint="Give another destination",
                url=self.store.url,
            )
        return found

    def _read(self) -> MirrorRecord:
        try:
            data = self.store.get(RECORD, limit_bytes=MAX_RECORD_BYTES)
            return msgspec.json.decode(data, type=MirrorRecord)
        except msgspec.MsgspecError as error:
            raise Corrupt(
                f"{self.store.url}/{RECORD} is malformed: {error}",
                hint="Give another destination, or empty this one",
                url=self.store.url,
            ) from None

    def _save(self, record: MirrorRecord) -> None:
        self.store.put(RECORD, msgspec.json.encode(record))
        self.record = record

    def _staging(self) -> AbstractContextManager[Path]:
        with os_errors("cannot create", self._work_dir):
            self._work_dir.mkdir(parents=True, exist_ok=True)
        return scratch_folder(self._work_dir)


@contextmanager
def scratch_folder(parent: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder that goes when the block ends; ``parent`` None: where the system has such things."""
    with os_errors("cannot create a folder in", parent or tempfile.gettempdir()):
        folder = Path(tempfile.mkdtemp(prefix="thinwire-", dir=parent))
    try:
        yield folder
    finally:
        remove_quietly(folder)
