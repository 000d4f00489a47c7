"""A bounded map over a few threads, in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from thinwire.errors import InvalidArgument

# More threads than this wait for memory, not for a processor.
MAX_DEFAULT_WORKERS = 8

_T = TypeVar("_T")
_R = TypeVar("_R")


def default_workers() -> int:
    """One for each processor that this process may use, at most ``MAX_DEFAULT_WORKERS``."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MAX_DEFAULT_WORKERS, usable or 1)


def map_in_order(function: Callable[[_T], _R], items: Iterable[_T], workers: int) -> Iterator[_R]:
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
