"""Clients that no server wants: malformed requests, slow and idle connections.

What `hub_bars.py` and tests/hub/test_robustness.py throw at a server that listens.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

ANSWER_WITHIN_S = 20.0
_READ_BYTES = 64 << 10


class Target(NamedTuple):
    """A server.

    Attributes:
        host: Where it listens.
        port: Where it listens.
        get: Paths that answer GET.
        post: Paths that read JSON.
        headers: Sent with requests that should get past the door, each line with its end.
    """

    host: str
    port: int
    get: tuple[str, ...]
    post: tuple[str, ...]
    headers: bytes = b""


class Rudeness(NamedTuple):
    """A malformed request.

    Attributes:
        data: What is sent.
        ends: Whether the sending side is closed after it.
        resets: Whether the connection is broken off at once, without reading an answer.
    """

    data: bytes
    ends: bool = False
    resets: bool = False


def _json(dice: random.Random) -> bytes:
    """A body that is no heartbeat: no JSON, or none that fits."""
    texts = ["", "{", "nul", '"', "[]", "1e999", "{}", '{"replica": "a b"}', '{"replica": 1}']
    texts += ['{"replica":"a","version":-1}', '{"replica":"a","updates":[1]}', "\ufeff{}"]
    texts += ['{"replica":"a","fault":{"code":"x"}}', json.dumps({"replica": "\ud800"})]
    texts += ["[" * dice.randrange(1, 20_000), '{"a":' * dice.randrange(1, 5_000)]
    texts += ['{"replica":"' + "x" * dice.randrange(65, 9_000) + '"}']
    return dice.choice(texts).encode("utf-8", "surrogatepass")


def _post(dice: random.Random, target: Target, more: bytes, body: bytes) -> bytes:
    path = dice.choice(target.post).encode()
    kind = b"content-type: application/json\r\n"
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b%b%b\r\n%b" % (
        *(path, target.headers, kind, more, body),
    )


def _get(dice: random.Random, target: Target, more: bytes = b"", path: bytes = b"") -> bytes:
    path = path or dice.choice(target.get).encode()
    return b"GET %b HTTP/1.1\r\nhost: localhost\r\n%b%b\r\n" % (path, target.headers, more)


def _random_bytes(dice: random.Random, target: Target) -> Rudeness:
    return Rudeness(dice.randbytes(dice.randrange(1, 4000)), ends=True)


def _bad_json(dice: random.Random, target: Target) -> Rudeness:
    body = _json(dice)
    return Rudeness(_post(dice, target, b"content-length: %d\r\n" % len(body), body))


def _random_body(dice: random.Random, target: Target) -> Rudeness:
    body = dice.randbytes(dice.randrange(1, 3000))
    return Rudeness(_post(dice, target, b"content-length: %d\r\n" % len(body), body))


def _large_body(dice: random.Random, target: Target) -> Rudeness:
    body = b" " * 200_000
    return Rudeness(_post(dice, target, b"content-length: %d\r\n" % len(body), body))


def _promised_body(dice: random.Random, target: Target) -> Rudeness:
    return Rudeness(_post(dice, target, b"content-length: 99999999999999999999\r\n", b"{"))


def _short_body(dice: random.Random, target: Target) -> Rudeness:
    return Rudeness(_post(dice, target, b"content-length: 500\r\n", b'{"replica":'), ends=True)


def _cut_chunks(dice: random.Random, target: Target) -> Rudeness:
    body = b"%x\r\n%b" % (dice.randrange(50, 5000), b'{"replica":')
    return Rudeness(_post(dice, target, b"transfer-encoding: chunked\r\n", body), ends=True)


def _bad_chunks(dice: random.Random, target: Target) -> Rudeness:
    size = dice.choice([b"zz", b"-1", b"fffffffffffffffffffff", b"", b"5;" + b"x" * 20_000])
    body = size + b"\r\n{}\r\n0\r\n\r\n"
    return Rudeness(_post(dice, target, b"transfer-encoding: chunked\r\n", body), ends=True)


def _two_lengths(dice: random.Random, target: Target) -> Rudeness:
    both = dice.choice(
        [
            b"content-length: 2\r\ncontent-length: 3\r\n",
            b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
            b"content-length: -2\r\n",
            b"content-length: 0x2\r\n",
        ]
    )
    return Rudeness(_post(dice, target, both, b"{}"), ends=True)


def _huge_header(dice: random.Random, target: Target) -> Rudeness:
    return Rudeness(_get(dice, target, b"x: " + b"y" * dice.randrange(20_000, 90_000) + b"\r\n"))


def _many_headers(dice: random.Random, target: Target) -> Rudeness:
    return Rudeness(_get(dice, target, b"x: y\r\n" * dice.randrange(1000, 9000)))


def _bad_header(dice: random.Random, target: Target) -> Rudeness:
    line = dice.choice([b"a b: c", b": c", b"\x00: c", b"a: \x00", b"no colon", b" folded"])
    return Rudeness(_get(dice, target, line + b"\r\n"), ends=True)


def _bad_path(dice: random.Random, target: Target) -> Rudeness:
    path = dice.choice(
        [
            b"/" + b"a" * dice.randrange(3000, 60_000),
            b"/\xff\xfe",
            b"/%ff%00%2e%2e/%2e%2e/etc/passwd",
            b"/static/../../../../etc/passwd",
            b"//evil.example/",
            b"*",
            b"http://elsewhere/",
            b"?" + b"&".join(b"a=%d" % n for n in range(dice.randrange(2000))),
        ]
    )
    return Rudeness(_get(dice, target, path=path), ends=True)


def _bad_query(dice: random.Random, target: Target) -> Rudeness:
    query = dice.choice([b"limit=-1", b"limit=%ff", b"limit=1&limit=2", b"a[]=1", b"%" * 999])
    path = dice.choice(target.get).encode() + b"?" + query
    return Rudeness(_get(dice, target, path=path))


def _bad_line(dice: random.Random, target: Target) -> Rudeness:
    line = dice.choice(
        [
            b"GET / HTTP/9.9",
            b"GET",
            b"GET  /  HTTP/1.1",
            b"G\x00T / HTTP/1.1",
            b"PRI * HTTP/2.0",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"CONNECT a:1 HTTP/1.1",
            b"\r\n\r\n\r\n",
        ]
    )
    return Rudeness(line + b"\r\n\r\n", ends=True)


def _odd_method(dice: random.Random, target: Target) -> Rudeness:
    method = dice.choice([b"BREW", b"TRACE", b"PUT", b"PATCH", b"X" * 200, b"get"])
    path = dice.choice(target.get).encode()
    return Rudeness(b"%b %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (method, path, target.headers))


def _rubbish_after(dice: random.Random, target: Target) -> Rudeness:
    return Rudeness(_get(dice, target) + dice.randbytes(dice.randrange(1, 2000)), ends=True)


def _broken_off(dice: random.Random, target: Target) -> Rudeness:
    data = _get(dice, target)
    return Rudeness(data[: dice.randrange(1, len(data) + 1)], resets=True)


def _bad_upgrade(dice: random.Random, target: Target) -> Rudeness:
    more = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n"
    return Rudeness(_get(dice, target, more), ends=True)


def _bad_token(dice: random.Random, target: Target) -> Rudeness:
    token = dice.choice([b"Bearer", b"Bearer " + b"x" * 9000, b"Basic eDp5", b"Bearer \xff\xfe"])
    path = dice.choice(target.get).encode()
    return Rudeness(
        b"GET %b HTTP/1.1\r\nhost: localhost\r\nauthorization: %b\r\n\r\n" % (path, token)
    )


Kind = Callable[[random.Random, Target], Rudeness]
KINDS: tuple[Kind, ...] = (
    *(_random_bytes, _bad_json, _random_body, _large_body, _promised_body, _short_body),
    *(_cut_chunks, _bad_chunks, _two_lengths, _huge_header, _many_headers, _bad_header),
    *(_bad_path, _bad_query, _bad_line, _odd_method, _rubbish_after, _broken_off),
    *(_bad_upgrade, _bad_token),
)


async def send_malformed(
    target: Target, count: int, *, seed: int, at_once: int = 16
) -> Counter[str]:
    """Send so many malformed requests, of each kind about as many.

    Returns:
        How often each outcome came: a status, "closed" without one, "reset" by us, "silent" where
        neither came in time.
    """
    outcomes: Counter[str] = Counter()
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            dice = random.Random(seed * 1_000_003 + number)
            kind = KINDS[number % len(KINDS)]
            outcomes[await _send(target, kind(dice, target))] += 1

    await asyncio.gather(*(work() for _ in range(at_once)))
    return outcomes


async def _send(target: Target, rudeness: Rudeness) -> str:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        if rudeness.resets:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        # The server may have refused it before it was sent.
        with suppress(OSError):
            writer.write(rudeness.data)
            await writer.drain()
        if rudeness.resets:
            writer.transport.abort()
            return "reset"
        with suppress(OSError):
            if rudeness.ends:
                writer.write_eof()
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await _outcome(reader)
    except TimeoutError:
        return "silent"
    except OSError:
        return "closed"
    finally:
        writer.transport.abort()


async def _outcome(reader: asyncio.StreamReader) -> str:
    try:
        line = await reader.readline()
    except (OSError, ValueError):
        return "closed"
    words = line.split()
    return words[1].decode("ascii", "replace") if len(words) > 1 else "closed"


class Held:
    """Connections that are held open and take the server's patience.

    Use it as an asynchronous context manager.

    Args:
        target: The server.
        idle_count: They say nothing.
        slow_head_count: They send a request's head byte by byte.
        slow_body_count: They send a body so.
        deaf_count: They ask again and again, and read nothing.
    """

    def __init__(
        self,
        target: Target,
        *,
        idle_count: int,
        slow_head_count: int,
        slow_body_count: int,
        deaf_count: int,
    ) -> None:
        self._target = target
        self._wanted: list[tuple[int, Callable[[], bytes], bytes]] = [
            (idle_count, lambda: b"", b""),
            (slow_head_count, lambda: b"G", b"GET / HTTP/1.1\r\nx: y"),
            (slow_body_count, self._body_head, b" "),
            (deaf_count, self._question, self._question()),
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self.open_count = 0
        self.lost_count = 0

    def _body_head(self) -> bytes:
        path = self._target.post[0].encode()
        kind = b"content-type: application/json\r\ncontent-length: 1000\r\n"
        return b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b%b\r\n" % (
            path,
            self._target.headers,
            kind,
        )

    def _question(self) -> bytes:
        path = self._target.get[-1].encode()
        return b"GET %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (path, self._target.headers)

    async def __aenter__(self) -> Held:
        count = 0
        for number, first, more in self._wanted:
            for _ in range(number):
                self._tasks.append(asyncio.create_task(self._hold(first(), more)))
                count += 1
                if count % 50 == 0:
                    await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            while self.open_count < count:
                await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold(self, first: bytes, more: bytes) -> None:
        """One connection; a new one whenever the server has enough of it."""
        while True:
            with suppress(OSError):
                await self._hold_once(first, more)
            self.lost_count += 1
            await asyncio.sleep(0.2)

    async def _hold_once(self, first: bytes, more: bytes) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        # Little room for what is not read: so the server sees that nobody reads.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, (self._target.host, self._target.port))
            self.open_count += 1
            await loop.sock_sendall(connection, first)
            at = 0
            while True:
                await asyncio.sleep(1.0)
                if not first:
                    # Only to see whether it is still open.
                    with suppress(BlockingIOError):
                        if not connection.recv(_READ_BYTES, socket.MSG_PEEK):
                            return
                    continue
                piece = more[at : at + 1] if len(more) < 40 else more
                await loop.sock_sendall(connection, piece or b"y")
                at += 1
        finally:
            self.open_count -= 1
            connection.close()
