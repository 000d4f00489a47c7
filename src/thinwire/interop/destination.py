"""Where a chain of another system's versions is kept: a folder or a bucket.

Beside the chain lies a *record* (:mod:`thinwire.interop.held_record`), which says what is there and
what is being written. A version is named after its own commit, so it is whole; one that was cut
short is removed and written again. What is there is never replaced, neither what thinwire wrote nor
what it did not, and versions only rise. One at a time writes: the holder of the record, which looks
whether it still is before it puts any file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors, remove_quietly
from thinwire.errors import AlreadyExists, NotFound
from thinwire.interop.change import Change
from thinwire.interop.foreign import OutFile
from thinwire.interop.formats import Format
from thinwire.interop.held_record import HeldRecord
from thinwire.interop.hf import pointer_to
from thinwire.interop.mirror_record import MirroredVersion, MirrorRecord
from thinwire.interop.uploading import upload_all
from thinwire.store import Store

# Where nothing is ever deleted, the record need not name what is long past.
_NAMED_VERSIONS = 256
_MAX_POINTER_BYTES = 1024
# A last file up to this size is put if absent, for which it is held in memory.
_MAX_COMMIT_BYTES = 64 << 20


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
        workers: Threads that code a delta; what is written is the same for any number.
        between: Called between two uploads.

    Raises:
        InvalidArgument: Something else is there, or an option is not one.
        Fenced: Another one begins to write here at this moment.
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
        workers: int = 1,
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
        self._workers = workers
        self._held = HeldRecord(store, format, stream)

    @property
    def record(self) -> MirrorRecord:
        """What the destination says of itself."""
        return self._held.record

    @property
    def was_found(self) -> bool:
        """Whether something was ever written here, when it was opened."""
        return self._held.was_found

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is not known what is there, as the store failed: open it anew."""
        return self._held.is_in_doubt

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
            InvalidArgument: The base was written to meanwhile; nothing was written here.
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
                workers=self._workers,
                **self.options,
                **naming,
            )
            change.check_unchanged()
            return self._ship(files, version, base_version, source)

    def write_full(
        self, checkpoint: Checkpoint, *, version: int, source: str, **naming: Any
    ) -> MirroredVersion:
        """Write full weights and commit them; what is no longer kept goes.

        Raises:
            InvalidArgument, Unsupported: The format cannot carry them, or they were written to
                meanwhile; nothing is there that a reader would take.
            AlreadyExists, Fenced, StoreError: As :meth:`write_delta`.
        """
        with self._staging() as staging:
            files = self.format.write_full(checkpoint, staging, version=version, **naming)
            return self._ship(files, version, None, source, checkpoint)

    def begin(self, *, version: int, source: str) -> MirroredVersion:
        """Note down a version that both sides hold already, where the format has no full ones."""
        begun = MirroredVersion(version, None, "", source, [], 0)
        self._held.save(versions=[begun])
        return begun

    def note_announced(self, name: str) -> None:
        """A deployment is about to be told of a version."""
        self._held.hold()
        names = {row.name for row in self.record.versions}
        kept = [other for other in self.record.announced if other in names and other != name]
        self._held.save(announced=[*kept, name])

    def note_served(self, name: str) -> None:
        """A deployment was seen to serve a version, and only that; what is not kept goes."""
        if name != self.record.served:
            self._held.save(served=name)
            self.prune()

    def note_told(self, name: str) -> None:
        """The caller was told of a version, and did what it does then."""
        if name != self.record.told:
            self._held.save(told=name)

    def drop(self, name: str) -> None:
        """Remove a version that nobody serves or will."""
        doomed = [row for row in self.record.versions if row.name == name]
        kept = [row for row in self.record.versions if row.name != name]
        self._held.hold()
        self._delete(doomed, kept)
        self._held.save(versions=kept)

    def prune(self) -> None:
        """Delete what comes before the oldest full version that is kept, or the rest of it."""
        rows = self.record.versions
        if not self._keep_full:
            if len(rows) > 2 * _NAMED_VERSIONS:
                self._held.save(versions=rows[-_NAMED_VERSIONS:])
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
            self._held.hold()
            # Named until it is gone, so that nothing is left behind that nobody knows of.
            self._delete(rows[:first], rows[first:])
            self._held.save(versions=rows[first:])

    def check_pointer(self) -> None:
        """Have what names the newest version name it, where the format has such an object.

        What another one, who is not the holder any more, put there late may have changed it.

        Raises:
            Fenced, StoreError: As :meth:`write_delta`.
        """
        if not self.format.pointer or not self._is_begun():
            return
        newest = self.newest
        wanted = b"" if newest is None else pointer_to(newest.name)
        try:
            found = self.store.get(self.format.pointer, limit_bytes=_MAX_POINTER_BYTES)
        except NotFound:
            found = b""
        if found == wanted:
            return
        self._held.hold()
        if wanted:
            self.store.put(self.format.pointer, wanted)
        else:
            self.store.delete([self.format.pointer])

    def _ship(
        self,
        files: list[OutFile],
        version: int,
        base: int | None,
        source: str,
        full: Checkpoint | None = None,
    ) -> MirroredVersion:
        sizes = []
        for file in files:
            with os_errors("cannot read", file.path):
                sizes.append(file.path.stat().st_size)
        keys = [file.key for file in files]
        name = keys[0].partition("/")[0] if self.format.has_folders else keys[-1]
        self._begin_writing(name, keys, version)

        # What failed is raised here, before anything is committed.
        upload_all(files[:-1], self._upload, self._between)
        if full is not None:
            # Uploaded from where they lie.
            full.check_unchanged()
        self._commit(files[-1], sizes[-1])
        written = MirroredVersion(version, base, name, source, keys, sum(sizes))
        self._held.save(versions=[*self.record.versions, written], writing="")
        self.prune()
        return written

    def _upload(self, file: OutFile) -> None:
        self._held.hold()
        self.store.put_file(file.key, file.path)

    def _commit(self, file: OutFile, size_bytes: int) -> None:
        """Put the file that makes a version exist; a small one of another holder's stays."""
        if size_bytes > _MAX_COMMIT_BYTES or file.key == self.format.pointer:
            self._upload(file)
            return
        with os_errors("cannot read", file.path):
            data = file.path.read_bytes()
        self._held.hold()
        try:
            self.store.put_if_absent(file.key, data)
        except AlreadyExists:
            self._held.hold()
            # It may be this one's own, of an attempt whose answer was lost.
            if self.store.get(file.key, limit_bytes=_MAX_COMMIT_BYTES) != data:
                raise

    def _begin_writing(self, name: str, keys: list[str], version: int) -> None:
        """Make sure of the place, and say what is being written: whose it is, if it is cut short.

        Raises:
            AlreadyExists: The destination is past that version, or holds something else there.
        """
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
            self._held.hold()
            self._clear(self.record.writing)
        if self.record.writing != name:
            self._refuse_existing(name, keys)
            self._held.save(writing=name)

    def _refuse_existing(self, name: str, keys: list[str]) -> None:
        """Refuse to write among what lay there before."""
        named = {key for row in self.record.versions for key in row.keys}
        if self._is_begun():
            # Found free, or ours, before the first version was begun.
            named.add(self.format.pointer)
        others = [key for key in keys if not key.startswith(f"{name}/") and key not in named]
        there = [key for key in others if self._exists(key)]
        if not there and self.format.has_folders:
            there = [entry.key for entry in self.store.list(f"{name}/")][:1]
        if there:
            # What another one wrote a moment ago is a matter of who the holder is.
            self._held.hold()
            raise AlreadyExists(
                f"{self.store.url}/{there[0]} exists, and this copy's record does not name it",
                hint="Give another destination",
                key=there[0],
            )

    def _is_begun(self) -> bool:
        return bool(self.record.versions or self.record.writing)

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
        self.check_pointer()
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
