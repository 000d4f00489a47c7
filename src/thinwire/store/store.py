"""What a store is, and which keys it takes.

Keys are relative to the store's URL: segments joined by "/". A key exists whole or not at all, so
a reader never sees half an object. No key may lie below another one ("a" and "a/b"): a file system
has no place for both. Every method may be called from many threads at once.

Every method may also raise ``AccessDenied`` (the credentials do not suffice), ``Unavailable`` (no
answer now; retryable; a write may or may not have happened) or plain ``StoreError``. ``NotFound``
says that the store is there and the key is not: where the store itself has gone, all that was in it
is ``Unavailable``, and no write makes it again.
"""

from __future__ import annotations

import stat
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from thinwire.errors import InvalidArgument, LimitExceeded, Truncated, from_os_error

# S3 takes 1024 bytes: this leaves room for the prefix in the store's URL.
MAX_KEY_BYTES = 900
# What file systems take for one name.
MAX_SEGMENT_BYTES = 255
# Names of thinwire's own beside the keys, such as a folder store's half-written files.
RESERVED_PREFIX = ".thinwire-"


class Entry(NamedTuple):
    """One object in a listing; ``modified_s`` is in unix seconds by the store's own clock."""

    key: str
    size_bytes: int
    modified_s: float


class Store(Protocol):
    """Objects by key. See the module's docstring for what holds for every method."""

    @property
    def url(self) -> str:
        """The store's address, for messages; it never holds a credential."""

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """The whole object.

        Raises:
            NotFound: There is no such key.
            LimitExceeded: It is larger than ``limit_bytes``; no more than that was read.
        """

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Exactly the bytes ``[start, stop)`` of the object; an empty range just looks.

        Raises:
            NotFound: There is no such key.
            Truncated: The object, or the answer, ends before ``stop``.
        """

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing what was there."""

    def put_file(self, key: str, path: Path) -> None:
        """Write a file of any size as an object, replacing what was there, in bounded memory."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object; of many that try at once exactly one succeeds.

        Raises:
            AlreadyExists: The key exists; its object is untouched. Through retries it may be this
                call's own earlier attempt whose answer was lost: compare the bytes to know.
            UnsafeStore: The store says that it cannot do this.
        """

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """The objects whose key starts with ``prefix`` ("" or ending in "/"), sorted by key.

        Only keys greater than ``after``. Objects written or deleted meanwhile may be missed.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are fine. After an error some may be gone."""


def check_key(key: str) -> None:
    """Refuse a key that some store would not take, or take for another one.

    Raises:
        InvalidArgument: It is empty, too long, or has a segment that is empty, ".", "..",
            reserved, or holds a backslash, a control character or no Unicode text.
    """
    fault = key_fault(key)
    if fault is not None:
        raise InvalidArgument(
            f"the key {key[:200]!r} {fault}",
            hint="Use plain names joined by single slashes",
            key=key,
        )


def check_prefix(prefix: str) -> None:
    """Refuse a listing prefix that is neither "" nor a key and "/".

    Raises:
        InvalidArgument: It is not.
    """
    if not prefix:
        return
    if not prefix.endswith("/"):
        raise InvalidArgument(
            f"the prefix {prefix[:200]!r} does not end in '/'",
            hint="List whole folders and filter the entries",
            prefix=prefix,
        )
    check_key(prefix[:-1])


def check_range(start: int, stop: int) -> None:
    """Refuse a range that is none.

    Raises:
        InvalidArgument: ``start`` is negative or beyond ``stop``.
    """
    if not 0 <= start <= stop:
        raise InvalidArgument(
            f"[{start}, {stop}) is not a range of bytes", hint="Give 0 <= start <= stop"
        )


def regular_size(path: Path) -> int:
    """The size of a file that is to be uploaded.

    Raises:
        InvalidArgument: It is a folder, a device or a pipe.
        StoreError: It is missing or cannot be looked at.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise from_os_error(error, "cannot read", path) from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{path} is not a regular file", hint="Give a file", path=str(path))
    return status.st_size


def key_fault(key: str) -> str | None:
    """What is wrong with a key, or None."""
    # What can be printed has none of these; listings ask for each of their keys.
    if not key.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs") for c in key):
        return "has control characters or is not Unicode text"
    if "\\" in key:
        return "has a backslash"
    if len(key.encode()) > MAX_KEY_BYTES:
        return f"is longer than {MAX_KEY_BYTES} bytes"
    for segment in key.split("/"):
        if not segment:
            return "is empty or has an empty segment"
        if segment in (".", ".."):
            return "has a segment of dots"
        if segment.lower().startswith(RESERVED_PREFIX):
            return f"has a segment starting with {RESERVED_PREFIX!r}, which is reserved"
        if len(segment.encode()) > MAX_SEGMENT_BYTES:
            return f"has a segment longer than {MAX_SEGMENT_BYTES} bytes"
    return None


def too_large(url: str, key: str, size_bytes: int, limit_bytes: int) -> LimitExceeded:
    """The error for an object that is larger than the reader allows."""
    return LimitExceeded(
        f"{key} in {url} has {size_bytes} bytes, more than the {limit_bytes} allowed here",
        hint="It is not what it should be, or a limit must be raised",
        key=key,
        url=url,
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )


def too_short(url: str, key: str, start: int, stop: int) -> Truncated:
    """The error for an object, or an answer, that ends before the range does."""
    return Truncated(
        f"{key} in {url} ends before byte {stop} (asked for [{start}, {stop}))",
        hint="The object is cut or not the one meant; fetch or write it again",
        key=key,
        url=url,
        start=start,
        stop=stop,
    )
