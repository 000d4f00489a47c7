"""One long link, in user space: bytes wait for its delay both ways, are counted, and can be cut.

    python links.py '{"delay_s": 0.04, "bits_per_s": null, "routes": [...]}'

A route is `{"name": "s3", "listen": [host, port], "to": [host, port]}`: a TCP port on this side,
and where its connections lead. Commands come as lines of JSON on standard input: `{"do": "cut"}`,
`{"do": "restore"}`, `{"do": "count"}`; each is answered with a line of JSON, the counts so far. The
process ends with its standard input.

Delay: a chunk that is read now is written `delay_s` later, half a round trip; what waits may be as
large as `HELD_BYTES` a connection and direction, so a fast link stays fast. A new connection's
first bytes wait one round trip longer, as behind a handshake. Slow start and loss are not imitated.

Rate: where the kernel shapes the link (tbf), `bits_per_s` is null. Otherwise chunks of all
connections queue up for it here, each direction by itself.

A cut: nothing is delivered and nothing refused, as behind a dead cable. What was open is reset when
the link comes back.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

HELD_BYTES = 8 << 20
DIAL_TIMEOUT_S = 10.0
# Asked for more, the kernel gives less than it has: two reads of this size are as fast as one.
READ_BYTES = 256 << 10
# SO_LINGER with no time at all: closing sends a reset.
BREAKS = struct.pack("ii", 1, 0)


class Lane:
    """One direction of a link: when a chunk is through, and how many bytes were."""

    def __init__(self, delay_s: float, bits_per_s: float | None) -> None:
        self._delay_s = delay_s
        self._bits_per_s = bits_per_s
        self._free_s = 0.0

    def due_s(self, now_s: float, size_bytes: int) -> float:
        """When bytes that are ready now have arrived; they queue behind earlier ones."""
        if self._bits_per_s is None:
            return now_s + self._delay_s
        self._free_s = max(self._free_s, now_s) + size_bytes * 8 / self._bits_per_s
        return self._free_s + self._delay_s


class Link:
    """Both directions, and whether the link is cut. `up` is from the listening side."""

    def __init__(self, delay_s: float, bits_per_s: float | None) -> None:
        self.delay_s = delay_s
        self.lanes = {"up": Lane(delay_s, bits_per_s), "down": Lane(delay_s, bits_per_s)}
        self.counts: dict[str, dict[str, int]] = {}
        self.is_cut = False
        self.crossings: set[Crossing] = set()

    def count(self, route: str, direction: str, size_bytes: int) -> None:
        """Bytes arrived."""
        self.counts[route][direction] += size_bytes

    def cut(self) -> None:
        """From now on nothing arrives."""
        self.is_cut = True

    def restore(self) -> None:
        """Connections that met the cut are reset; new ones work."""
        for crossing in list(self.crossings):
            if self.is_cut:
                crossing.reset()
        self.is_cut = False


class Flow:
    """One direction of one connection."""

    def __init__(self, link: Link, route: str, direction: str, earliest_s: float) -> None:
        self._link, self._route, self._direction = link, route, direction
        self._earliest_s = earliest_s
        self._waiting: deque[tuple[float, bytes | None]] = deque()
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_full = False
        self.source: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None

    def take(self, data: bytes | None) -> None:
        """A chunk was read; None: that was the last."""
        now_s = asyncio.get_running_loop().time()
        size_bytes = len(data or b"")
        due_s = self._link.lanes[self._direction].due_s(now_s, size_bytes)
        self._waiting.append((max(due_s, self._earliest_s), data))
        self._held_bytes += size_bytes
        if self._held_bytes > HELD_BYTES and self.source is not None:
            self.source.pause_reading()
        self.arm()

    def arm(self) -> None:
        """Deliver what waits when it is due, if it can be delivered."""
        is_open = self.target is not None and not self._is_full and not self._link.is_cut
        if self._timer is None and self._waiting and is_open:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._waiting[0][0], self._deliver)

    def pause(self, is_full: bool) -> None:
        """Whoever reads from the target is slow, or is not any more."""
        self._is_full = is_full
        self.arm()

    def close(self) -> None:
        """Nothing follows."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()

    def _deliver(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._waiting and self._waiting[0][0] <= now_s and not self._is_full:
            if self._link.is_cut or self.target is None or self.target.is_closing():
                return
            _, data = self._waiting.popleft()
            if data is None:
                self.target.write_eof()
                continue
            self._held_bytes -= len(data)
            self._link.count(self._route, self._direction, len(data))
            self.target.write(data)
        if self._held_bytes <= HELD_BYTES // 2 and self.source and not self.source.is_closing():
            self.source.resume_reading()
        self.arm()


class End(asyncio.Protocol):
    """One end of a connection: what it reads flows out, what flows in it writes."""

    def __init__(self, out: Flow, into: Flow, on_lost: Callable[[Exception | None], None]) -> None:
        self._out, self._into, self._on_lost = out, into, on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Both flows know this end now."""
        socket_transport = cast(asyncio.Transport, transport)
        socket_transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._out.source = self._into.target = socket_transport
        self._into.arm()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self._out.take(data)

    def eof_received(self) -> bool:
        """The other direction goes on."""
        self._out.take(None)
        return True

    def pause_writing(self) -> None:
        """The reader is slow."""
        self._into.pause(True)

    def resume_writing(self) -> None:
        """It is not any more."""
        self._into.pause(False)

    def connection_lost(self, error: Exception | None) -> None:
        """The whole connection ends."""
        self._on_lost(error)


class Crossing:
    """A connection from the listening side to where the route leads."""

    def __init__(self, link: Link, route: str, to: tuple[str, int]) -> None:
        self._link, self._to = link, to
        now_s = asyncio.get_running_loop().time()
        # A SYN there, its answer back, then the first bytes there.
        self._up = Flow(link, route, "up", now_s + 3 * link.delay_s)
        self._down = Flow(link, route, "down", now_s)
        self._is_over = False
        link.crossings.add(self)
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    def near(self) -> End:
        """The end that was accepted."""
        return End(self._up, self._down, self._lost)

    def reset(self, is_broken: bool = True) -> None:
        """Both ends see the connection break, or only end."""
        self._is_over = True
        self._link.crossings.discard(self)
        self._dialling.cancel()
        for flow in (self._up, self._down):
            flow.close()
            if flow.source is not None:
                if is_broken:
                    carrier = flow.source.get_extra_info("socket")
                    carrier.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, BREAKS)
                flow.source.abort()

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._link.delay_s)
        if self._link.is_cut:
            return  # The SYN is lost; the reset comes with the link.
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await loop.create_connection(
                    lambda: End(self._down, self._up, self._lost), *self._to
                )
        except (OSError, TimeoutError):
            self.reset()

    def _lost(self, error: Exception | None) -> None:
        # While the link is cut, news of the end does not cross it either.
        if self._is_over or self._link.is_cut:
            return
        self._is_over = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._link.delay_s, self.reset, error is not None)


def accepted(link: Link, route: str, to: tuple[str, int]) -> End:
    """A connection came in."""
    return Crossing(link, route, to).near()


async def commands(link: Link) -> None:
    """Do what is asked on standard input, until it ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        match json.loads(line)["do"]:
            case "cut":
                link.cut()
            case "restore":
                link.restore()
        print(json.dumps(link.counts), flush=True)


async def main(settings: dict[str, Any]) -> None:
    """Listen, say so, and carry bytes."""
    link = Link(settings["delay_s"], settings["bits_per_s"])
    loop = asyncio.get_running_loop()
    for route in settings["routes"]:
        name, (host, port) = route["name"], route["to"]
        link.counts[name] = {"up": 0, "down": 0}
        cross = partial(accepted, link, name, (host, port))
        await loop.create_server(cross, *route["listen"], backlog=256)
    print(json.dumps(link.counts), flush=True)
    await commands(link)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
