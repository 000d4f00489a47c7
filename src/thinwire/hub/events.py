"""Telling many listeners of one stream, each message made once; nobody waits for a slow one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

# A listener so far behind reads nothing; it comes again and begins with the head.
_MAX_QUEUED = 64
TICK_S = 1.0
_ALIVE_EVERY_TICKS = 15
_ALIVE = b": alive\n\n"


class Message(NamedTuple):
    """What listeners are told.

    Attributes:
        number: Of those about versions: rising, so that none is told twice, or too late. 0: none.
        data: An event, as it goes over the wire.
    """

    number: int
    data: bytes


class TooMany(Exception):
    """No more listeners are taken."""


class Ended(Exception):
    """No listeners are taken any more."""


class Ear:
    """One listener's messages; lives on the fan-out's event loop.

    Args:
        tick_count: When it began.
        hears_replicas: Whether it is told that replicas changed.
    """

    def __init__(self, tick_count: int, hears_replicas: bool) -> None:
        self.since_ticks = tick_count
        self.hears_replicas = hears_replicas
        self._queue: deque[Message] = deque()
        self._more = asyncio.Event()
        self._is_dropped = False
        self._last_number = 0

    def put(self, message: Message) -> None:
        """Queue a message; with too many there, the listener is dropped."""
        if self._is_dropped or 0 < message.number <= self._last_number:
            return
        if len(self._queue) >= _MAX_QUEUED:
            self.drop()
            return
        self._last_number = message.number or self._last_number
        self._queue.append(message)
        self._more.set()

    def drop(self) -> None:
        """Tell it nothing more."""
        self._is_dropped = True
        self._queue.clear()
        self._more.set()

    async def next(self) -> bytes | None:
        """What came since, as one piece; None: it was dropped."""
        await self._more.wait()
        if self._is_dropped:
            return None
        self._more.clear()
        data = b"".join(message.data for message in self._queue)
        self._queue.clear()
        return data


class Fanout:
    """Everybody who listens to one stream, by events or by long polls.

    All of it belongs to the event loop that last came with a listener, but for :meth:`announce`.

    Args:
        limit: How many may listen at once.
        on_tick: Called once a second while somebody listens to events.
    """

    def __init__(self, limit: int, on_tick: Callable[[], None]) -> None:
        self._limit = limit
        self._on_tick = on_tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ears: set[Ear] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._has_timer = False
        self._tick_count = 0
        self._replica_changes = 0
        self._is_ended = False

    @property
    def listening_count(self) -> int:
        """How many listen to events."""
        return len(self._ears)

    @property
    def waiting_count(self) -> int:
        """How many wait for a version."""
        return len(self._waiters)

    def listen(self, *, hears_replicas: bool = True) -> Ear:
        """Begin to listen to events.

        Args:
            hears_replicas: Whether those that replicas changed are among them.

        Raises:
            TooMany: Too many do.
            Ended: The hub is about to stop.
        """
        self._enter()
        ear = Ear(self._tick_count, hears_replicas)
        self._ears.add(ear)
        if not self._has_timer:
            self._has_timer = True
            asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return ear

    def leave(self, ear: Ear) -> None:
        """End listening."""
        self._ears.discard(ear)

    def wait(self) -> asyncio.Future[None]:
        """Done at the next version; to be given to :meth:`forget` in any case.

        Raises:
            TooMany: Too many wait.
            Ended: The hub is about to stop.
        """
        self._enter()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        return waiter

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """End waiting."""
        self._waiters.discard(waiter)

    def announce(self, message: Message) -> None:
        """Tell everybody of a version. From any thread."""
        self._call(self._announce, message)

    def end(self) -> None:
        """Let everybody go, and take nobody any more. From any thread."""
        self._is_ended = True
        self._call(self._let_go)

    def note_replicas(self, count: int) -> None:
        """So many replicas changed: told at the next tick."""
        self._replica_changes += count

    def _call(self, act: Callable[..., None], *given: Any) -> None:
        loop = self._loop
        if loop is not None:
            # A loop that was closed has nobody left to be told.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(act, *given)

    def _let_go(self) -> None:
        self._wake_waiters()
        for ear in self._ears:
            ear.drop()

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _announce(self, message: Message) -> None:
        # Long polls first: their followers have to ask again.
        self._wake_waiters()
        for ear in self._ears:
            ear.put(message)

    def _enter(self) -> None:
        if self._is_ended:
            raise Ended
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._ears.clear()
            self._waiters.clear()
            self._has_timer = False
        if len(self._ears) + len(self._waiters) >= self._limit:
            raise TooMany

    def _tick(self) -> None:
        """Once a second while somebody listens to events."""
        if not self._ears or asyncio.get_running_loop() is not self._loop:
            self._has_timer = False
            self._replica_changes = 0
            return
        self._tick_count += 1
        self._on_tick()
        if self._replica_changes:
            data = b'event: replicas\ndata: {"changed":%d}\n\n' % self._replica_changes
            self._replica_changes = 0
            for ear in self._ears:
                if ear.hears_replicas:
                    ear.put(Message(0, data))
        for ear in self._ears:
            if (self._tick_count - ear.since_ticks) % _ALIVE_EVERY_TICKS == 0:
                ear.put(Message(0, _ALIVE))
        asyncio.get_running_loop().call_later(TICK_S, self._tick)
