"""The read side of a relay, with time limits of one that is near."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from thinwire.errors import InvalidArgument
from thinwire.store import Store
from thinwire.store.http_client import Timeouts
from thinwire.store.http_store import open_http
from thinwire.store.http_token import TOKEN_FILE_VARIABLE
from thinwire.store.wrappers import StoreWrapper
from thinwire.stream.places import DATA, place_of

# A relay is near: where it does not take a connection soon, it is away. Its records are small, and
# it gives up on its store by itself. Data may come over a thin link that many share.
_RECORDS = Timeouts(3.0, 6.0, head_s=6.0, patience_s=5.0, slowest_bytes_per_s=256 << 10)
_DATA = Timeouts(3.0, 15.0, head_s=15.0, patience_s=5.0, slowest_bytes_per_s=64 << 10)


def open_relay(url: str, token_file: Path | None = None) -> Store:
    """The read side of the relay at a URL; it retries nothing.

    Args:
        url: Where it is.
        token_file: A file with its bearer token; None: what the environment says.

    Raises:
        InvalidArgument: It is no ``http://`` or ``https://`` URL, or holds a secret; or the token
            is none.
        StoreError: The token's file cannot be read.
    """
    try:
        parts = urlsplit(url)
        is_plain = parts.username is None and parts.password is None and not parts.query
    except ValueError:
        is_plain = False
    if not is_plain or parts.scheme.lower() not in ("http", "https") or parts.fragment:
        raise InvalidArgument(
            "the relay's URL is no plain http:// or https:// URL",
            hint="Write http://HOST:PORT/NAME; tokens come from THINWIRE_HTTP_TOKEN_FILE",
        )
    given = os.environ if token_file is None else {TOKEN_FILE_VARIABLE: str(token_file)}
    records = open_http(parts, given, _RECORDS)
    return _ByKind(records, records.with_timeouts(_DATA))


class _ByKind(StoreWrapper):
    """Data with other time limits than records."""

    def __init__(self, records: Store, data: Store) -> None:
        super().__init__(records)
        self._data = data

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``."""
        return self._of(key).get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """See ``Store.get_range``."""
        return self._of(key).get_range(key, start, stop)

    def _of(self, key: str) -> Store:
        place = place_of(key)
        return self._data if place is not None and place.kind in DATA else self._store
