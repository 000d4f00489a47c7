"""A store in a folder, for tests, one machine, or a shared file system.

Not obstore's ``LocalStore``, which names a file before its bytes are on disk and never syncs: after
a power cut a manifest could exist and be empty. Here an object is written and synced under a name
nobody reads, gets its own name by a link or a rename, and the folders that changed are synced
before the call returns.

What a killed writer leaves lies in one hidden folder, is never listed, and is removed by a later
writer once it is a day old. Links to folders are not followed by listings.

A folder that was there and is not is a store that is away: see ``RootFolder``.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from thinwire.errors import (
    AlreadyExists,
    NotFound,
    StoreError,
    ThinwireError,
    UnsafeStore,
    from_os_error,
)
from thinwire.store.root_folder import STAGING, RootFolder, make_folders, sync_folder
from thinwire.store.store import (
    Entry,
    check_key,
    check_prefix,
    check_range,
    key_fault,
    regular_size,
    too_large,
    too_short,
)

_ABANDONED_S = 86_400.0
_COPY_BYTES = 1 << 20
# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NOT_AN_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# A delete may remove a folder that has become empty just before a file gets its name in it.
_PLACE_TRIES = 100


class FileStore:
    """Objects as files below ``root``, made by the first write where it was not there before."""

    def __init__(self, root: Path) -> None:
        self._folder = RootFolder(root)
        self._root = self._folder.path
        self._swept = False

    @property
    def url(self) -> str:
        """The folder as a ``file://`` URL."""
        return self._root.as_uri()

    def __repr__(self) -> str:
        return f"FileStore({self.url!r})"

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        with self._opened(key) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > limit_bytes:
                raise too_large(self.url, key, size_bytes, limit_bytes)
            # One byte more than there should be; not limit_bytes, for which memory would be taken.
            data = file.read(size_bytes + 1)
        if len(data) > limit_bytes:
            raise too_large(self.url, key, len(data), limit_bytes)
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        check_range(start, stop)
        with self._opened(key) as file:
            if os.fstat(file.fileno()).st_size < stop:
                raise too_short(self.url, key, start, stop)
            file.seek(start)
            data = file.read(stop - start)
        if len(data) < stop - start:
            raise too_short(self.url, key, start, stop)
        return data

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        with self._errors("write", key), self._staged(key, lambda file: _write(file, data)) as made:
            self._place(made, key, os.replace)

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``."""
        source = _open_source(path)
        with (
            source,
            self._errors("write", key),
            self._staged(key, lambda file: _copy(source, file)) as made,
        ):
            self._place(made, key, os.replace)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``; a hard link decides, which also holds on NFS."""
        with (
            self._errors("create", key),
            self._staged(key, lambda file: _write(file, data)) as made,
        ):
            self._place(made, key, _link)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``; folder by folder, so the first entries come at once."""
        check_prefix(prefix)
        yield from self._walk(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``; folders that become empty go too."""
        for key in keys:
            check_key(key)
            path = self._root / key
            with self._errors("delete", key):
                self._refuse_links(key)
                try:
                    path.unlink()
                except _NOT_AN_OBJECT:
                    self._folder.check_there()
                    continue
                except PermissionError:
                    # What some systems answer for a folder.
                    if not path.is_dir():
                        raise
                    continue
                self._remove_empty(path.parent)

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except ThinwireError:
            raise
        except FileExistsError:
            raise AlreadyExists(
                f"cannot {doing} {key} in {self.url}: it exists already", key=key, url=self.url
            ) from None
        except NotADirectoryError as error:
            raise StoreError(
                f"cannot {doing} {key} in {self.url}: a part of it is an object, not a folder",
                hint="Use another URL or key; on a file system no object lies below another",
                key=key,
                url=self.url,
            ) from error
        except OSError as error:
            self._folder.explain(error)
            raise from_os_error(error, f"cannot {doing} {key} in", self.url) from error

    @contextmanager
    def _opened(self, key: str) -> Iterator[BinaryIO]:
        check_key(key)
        with self._errors("read", key):
            try:
                # O_NONBLOCK: opening a pipe must not wait for a writer.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                descriptor = os.open(self._root / key, flags)
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.close(descriptor)
                    raise IsADirectoryError
            except _NOT_AN_OBJECT:
                self._folder.check_there()
                raise NotFound(
                    f"cannot read {key} in {self.url}: there is no such object",
                    hint="Check the URL and the key",
                    key=key,
                    url=self.url,
                ) from None
            with os.fdopen(descriptor, "rb") as file:
                if not self._folder.was_seen:
                    self._folder.check_there()
                yield file

    @contextmanager
    def _staged(self, key: str, fill: Callable[[BinaryIO], None]) -> Iterator[Path]:
        """A finished, synced file that has no key yet; gone afterwards under that name."""
        check_key(key)
        self._refuse_links(f"{STAGING}/x")
        self._refuse_links(key)
        folder = self._folder.make_staging()
        self._sweep(folder)
        path = folder / secrets.token_hex(12)
        try:
            with path.open("xb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _refuse_links(self, key: str) -> None:
        """Refuse to write or delete through a link, which may lead out of the store."""
        folder = self._root
        for segment in key.split("/")[:-1]:
            folder = folder / segment
            if folder.is_symlink():
                raise StoreError(
                    f"{folder} is a link: writing there could change files outside of {self.url}",
                    hint="Replace it by a folder; the URL itself may lead through links",
                    key=key,
                    url=self.url,
                )

    def _sweep(self, folder: Path) -> None:
        """Remove, once per store, what writers that were killed have left."""
        if self._swept:
            return
        self._swept = True
        with suppress(OSError), os.scandir(folder) as found:
            for entry in found:
                if entry.stat(follow_symlinks=False).st_mtime < time.time() - _ABANDONED_S:
                    Path(entry.path).unlink(missing_ok=True)

    def _place(self, made: Path, key: str, name: Callable[[Path, Path], None]) -> None:
        target = self._root / key
        for tries_left in reversed(range(_PLACE_TRIES)):
            try:
                make_folders(target.parent, self._root)
                name(made, target)
            except FileNotFoundError:
                if tries_left and made.exists():
                    continue
                # What was written is not where it is to be named: that folder is another one.
                self._remove_empty(target.parent)
                raise
            except OSError as error:
                explained = self._explained(error, key, target)
                if explained is None:
                    raise
                raise explained from error
            break
        # The object may have been deleted already, and its folder with it.
        with suppress(FileNotFoundError):
            sync_folder(target.parent)
        if not self._folder.was_seen:
            self._folder.check_there()

    def _explained(self, error: OSError, key: str, target: Path) -> StoreError | None:
        if isinstance(error, IsADirectoryError) or (
            isinstance(error, FileExistsError) and target.is_dir()
        ):
            return StoreError(
                f"cannot write {key} in {self.url}: it is a folder, which holds other objects",
                hint="Use another URL or key; on a file system no object lies below another",
                key=key,
                url=self.url,
            )
        if isinstance(error, _NoLinksError):
            return UnsafeStore(
                f"cannot create {key} in {self.url}: this file system has no hard links",
                hint="Use another file system, or open the store with single_writer=True"
                " when there is only ever one publisher",
                key=key,
                url=self.url,
            )
        return None

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _walk(self, prefix: str, after: str) -> Iterator[Entry]:
        if prefix < after and not after.startswith(prefix):
            return
        for name, is_folder in self._names(prefix):
            key = prefix + name
            if key_fault(key) is not None:
                continue
            if is_folder:
                yield from self._walk(f"{key}/", after)
            elif key > after:
                # Without the name: it may have been deleted meanwhile.
                with suppress(NotFound), self._errors("list", key):
                    status = (self._root / key).stat()
                    if stat.S_ISREG(status.st_mode):
                        yield Entry(key, status.st_size, status.st_mtime)

    def _names(self, prefix: str) -> Sequence[tuple[str, bool]]:
        """The names in a folder in the order of their keys: a folder sorts as its name and "/"."""
        try:
            with self._errors("list", prefix), os.scandir(self._root / prefix) as found:
                names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        except StoreError as error:
            if isinstance(error, NotFound) or isinstance(error.__cause__, NotADirectoryError):
                return []
            raise
        if not names or not self._folder.was_seen:
            with self._errors("list", prefix):
                self._folder.check_there()
        return sorted(names, key=lambda item: f"{item[0]}/" if item[1] else item[0])


def _open_source(path: Path) -> BinaryIO:
    regular_size(path)
    try:
        return path.open("rb")
    except OSError as error:
        raise from_os_error(error, "cannot read", path) from error


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _copy(source: BinaryIO, file: BinaryIO) -> None:
    while piece := source.read(_COPY_BYTES):
        file.write(piece)


class _NoLinksError(OSError):
    """The file system makes no hard links."""


def _link(made: Path, target: Path) -> None:
    try:
        os.link(made, target)
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost and asked for again.
        if made.stat().st_nlink < 2 or not made.samefile(target):
            raise
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise _NoLinksError from error
        raise
