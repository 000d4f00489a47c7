"""A bounded map over a few threads, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from thinwire.errors import InvalidArgument

_T = TypeVar("_T")
_R = TypeVar("_R")


def map_in_order(function: Callable[[_T], _R], items: Sequence[_T], workers: int) -> Iterator[_R]:
    """Like ``map`` on ``workers`` threads with a bounded number of results waiting."""
    if workers < 1:
        raise InvalidArgument(f"workers is {workers}", hint="Choose 1 or more")
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[_R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
