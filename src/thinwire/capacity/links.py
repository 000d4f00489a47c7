"""A link whose flows share it evenly, in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Done = Callable[[float], None]


class SharedLink:
    """So many bytes a second, divided among the flows that are on it.

    Served bytes of a flow grow equally fast for all, so flows end in the order of the served bytes
    at which they do: a heap is enough, however many there are.

    Args:
        bytes_per_s: What it carries, together.
        most_bytes_per_s: What one flow gets at most.
    """

    def __init__(self, bytes_per_s: float, most_bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._most = most_bytes_per_s
        self._is_open = True
        self._flows: list[tuple[float, int, Done]] = []
        self._served = 0.0
        self._at_s = 0.0
        self._count = 0
        self.total_bytes = 0

    def add(self, now_s: float, size: int, done: Done) -> None:
        """Begin a flow; ``done`` is called by :meth:`end` with the time at which it ended."""
        self._move(now_s)
        self._count += 1
        self.total_bytes += size
        heapq.heappush(self._flows, (self._served + size, self._count, done))

    def open(self, now_s: float, *, is_open: bool) -> None:
        """Cut it off, or mend it: flows stop meanwhile and go on."""
        self._move(now_s)
        self._is_open = is_open

    def next_end_s(self) -> float | None:
        """When the next flow ends, if nothing else happens before; None: none does."""
        if not self._flows or not self._is_open:
            return None
        return self._at_s + max(0.0, self._flows[0][0] - self._served) / self._rate()

    def end(self, now_s: float) -> None:
        """End the flow that ends now."""
        self._move(now_s)
        at, _, done = heapq.heappop(self._flows)
        # Rounding must not leave the clock of a heavy link behind its flows.
        self._served = max(self._served, at)
        done(now_s)

    def _rate(self) -> float:
        return min(self._most, self._bytes_per_s / len(self._flows))

    def _move(self, now_s: float) -> None:
        if self._flows and self._is_open:
            self._served += (now_s - self._at_s) * self._rate()
        self._at_s = now_s
