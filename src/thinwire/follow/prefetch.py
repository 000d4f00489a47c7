"""Work on a thread of its own, beside what the caller does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

_T = TypeVar("_T")


def ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The items, each made while the one before is used; errors come where they belong."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="thinwire-fetch") as pool:
        pending = pool.submit(next, items, end)
        while (item := pending.result()) is not end:
            pending = pool.submit(next, items, end)
            yield item  # type: ignore[misc]


class Beside(Generic[_T]):
    """A call on a thread of its own, which ends with :meth:`result`."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._found: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-look")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:
            self._error = error

    def result(self) -> _T:
        """What the call gave, or raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]
