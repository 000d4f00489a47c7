"""Where a chain of another system's versions is kept: a folder or a bucket.

Beside the chain lies ``thinwire-mirror.json``, the *record*: of which stream it is a copy, in which
format, which versions of it are there, which one is being written, and by whom. A version is named
after its own commit, so it is whole; one that was cut short is removed and written again. What is
there is never replaced, neither what thinwire wrote nor what it did not, and versions only rise.

Who opens a destination becomes its holder; another one that still writes finds that out before its
next write, and stops. A store that is only read and written cannot rule out that two who begin at
the same moment both go on for one version.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors, remove_quietly
from thinwire.errors import (
    AlreadyExists,
    Fenced,
    LimitExceeded,
    NotFound,
)
from thinwire.interop.change import Change
from thinwire.interop.foreign import OutFile
from thinwire.interop.formats import Format
from thinwire.interop.mirror_record import (
    MAX_RECORD_BYTES,
    RECORD,
    MirroredVersion,
    MirrorRecord,
    read_record,
)
from thinwire.store import Store

# Where nothing is ever deleted, the record need not name what is long past.
_NAMED_VERSIONS = 256
_UPLOADS = 4


class Destination:
    """A chain in another system's format, version after version.

    Args:
        store: Where it lies.
        format: In which format.
        stream: The id of what it is a copy of.
        options: What the format's writer is asked for.
        full_every: After so many deltas a full version is due; 0: never. None: as the format has
            it.
        keep_full: Full versions to keep, with the deltas after the oldest of them; 0: all.
        keeps_served: Delete nothing that whoever serves ``record.served`` would need to start anew.
        work_dir: Where files wait before they are uploaded.
        between: Called between two uploads.

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
        keeps_served: bool = False,
        work_dir: Path,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        format.check_options(options or {})
        self.store = store
        self.format = format
        self.options = dict(options or {})
        self._full_every = format.full_every if full_every is None else full_every
        self._keep_full = keep_full
        self._keeps_served = keeps_served
        self._work_dir = work_dir
        self._between = between
        self._holder: str | None = None  # who the record should name; None: there is none
        self.record = MirrorRecord(format.name, stream, secrets.token_hex(8))
        found = self._read_record()
        if found is not None:
            self._holder = found.holder
            self.record = msgspec.structs.replace(found, holder=self.record.holder)

    @property
    def newest(self) -> MirroredVersion | None:
        """The newest version that is there."""
        return self.record.versions[-1] if self.record.versions else None

    def has(self, source: str) -> bool:
        """Whether a copy of ``source`` is there."""
        return any(row.source == source for row in self.record.versions)

    def takes_delta(self, base_source: str, base_version: int, version: int) -> bool:
        """Whether the next version may be a delta from the base, a copy of ``base_source``."""
        newest = self.newest
        if newest is None or not self.format.writes_deltas:
            return False
        if (newest.version, newest.source) != (base_version, base_source):
            return False
        if self.format.is_contiguous and version != base_version + 1:
            return False
        return not (self.format.writes_full and 0 < self._full_every <= self._deltas_since_full())

    def is_full_due(self, versions_behind: int) -> bool:
        """Whether so many more versions would bring a full one anyway."""
        if not self.format.writes_deltas:
            return versions_behind > 1
        return self.format.writes_full and 0 < self._full_every < versions_behind

    def write_delta(
        self, change: Change, *, version: int, base_version: int, source: str, **naming: Any
    ) -> MirroredVersion:
        """Write a delta and commit it; what is no longer kept goes.

        Raises:
            TensorMismatch, Unsupported: The format has no delta for that; nothing was written.
            AlreadyExists: The destination has that version, or a later one, or something else.
            Fenced: Another one writes here now.
            StoreError: The store failed. Calling it again writes the same.
        """
        if self.format.names_anchor:
            full = [row.version for row in self.record.versions if row.base is None]
            naming["anchor_version"] = full[-1] if full else None
        with self._staging() as staging:
            files = self.format.write_delta(
                change,
                staging,
                version=version,
                base_version=base_version,
                **self.options,
                **naming,
            )
            return self._ship(files, version, base_version, source)

    def write_full(
        self, checkpoint: Checkpoint, *, version: int, source: str, **naming: Any
    ) -> MirroredVersion:
        """Write full weights and commit them; what is no longer kept goes.

        Raises:
            InvalidArgument, Unsupported: The format cannot carry them; nothing was written.
            AlreadyExists, Fenced, StoreError: As :meth:`write_delta`.
        """
        with self._staging() as staging:
            files = self.format.write_full(checkpoint, staging, version=version, **naming)
            return self._ship(files, version, None, source)

    def begin(self, *, version: int, source: str) -> MirroredVersion:
        """Note down a version that both sides hold already, where the format has no full ones."""
        begun = MirroredVersion(version, None, "", source, [], 0)
        self._save(versions=[begun])
        return begun

    def note_announced(self, name: str) -> None:
        """A deployment is about to be told of a version."""
        names = {row.name for row in self.record.versions}
        kept = [other for other in self.record.announced if other in names and other != name]
        self._save(announced=[*kept, name])

    def note_served(self, name: str) -> None:
        """A deployment was seen to serve a version, and only that; what is not kept goes."""
        if name != self.record.served:
            self._save(served=name)
            self.prune()

    def note_told(self, name: str) -> None:
        """The caller was told of a version, and did what it does then."""
        if name != self.record.told:
            self._save(told=name)

    def drop(self, name: str) -> None:
        """Remove a version that nobody serves or will."""
        doomed = [row for row in self.record.versions if row.name == name]
        kept = [row for row in self.record.versions if row.name != name]
        self._delete(doomed, kept)
        self._save(versions=kept)

    def prune(self) -> None:
        """Delete what comes before the oldest full version that is kept, or the rest of it."""
        rows = self.record.versions
        if not self._keep_full:
            if len(rows) > 2 * _NAMED_VERSIONS:
                self._save(versions=rows[-_NAMED_VERSIONS:])
            return
        full = [number for number, row in enumerate(rows) if row.base is None]
        if len(full) <= self._keep_full:
            return
        first = full[-self._keep_full]
        if self._keeps_served:
            at = [n for n, row in enumerate(rows) if row.name == self.record.served]
            first = max((n for n in full if at and n <= at[0]), default=0) if at else 0
            first = min(first, full[-self._keep_full])
        if first:
            # Named until it is gone, so that nothing is left behind that nobody knows of.
            self._delete(rows[:first], rows[first:])
            self._save(versions=rows[first:])

    def _ship(
        self, files: list[OutFile], version: int, base: int | None, source: str
    ) -> MirroredVersion:
        sizes = []
        for file in files:
            with os_errors("cannot read", file.path):
                sizes.append(file.path.stat().st_size)
        keys = [file.key for file in files]
        name = keys[0].partition("/")[0] if self.format.has_folders else keys[-1]
        self._begin_writing(name, keys, version)

        with ThreadPoolExecutor(_UPLOADS) as pool:
            # An upload that failed is raised here, before anything is committed.
            for _ in pool.map(lambda file: self.store.put_file(file.key, file.path), files[:-1]):
                self._between()
        self._check_held()
        self.store.put_file(files[-1].key, files[-1].path)
        written = MirroredVersion(version, base, name, source, keys, sum(sizes))
        self._save(versions=[*self.record.versions, written], writing="")
        self.prune()
        return written

    def _begin_writing(self, name: str, keys: list[str], version: int) -> None:
        """Make sure of the place, and say what is being written: whose it is, if it is cut short.

        Raises:
            AlreadyExists: The destination is past that version, or holds something else there.
        """
        self._check_held()
        newest = self.newest
        is_known = any(row.name == name for row in self.record.versions)
        if is_known or (newest is not None and version < newest.version):
            assert newest is not None
            raise AlreadyExists(
                f"{self.store.url} has version {newest.version} already; version {version} is not"
                " written over it",
                hint="Give another destination",
                version=version,
            )
        if self.record.writing:
            self._clear(self.record.writing)
        if self.record.writing != name:
            self._refuse_existing(name, keys)
            self._save(writing=name)

    def _refuse_existing(self, name: str, keys: list[str]) -> None:
        """Refuse to write among what lay there before."""
        named = {key for row in self.record.versions for key in row.keys}
        there = [key for key in {keys[0], keys[-1]} - named if self._exists(key)]
        if not there and self.format.has_folders:
            there = [entry.key for entry in self.store.list(f"{name}/")][:1]
        if there:
            raise AlreadyExists(
                f"{self.store.url}/{there[0]} exists, and this copy's record does not name it",
                hint="Give another destination",
                key=there[0],
            )

    def _exists(self, key: str) -> bool:
        try:
            self.store.get_range(key, 0, 0)
        except NotFound:
            return False
        return True

    def _clear(self, name: str) -> None:
        """Remove what an attempt that was cut short left: first what would make it exist."""
        if not self.format.has_folders:
            self.store.delete([name])
            return
        found = [entry.key for entry in self.store.list(f"{name}/")]
        first = [key for key in found if _makes_exist(key)]
        self.store.delete(first)
        self.store.delete([key for key in found if key not in first])

    def _delete(self, doomed: list[MirroredVersion], kept: list[MirroredVersion]) -> None:
        used = {key for row in kept for key in row.keys}
        keys = [key for row in doomed for key in row.keys if key not in used]
        # What makes a version exist goes first, so that nobody begins to read what is going.
        first = [key for key in keys if _makes_exist(key)]
        self.store.delete(first)
        self.store.delete([key for key in keys if key not in first])

    def _deltas_since_full(self) -> int:
        count = 0
        for row in reversed(self.record.versions):
            if row.base is None:
                break
            count += 1
        return count

    def _check_held(self) -> None:
        """Raise Fenced if another one writes here now."""
        found = self._read_record()
        if (None if found is None else found.holder) != self._holder:
            raise Fenced(
                f"{self.store.url}: another one began to write to this destination",
                hint="Stop one of them; one at a time writes to a destination",
                url=self.store.url,
            )

    def _save(self, **changes: Any) -> None:
        record = msgspec.structs.replace(self.record, **changes)
        data = msgspec.json.encode(record)
        if len(data) > MAX_RECORD_BYTES:
            raise LimitExceeded(
                f"{self.store.url}/{RECORD} would have {len(data)} bytes; it may have"
                f" {MAX_RECORD_BYTES}",
                hint="Keep fewer versions, or go on at another destination",
            )
        self._check_held()
        if self._holder is None:
            self.store.put_if_absent(RECORD, data)
        else:
            self.store.put(RECORD, data)
        self._holder = record.holder
        self.record = record

    def _read_record(self) -> MirrorRecord | None:
        return read_record(self.store, self.format, self.record.stream)

    def _staging(self) -> AbstractContextManager[Path]:
        with os_errors("cannot create", self._work_dir):
            self._work_dir.mkdir(parents=True, exist_ok=True)
        return scratch_folder(self._work_dir)


def _makes_exist(key: str) -> bool:
    """Whether a loader or a receiver begins with this object."""
    name = key.rpartition("/")[2]
    return name in {"config.json", "manifest.json"} or name.startswith(
        ("model.safetensors.index", "READY-", "delta_metadata")
    )


@contextmanager
def scratch_folder(parent: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder that goes when the block ends; ``parent`` None: where the system has such things."""
    with os_errors("cannot create a folder in", parent or tempfile.gettempdir()):
        folder = Path(tempfile.mkdtemp(prefix="thinwire-", dir=parent))
    try:
        yield folder
    finally:
        remove_quietly(folder)
