"""Simulated followers of one stream at a hub: a process of their own, so that the hub has its own.

    python benchmarks/hub_followers.py HOST PORT STREAM COUNT

Half of them listen to events, half wait by long polls; all send heartbeats. Prints "ready" when all
are there, and what it heard as JSON once its input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from contextlib import suppress
from typing import Any

_LINE_BYTES = 1 << 20


class Followers:
    """What they know and heard."""

    def __init__(self, host: str, port: int, stream: str) -> None:
        self._host = host
        self._port = port
        self._path = f"/v1/streams/{stream}"
        # By way, for each follower: versions and when it heard of them.
        self.heard: dict[str, dict[int, list[tuple[int, float]]]] = {"events": {}, "wait": {}}
        self.there_count = 0
        self.beat_count = 0
        self.faults: list[str] = []

    async def follow(self, number: int) -> None:
        """One follower: it is woken, and reports."""
        news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        woken = self._listen(number, news) if number % 2 == 0 else self._poll(number, news)
        await asyncio.gather(woken, self._report(number, news))

    async def _listen(self, number: int, news: asyncio.Queue[dict[str, Any]]) -> None:
        reader, writer = await self._connect()
        await self._ask(writer, "GET", "/events?only=versions")
        await _head(reader)
        self.there_count += 1
        kind = ""
        while line := await reader.readline():
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: ") and kind == "version":
                self._hear("events", number, json.loads(line[6:]), news)
        self.faults.append("events ended")

    async def _poll(self, number: int, news: asyncio.Queue[dict[str, Any]]) -> None:
        reader, writer = await self._connect()
        lineage, after = "", 0
        self.there_count += 1
        while True:
            query = f"/wait?lineage={lineage}&after={after}&timeout_s=30"
            await self._ask(writer, "GET", query)
            status, size = await _head(reader)
            body = await reader.readexactly(size)
            if status == 200:
                note = json.loads(body)
                lineage, after = note["lineage"], note["version"]
                self._hear("wait", number, note, news)
            elif status != 204:
                self.faults.append(f"wait: {status}")

    async def _report(self, number: int, news: asyncio.Queue[dict[str, Any]]) -> None:
        reader, writer = await self._connect()
        said: dict[str, Any] = {"replica": f"follower-{number}", "region": f"r{number % 4}"}
        said |= {"engine": "folder", "lineage": "", "version": 0, "is_ready": False}
        interval_s = random.uniform(0, 5)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    note = await news.get()
                    said |= {"lineage": note["lineage"], "version": note["version"]}
                    said |= {"step": note["step"], "is_ready": True}
                # As long as a small update takes, and not the same for all.
                await asyncio.sleep(random.uniform(0.1, 1.0))
            await self._ask(writer, "POST", "/heartbeats", json.dumps(said).encode())
            status, size = await _head(reader)
            answer = json.loads(await reader.readexactly(size))
            if status != 200:
                self.faults.append(f"heartbeat: {status}")
                return
            self.beat_count += 1
            interval_s = answer["interval_s"]

    def _hear(
        self, way: str, number: int, note: dict[str, Any], news: asyncio.Queue[dict[str, Any]]
    ) -> None:
        self.heard[way].setdefault(number, []).append((note["version"], time.time()))
        news.put_nowait(note)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, limit=_LINE_BYTES)

    async def _ask(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes = b""
    ) -> None:
        head = f"{method} {self._path}{path} HTTP/1.1\r\nhost: localhost\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()


async def _head(reader: asyncio.StreamReader) -> tuple[int, int]:
    """A status, and how long the body is."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    sizes = [int(line[15:]) for line in lines if line.startswith("content-length:")]
    return int(lines[0].split()[1]), sizes[0] if sizes else 0


async def run(host: str, port: int, stream: str, count: int) -> None:
    """Follow until the input ends."""
    followers = Followers(host, port, stream)
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(followers.follow(number)))
        if number % 20 == 0:
            await asyncio.sleep(0.02)
    while followers.there_count < count:
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    followers.faults += [repr(task.exception()) for task in tasks if task.done()]
    print(
        json.dumps(
            {
                "heard": followers.heard,
                "beat_count": followers.beat_count,
                "faults": followers.faults,
            }
        ),
        flush=True,
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
