"""A store over obstore: S3 and what speaks it, Google, Azure, and memory.

obstore itself is imported inside: importing thinwire must stay cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import (
    NotFound,
    StoreError,
)
from thinwire.store.failures import CREATE, RangeBeyondEnd, calling
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

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_MIB = 1 << 20
# Parts of an upload in flight: enough for a fast link, little enough that a slow one (10 Mbit/s)
# sends them all before the read timeout, which counts from when a request starts.
_PARTS_AT_ONCE = 8
_PART_BYTES = 8 * _MIB
# S3 takes 10,000 parts.
_MAX_PARTS = 9_000
_READ_BYTES = 1 * _MIB
_LIST_PAGE = 1_000
_DELETE_PAGE = 1_000


class ObjectStore:
    """Objects of a bucket through an obstore client, which holds the credentials."""

    def __init__(self, client: Client, url: str) -> None:
        # obstore's own repr panics for some Azure stores and is never printed.
        self._client = client
        self._url = url

    @property
    def url(self) -> str:
        """The store's address, without credentials."""
        return self._url

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        import obstore

        check_key(key)

        def read() -> bytes:
            result = obstore.get(self._client, key)
            size_bytes = result.meta["size"]
            if size_bytes > limit_bytes:
                raise too_large(self._url, key, size_bytes, limit_bytes)
            data = _read_at_most(result, limit_bytes)
            if len(data) > limit_bytes:
                raise too_large(self._url, key, len(data), limit_bytes)
            return data

        return calling("read", key, self._url, read)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        import obstore

        check_key(key)
        check_range(start, stop)
        if start == stop:
            return self._look(key, stop)

        def read() -> bytes:
            # obstore refuses an answer that is not about this range before its body is read.
            result = obstore.get(self._client, key, options={"range": (start, stop)})
            return _read_at_most(result, stop - start)

        try:
            data = calling("read", key, self._url, read)
        except RangeBeyondEnd:
            data = b""
        if len(data) < stop - start:
            raise too_short(self._url, key, start, stop)
        if len(data) > stop - start:
            raise StoreError(
                f"cannot read {key} in {self._url}: the server sent more than the range",
                hint="Check the endpoint",
                key=key,
                url=self._url,
            )
        return data

    def _look(self, key: str, stop: int) -> bytes:
        import obstore

        meta = calling("read", key, self._url, lambda: obstore.head(self._client, key))
        if meta["size"] < stop:
            raise too_short(self._url, key, stop, stop)
        return b""

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``."""
        check_key(key)
        self._upload(key, data, len(data))

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``; at most 64 MiB lie in memory (more above 70 GiB)."""
        check_key(key)
        self._upload(key, path, regular_size(path))

    def _upload(self, key: str, source: bytes | Path, size_bytes: int) -> None:
        import obstore

        part_bytes = max(_PART_BYTES, -(-size_bytes // _MAX_PARTS))
        calling(
            "write",
            key,
            self._url,
            lambda: obstore.put(
                self._client,
                key,
                source,
                use_multipart=size_bytes > part_bytes,
                chunk_size=part_bytes,
                max_concurrency=_PARTS_AT_ONCE,
            ),
        )

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``; one plain request, so 5 GiB at most."""
        import obstore

        check_key(key)
        calling(CREATE, key, self._url, lambda: obstore.put(self._client, key, data, mode="create"))

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``; the whole listing is taken and sorted before the first entry."""
        check_prefix(prefix)
        yield from calling("list", prefix, self._url, lambda: self._listing(prefix, after))

    def _listing(self, prefix: str, after: str) -> Sequence[Entry]:
        import obstore

        if prefix < after and not after.startswith(prefix):
            return []
        offset = server_offset(prefix, after)
        # Some servers sort by folder, not by key, and Azurite ignores the offset: done again here.
        pages = obstore.list(
            self._client, prefix.rstrip("/") or None, offset=offset, chunk_size=_LIST_PAGE
        )
        entries = (_entry(meta) for page in pages for meta in page)
        return sorted(
            entry
            for entry in entries
            if entry.key.startswith(prefix) and entry.key > after and key_fault(entry.key) is None
        )

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        left = iter(keys)
        while batch := list(islice(left, _DELETE_PAGE)):
            for key in batch:
                check_key(key)
            self._delete_batch(batch)

    def _delete_batch(self, batch: Sequence[str]) -> None:
        import obstore

        what = batch[0] if len(batch) == 1 else f"{len(batch)} objects ({batch[0]}, ...)"
        try:
            calling("delete", what, self._url, lambda: obstore.delete(self._client, batch))
        except NotFound:
            # Some stores stop at the first that is missing: go on one by one.
            if len(batch) > 1:
                for key in batch:
                    self._delete_batch([key])


def server_offset(prefix: str, after: str) -> str | None:
    """What to ask a server to start behind, so that it leaves out no key beyond ``after``.

    Servers that keep folders (SeaweedFS) compare name by name: asked for what follows "a.b" they
    leave out "a/x" and all of the folder "a", though "." sorts before "/". So the offset is cut
    before the shortest name such a folder could have; that lists a few more entries, not all.
    """
    if not after.startswith(prefix):
        return None
    name = after.rstrip("/")
    cut = next(
        (
            index
            for index in range(len(prefix) + 1, len(name))
            if name[index] < "/" and name[index - 1] != "/"
        ),
        len(name),
    )
    offset = name[: cut - 1]
    while offset.endswith("/"):
        offset = offset.rstrip("/")[:-1]
    return offset if len(offset) > len(prefix) else None


def _entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _read_at_most(result: Any, limit_bytes: int) -> bytes:
    """The body, or as much of it as shows that it is longer than ``limit_bytes``."""
    pieces = []
    read_bytes = 0
    for piece in result.stream(min_chunk_size=_READ_BYTES):
        pieces.append(bytes(piece))
        read_bytes += len(piece)
        if read_bytes > limit_bytes:
            break
    return b"".join(pieces)
