"""Which version a module holds, and whether it may be used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.errors import BaseUnusable
from thinwire.follow.sink import Mark
from thinwire.stream.version import Version
from thinwire.torch.sink_lock import UpdateLock
from thinwire.torch.sink_writes import UpdateTimes


class LiveVersion:
    """The version that a module holds, all of it, for many readers or one writer.

    Args:
        lock: Keeps them apart.
        update_timeout_s: How long a writer waits for readers.

    Attributes:
        mark: The version; None: the module holds none, or is not known to.
        last_update: What the last update took.
    """

    def __init__(self, lock: UpdateLock, update_timeout_s: float) -> None:
        self._lock = lock
        self._update_timeout_s = update_timeout_s
        self._failure = "it holds no version yet"
        self.mark: Mark | None = None
        self.last_update: UpdateTimes | None = None

    @contextmanager
    def reading(self, timeout_s: float | None = None) -> Iterator[Version]:
        """Use the module; yields the version that it holds.

        Raises:
            BaseUnusable: It holds none.
            Deadline: An update took longer than ``timeout_s``.
        """
        with self._lock.reading(timeout_s):
            if self.mark is None:
                raise BaseUnusable(
                    f"the module must not be used: {self._failure}",
                    hint="Have the follower catch up first",
                )
            yield self.mark.to_version()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep readers away.

        Raises:
            Deadline: They did not end in time.
        """
        with self._lock.writing(self._update_timeout_s):
            yield

    @contextmanager
    def updating(self, start_s: float, word_count: int) -> Iterator[None]:
        """Keep readers away, and note what that took, where the block does not fail.

        Args:
            start_s: When preparing the update began.
            word_count: Words that it exchanges.

        Raises:
            Deadline: They did not end in time.
        """
        asked_s = time.perf_counter()
        with self.alone():
            alone_s = time.perf_counter()
            yield
            done_s = time.perf_counter()
        self.last_update = UpdateTimes(
            asked_s - start_s, alone_s - asked_s, done_s - alone_s, word_count
        )

    def close(self, reason: str) -> None:
        """The module holds no whole version, or is not known to."""
        self._failure = reason
        self.mark = None
