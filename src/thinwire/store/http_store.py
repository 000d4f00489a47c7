"""The read side of a store over HTTP, as ``thinwire relay`` serves it.

Objects are read, whole or in ranges, and listed. Written are followers' leases only: whoever
publishes or maintains a stream writes to the bucket itself.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlencode

from thinwire.errors import (
    AccessDenied,
    ChecksumMismatch,
    Corrupt,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    SignatureInvalid,
    StoreError,
    ThinwireError,
    Truncated,
    Unavailable,
)
from thinwire.store.http_client import (
    DEFAULT_TIMEOUTS,
    MAX_ERROR_BYTES,
    Answer,
    HttpClient,
    Timeouts,
)
from thinwire.store.http_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, token_for
from thinwire.store.store import (
    MAX_KEY_BYTES,
    Entry,
    check_key,
    check_prefix,
    check_range,
    key_fault,
    regular_size,
    too_large,
    too_short,
)

# One page of a listing.
MAX_PAGE_BYTES = 8 << 20
# Of a whole listing: a stream has some thousand keys in a folder.
MAX_LISTED = 1_000_000
# What a relay says of an object that is not there: any other 404 is of something else, such as
# another server or a name that was misspelt.
ABSENT_HEADER = "thinwire-absent"
# How old a relay's knowledge is, while it cannot ask its store.
AGE_HEADER = "thinwire-age-s"
_LEASES = "leases/"
_SAID_CHARS = 200
_PAST_THE_END = 416
_BUSY = {408, 425, 429, 500, 502, 503, 504}
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(?:\d{1,19}|\*)")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")
# What a server may say that it found wrong with what it has; of others only the status counts.
_FOUND_WRONG: dict[str, type[ThinwireError]] = {
    cls.code: cls
    for cls in (ChecksumMismatch, Truncated, Corrupt, LimitExceeded, SignatureInvalid, AccessDenied)
}


_Page = tuple[list[Entry], str | None]


def open_http(
    parts: SplitResult, environment: Mapping[str, str], timeouts: Timeouts = DEFAULT_TIMEOUTS
) -> HttpStore:
    """The store at ``http[s]://HOST[:PORT][/PATH]``.

    Args:
        parts: The URL's, which hold no secret.
        environment: ``THINWIRE_HTTP_TOKEN``, or ``THINWIRE_HTTP_TOKEN_FILE`` for a file that holds
            it.
        timeouts: When to give up.

    Raises:
        InvalidArgument: It is no such URL, or the token is none.
        StoreError: The token's file cannot be read.
    """
    try:
        is_usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_usable = False
    path = unquote(parts.path).strip("/")
    if not is_usable or (path and key_fault(path) is not None):
        raise InvalidArgument(
            f"this {parts.scheme.lower()}:// URL names no server",
            hint="Write http://HOST:PORT or http://HOST:PORT/NAME",
        )
    return HttpStore(parts, token_for(parts, environment), timeouts)


class HttpStore:
    """Objects behind a relay.

    Args:
        parts: Of its URL; see :func:`open_http`.
        token: The bearer token; empty: none.
        timeouts: When to give up.
    """

    def __init__(
        self, parts: SplitResult, token: str = "", timeouts: Timeouts = DEFAULT_TIMEOUTS
    ) -> None:
        path = quote(unquote(parts.path).strip("/"))
        self._root = f"/{path}" if path else ""
        self._url = f"{parts.scheme.lower()}://{parts.netloc}{self._root}"
        self._timeouts = timeouts
        self._client = HttpClient(parts, token)

    def with_timeouts(self, timeouts: Timeouts) -> HttpStore:
        """The same server, over the same connections, given up at other times."""
        other = copy.copy(self)
        other._timeouts = timeouts
        return other

    @property
    def url(self) -> str:
        """The server's address; it never holds a token."""
        return self._url

    def __repr__(self) -> str:
        return f"HttpStore({self._url!r})"

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        check_key(key)
        try:
            answer = self._ask("read", "GET", key, limit_bytes=limit_bytes)
        except LimitExceeded as error:
            size_bytes = error.context.get("size_bytes", limit_bytes + 1)
            raise too_large(self._url, key, size_bytes, limit_bytes) from None
        if answer.status != 200:
            raise self._refusal(answer, "read", key)
        return answer.body

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        check_key(key)
        check_range(start, stop)
        if start == stop:
            return self._look(key, stop)
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        try:
            answer = self._ask("read", "GET", key, limit_bytes=stop - start, headers=headers)
        except LimitExceeded:
            raise self._failed("read", key, "the server sent more than the range") from None
        if answer.status == _PAST_THE_END:
            raise too_short(self._url, key, start, stop)
        if answer.status != 206:
            if answer.status == 200:
                raise self._failed("read", key, "the server ignored the range that was asked for")
            raise self._refusal(answer, "read", key)
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if found is None or int(found[1]) != start or int(found[2]) >= stop:
            raise self._failed("read", key, "the server answered with another range than was asked")
        if len(answer.body) < stop - start:
            raise too_short(self._url, key, start, stop)
        return answer.body

    def _look(self, key: str, stop: int) -> bytes:
        answer = self._ask("read", "HEAD", key, limit_bytes=0)
        if answer.status != 200:
            raise self._refusal(answer, "read", key)
        length = answer.headers.get("content-length", "")
        if not length.isdecimal():
            raise self._failed("read", key, "the server does not say how large it is")
        if int(length) < stop:
            raise too_short(self._url, key, stop, stop)
        return b""

    def put(self, key: str, data: bytes) -> None:
        """See ``Store.put``; of a follower's lease only.

        Raises:
            StoreError: It is something else.
        """
        check_key(key)
        if not key.startswith(_LEASES):
            raise self._read_only("write", key)
        # What it says beside the status is of no use.
        answer = self._ask("write", "PUT", key, limit_bytes=MAX_ERROR_BYTES, body=data)
        if answer.status not in (200, 201, 204):
            raise self._refusal(answer, "write", key)

    def put_file(self, key: str, path: Path) -> None:
        """See ``Store.put_file``: always refused."""
        check_key(key)
        regular_size(path)
        raise self._read_only("write", key)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ``Store.put_if_absent``: always refused."""
        check_key(key)
        raise self._read_only("create", key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See ``Store.list``; page by page."""
        check_prefix(prefix)
        at: str | None = after
        count = 0
        while at is not None:
            entries, at = self._page(prefix, at)
            count += len(entries)
            if count > MAX_LISTED:
                raise LimitExceeded(
                    f"{self._named(prefix)} lists more than {MAX_LISTED} objects",
                    hint="It is no stream, or the server makes names up",
                )
            yield from entries

    def _page(self, prefix: str, after: str) -> _Page:
        query = urlencode({"prefix": prefix, "after": after})
        answer = self._request("list", prefix, "GET", f"/list?{query}", MAX_PAGE_BYTES)
        if answer.status != 200:
            raise self._refusal(answer, "list", prefix)
        try:
            page = json.loads(answer.body)
            entries = [_entry(item) for item in page["entries"]]
            following = page["next"]
            before = after
            for entry in entries:
                _check_listed(entry.key, prefix, before)
                before = entry.key
            # Else pages without entries would never end.
            is_sound = following is None or (bool(entries) and following == entries[-1].key)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._failed("list", prefix, "the server's answer makes no sense") from None
        if not is_sound:
            raise self._failed("list", prefix, "the next page does not follow this one")
        return entries, following

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``; of followers' leases only.

        Raises:
            StoreError: It is something else.
        """
        for key in keys:
            check_key(key)
            if not key.startswith(_LEASES):
                raise self._read_only("delete", key)
            answer = self._ask("delete", "DELETE", key, limit_bytes=MAX_ERROR_BYTES)
            if answer.status not in (200, 204, 404):
                raise self._refusal(answer, "delete", key)

    def _ask(
        self,
        doing: str,
        method: str,
        key: str,
        *,
        limit_bytes: int,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        return self._request(doing, key, method, f"/o/{quote(key)}", limit_bytes, body, headers)

    def _request(
        self,
        doing: str,
        key: str,
        method: str,
        target: str,
        limit_bytes: int,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        try:
            return self._client.request(
                method,
                f"{self._root}{target}",
                limit_bytes=limit_bytes,
                timeouts=self._timeouts,
                body=body,
                headers=headers,
            )
        except StoreError as error:
            raise type(error)(
                f"cannot {doing} {self._named(key)}: {error.message}",
                hint=error.hint,
                key=key,
                url=self._url,
            ) from None

    def _refusal(self, answer: Answer, doing: str, key: str) -> ThinwireError:
        """The error for a status that is no success."""
        status = answer.status
        named = f"cannot {doing} {self._named(key)}"
        context: dict[str, Any] = {"key": key, "url": self._url, "status": status}
        if status == 404 and ABSENT_HEADER in answer.headers:
            return NotFound(
                f"{named}: there is no such object",
                hint="Check the URL and the key",
                age_s=_seconds(answer, AGE_HEADER),
                **context,
            )
        if status in (401, 403):
            hint = "See the server's file of tokens"
            if not self._client.has_token:
                hint = f"Set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}"
            said = _said(answer.body)
            return AccessDenied(
                f"{named}: the server refused access (HTTP {status}{said and ': '}{said})",
                hint=hint,
                **context,
            )
        is_judged = status == 502 and doing == "read"
        found = _FOUND_WRONG.get(_code(answer.body)) if is_judged else None
        if found is not None:
            return found(
                f"{named}: the server cannot have it as it must be ({found.code})",
                hint="See the server's log; `thinwire fsck` shows what is wrong with the stream",
                **context,
            )
        if status in _BUSY:
            return Unavailable(
                f"{named}: the server has no answer now (HTTP {status})",
                hint="Try again later",
                retry_after_s=_seconds(answer, "retry-after"),
                **context,
            )
        return StoreError(
            f"{named}: the server refused the request (HTTP {status})",
            hint="Check that the URL is that of a relay, with the stream's name there: "
            "http://HOST:PORT/NAME",
            **context,
        )

    def _failed(self, doing: str, key: str, reason: str) -> StoreError:
        return StoreError(
            f"cannot {doing} {self._named(key)}: {reason}",
            hint="Check the URL, and proxies between here and the server",
            key=key,
            url=self._url,
        )

    def _read_only(self, doing: str, key: str) -> StoreError:
        return StoreError(
            f"cannot {doing} {self._named(key)}: what is served over HTTP can only be read",
            hint="Publish to, and maintain, the bucket itself",
            key=key,
            url=self._url,
        )

    def _named(self, key: str) -> str:
        return f"{key} in {self._url}" if key else self._url


def _seconds(answer: Answer, name: str) -> float | None:
    """A number of seconds in a header; None: there is none."""
    text = answer.headers.get(name, "")
    return float(text) if _SECONDS.fullmatch(text) else None


def _code(body: bytes) -> str:
    return _told(body, "code")


def _said(body: bytes) -> str:
    """What a server says that is wrong: one short line, whatever it sent."""
    text = _told(body, "message")[:_SAID_CHARS]
    return "".join(c if c.isprintable() else " " for c in text)


def _told(body: bytes, name: str) -> str:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(body)["error"][name])
    return ""


def _entry(item: Any) -> Entry:
    key, size_bytes, modified_s = item
    is_entry = (
        isinstance(key, str)
        and type(size_bytes) is int
        and type(modified_s) in (int, float)
        and size_bytes >= 0
    )
    if not is_entry or len(key) > MAX_KEY_BYTES or key_fault(key) is not None:
        raise ValueError("no entry")
    return Entry(key, size_bytes, float(modified_s))


def _check_listed(key: Any, prefix: str, before: str) -> None:
    if not isinstance(key, str) or not key.startswith(prefix) or key <= before:
        raise ValueError("a key that does not belong there")
