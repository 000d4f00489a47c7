"""Objects on their way to a reader, block by block, however slow it is."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.relay.blocks import SPAN_BYTES, Block, Blocks
from thinwire.relay.files import LruFolder
from thinwire.relay.ranges import Span

_LOG = logging.getLogger("thinwire")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# What the blocks that readers are being sent may take, all readers together.
SENDING_BYTES = 256 << 20
# A reader that takes nothing has one of these, and another in its connection's buffer.
PIECE_BYTES = 64 << 10
_AHEAD_BYTES = 6 * SPAN_BYTES
# Where others wait, a reader that has not taken its block after so long has to come back.
_PATIENCE_S = 5.0
_SLOW_BYTES_PER_S = 1 << 20


@dataclass
class _Hold:
    """What one reader holds; ``since_s``: since when it is its turn to read, if it is."""

    size_bytes: int
    drop: Callable[[], object]
    since_s: float | None = None

    def begin(self) -> None:
        """The block is there: from now on the reader can be slow."""
        self.since_s = time.monotonic()


class Budget:
    """What readers hold in memory, each block counted once. For one event loop.

    Where it is used up, readers that have been slow for longest are dropped: they come back, and
    good ones do not wait for them.

    Args:
        limit_bytes: What all may hold; one reader alone always may.
    """

    def __init__(self, limit_bytes: int = SENDING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._numbers = itertools.count()
        self._holds: OrderedDict[int, _Hold] = OrderedDict()
        self._counts: dict[str, int] = {}
        self._freed = asyncio.Event()
        self.used_bytes = 0
        self.dropped_count = 0

    @asynccontextmanager
    async def holding(self, block: Block, drop: Callable[[], object]) -> AsyncIterator[_Hold]:
        """Hold a block meanwhile; ``drop`` ends the reader that does, once it was slow to read."""
        digest, size_bytes = block.digest, block.size_bytes
        while not self._has_room(digest, size_bytes):
            self._drop_slowest()
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._freed.wait()
        number = next(self._numbers)
        hold = self._holds[number] = _Hold(size_bytes, drop)
        self._counts[digest] = self._counts.get(digest, 0) + 1
        if self._counts[digest] == 1:
            self.used_bytes += size_bytes
        try:
            yield hold
        finally:
            del self._holds[number]
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest]
                self.used_bytes -= size_bytes
            self._freed.set()

    def _has_room(self, digest: str, size_bytes: int) -> bool:
        is_held = digest in self._counts
        return is_held or not self._counts or self.used_bytes + size_bytes <= self._limit_bytes

    def _drop_slowest(self) -> None:
        now_s = time.monotonic()
        for hold in list(self._holds.values()):
            patience_s = max(_PATIENCE_S, hold.size_bytes / _SLOW_BYTES_PER_S)
            if hold.since_s is not None and now_s - hold.since_s > patience_s:
                self.dropped_count += 1
                hold.drop()
                return


class Sending:
    """One object, or a range of it, as the answer to one request.

    Args:
        blocks: Where its blocks come from.
        files: Where they are kept.
        budget: What readers may hold.
        on_bytes: Told of what went out.
    """

    def __init__(
        self, blocks: Blocks, files: LruFolder, budget: Budget, on_bytes: Callable[[int], None]
    ) -> None:
        self._blocks = blocks
        self._files = files
        self._budget = budget
        self._on_bytes = on_bytes

    async def answer(
        self,
        what: Block,
        span: Span,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
    ) -> None:
        """Send it.

        Args:
            what: The object, as its first block.
            span: Which part of it.
            headers: Of the answer.
            receive: Tells when the reader goes.
            send: Takes the answer.

        Raises:
            ThinwireError: It cannot be had. Nothing was sent.
        """
        record = what.record
        numbers = range(span.start // record.block, -(-span.stop // record.block))
        if error := self._blocks.known_wrong(what.key, record, numbers):
            raise error
        start = {"type": "http.response.start", "status": 206 if span.is_part else 200,
                 "headers": headers}  # fmt: skip
        if not numbers:
            await send(start)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        task = asyncio.ensure_future(self._send(what, span, numbers, start, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _send(
        self, what: Block, span: Span, numbers: range, start: Message, send: Send
    ) -> None:
        own = asyncio.current_task()
        assert own is not None
        is_started = False
        for number in numbers:
            block = what._replace(number=number)
            async with self._budget.holding(block, own.cancel) as hold:
                try:
                    data = await self._block(block, numbers.stop)
                except ThinwireError as error:
                    if not is_started:
                        raise
                    # The reader sees that the answer broke off, and asks again.
                    _LOG.info("an answer breaks off: %s", error)
                    return
                if not is_started:
                    await send(start)
                    is_started = True
                hold.begin()
                low, high = block.record.span(number)
                view = memoryview(data)[max(span.start, low) - low : min(span.stop, high) - low]
                await self._pieces(view, number + 1 == numbers.stop, send)

    async def _block(self, block: Block, stop: int) -> bytes:
        flight = self._blocks.want(block, stop)
        if not flight.done():
            self._hasten(block, stop)
        return await asyncio.wrap_future(flight)

    def _hasten(self, block: Block, stop: int) -> None:
        """Have what follows fetched too: else each span would wait for a round trip."""
        if self._files.is_failing:
            return
        ahead_bytes = 0
        for number in range(block.number + 1, stop):
            following = block._replace(number=number)
            ahead_bytes += following.size_bytes
            if ahead_bytes > _AHEAD_BYTES:
                break
            self._blocks.hasten(following, stop)

    async def _pieces(self, view: memoryview, is_last: bool, send: Send) -> None:
        for at in range(0, len(view), PIECE_BYTES):
            piece = bytes(view[at : at + PIECE_BYTES])
            more = not is_last or at + PIECE_BYTES < len(view)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            self._on_bytes(len(piece))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
