"""A stream that was there and is not: its store is away."""

from __future__ import annotations

import logging
import time
from types import TracebackType

from thinwire.errors import NotFound, StoreError, Unavailable
from thinwire.store import Store
from thinwire.store.wrappers import StoreWrapper
from thinwire.stream import keys

_LOG = logging.getLogger("thinwire")


class KnownStore(StoreWrapper):
    """Where no stream lies, none was made yet, or the store is away: it knows which of the two.

    It is away where a stream was read before, or is expected. A store whose folder is not mounted,
    or whose address is wrong, looks empty.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._was_read = self._is_expected = False
        self._holder = ""

    def expect(self, holder: object = "") -> None:
        """A stream is known to have been there, be it by another process.

        Args:
            holder: What holds a version of it, or knows it otherwise, such as a folder.
        """
        self._is_expected = True
        self._holder = str(holder) or self._holder

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """See ``Store.get``.

        Raises:
            Unavailable: The stream's own record is not there, and was.
        """
        try:
            data = super().get(key, limit_bytes=limit_bytes)
        except NotFound as error:
            if key != keys.STREAM or not (self._was_read or self._is_expected):
                raise
            raise self._away() from error
        self._was_read |= key == keys.STREAM
        return data

    def _away(self) -> Unavailable:
        what = f"there was a stream at {self.url}, and there is none now"
        hint = "Is the store mounted, and the URL right? No other stream is made in its place"
        if self._holder:
            hint += f". To begin or follow another one, give another folder than {self._holder}"
            if not self._was_read:
                what = f"{self._holder} belongs to a stream, and there is none at {self.url}"
        return Unavailable(what, hint=hint, url=self.url)


class Outage:
    """Says once that what failed for a while works again; that it fails is told by whoever asked.

    Args:
        url: Of what.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._since_s: float | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now_s = time.monotonic()
        if isinstance(error, StoreError) and error.retryable:
            self._since_s = now_s if self._since_s is None else self._since_s
        elif error is None and self._since_s is not None:
            _LOG.warning("%s can be used again, after %.0f s", self._url, now_s - self._since_s)
            self._since_s = None
