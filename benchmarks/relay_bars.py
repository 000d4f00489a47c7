"""What a relay saves a region, and what it takes: 50 followers, and clients that nobody wants.

    python benchmarks/relay_bars.py [--followers 50] [--anchor-mib 16] [--requests 10000]
        [--idle 2000] [--json OUT] [--speed-only]

All followers of a region share one link to the bucket, throttled to 200 Mbit/s with 80 ms each way
and back. They take a stream in three ways, one after the other, each from a bucket of its own:
everything over that link; from a relay on this machine, a process of its own behind the same link,
whose URL is their stream's; and with the relay beside the bucket's URL, as `--relay` has it. They
join (an anchor) as the relay starts, and follow a step. Keys are pinned, and each follower's
weights are compared with what was published.

Then the relay is leant on: malformed requests, idle connections, clients that send slowly and
clients that do not read, while a good client reads an object again and again. Last, how fast one
relay's process gives out what it holds, in ranges of 8 MiB to followers on this machine. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rude_clients import Held, Target, send_malformed
from thinwire import Follower, Publisher, Stream, open_stream
from thinwire.store import CountingStore, ThrottledStore, open_store
from thinwire.stream.places import objects_of
from thinwire.stream.signing import SigningKey

BITS_PER_S = 200e6
LATENCY_S = 0.080
CACHE_BYTES = 1 << 30
CHANGED_SHARE = 0.01
SPEED_MIB = 48
SPEED_S = 8.0
RANGE_BYTES = 8 << 20


def models(anchor_mib: int) -> list[dict[str, np.ndarray]]:
    """Two versions of a model."""
    rng = np.random.default_rng(0)
    count = anchor_mib << 19
    first = rng.normal(0, 0.02, count).astype(np.float16).view(np.uint16)
    second = first.copy()
    chosen = rng.random(count) < CHANGED_SHARE
    second[chosen] ^= 1
    return [{"w": array.view(np.float16)} for array in (first, second)]


def digest(folder: Path) -> str:
    """SHA-256 of the weights' file."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def link(url: str) -> CountingStore:
    """The bucket behind the region's link."""
    bare = open_store(url, retry_s=0)
    return CountingStore(ThrottledStore(bare, bits_per_s=BITS_PER_S, latency_s=LATENCY_S))


def serve(url: str, folder: str, fetches: bool, pipe: Connection) -> None:
    """The relay's process: ends when told to, and answers what it took."""
    from thinwire.relay.relay import Folders, StreamRelay
    from thinwire.relay.server import RelayApp
    from thinwire.web import Listener, Tokens

    store = link(url)
    folders = Folders.at(Path(folder), CACHE_BYTES)
    relay = StreamRelay("run", store, folders, fetches=fetches, poll_s=0.2)
    listener = Listener(RelayApp([relay], Tokens()), "127.0.0.1", 0)
    threading.Thread(target=listener.run, daemon=True).start()
    relay.start()
    pipe.send(f"{listener.url}/run")
    while pipe.recv() != "stop":
        pipe.send((store.counts().downloaded_bytes, peak_rss_bytes(), rss_bytes()))
    relay.stop()
    listener.stop()


def peak_rss_bytes() -> int:
    """The most memory that this process had."""
    return _status("VmHWM")


def rss_bytes() -> int:
    """The memory of this process."""
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


class Relay:
    """The relay's process."""

    def __init__(self, url: str, pipe: Connection) -> None:
        self.url = url
        self._pipe = pipe

    def facts(self) -> tuple[int, int, int]:
        """Bytes from the bucket, peak memory, memory now."""
        self._pipe.send("facts")
        found: tuple[int, int, int] = self._pipe.recv()
        return found


@contextmanager
def relay_process(url: str, folder: Path) -> Iterator[Relay]:
    """A relay behind a link of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(url, str(folder), True, theirs), daemon=True
    )
    process.start()
    try:
        yield Relay(ours.recv(), ours)
    finally:
        ours.send("stop")
        process.join(20)


class Fleet:
    """Followers of one region, each with a folder of its own."""

    def __init__(self, stream_of: Callable[[], Stream], count: int, folder: Path) -> None:
        self._folders = [folder / f"follower-{number}" for number in range(count)]
        self._stack = ExitStack()
        self._followers = [
            self._stack.enter_context(Follower(stream_of(), path, lease=False))
            for path in self._folders
        ]

    def reach(self, version: int, due: str) -> float:
        """Seconds until the last of all is at a version, every bit of it right."""
        begin_s = time.monotonic()
        with ThreadPoolExecutor(len(self._followers)) as pool:
            for _ in pool.map(lambda one: one.wait_for(version, 3600, poll_s=0.2), self._followers):
                pass
        took_s = time.monotonic() - begin_s
        if any(digest(path) != due for path in self._folders):
            sys.exit("a follower holds other weights than were published")
        return took_s

    def close(self) -> None:
        """Let go of the folders."""
        self._stack.close()


def measure(count: int, anchor_mib: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of joining and of a step: each way in which a region can take them."""
    versions = models(anchor_mib)
    ways = {way: take(way, versions, count, folder / way) for way in ("direct", "relay", "beside")}
    return [
        {"what": what}
        | {key: value for taken in ways.values() for key, value in taken[what].items()}
        for what in ("join", "step")
    ]


def take(
    way: str, versions: Sequence[dict[str, np.ndarray]], count: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """What a fleet takes of two versions in one way, and for how long."""
    bucket = (folder / "bucket").as_uri()
    key = SigningKey.generate()
    upstream = link(bucket)
    with ExitStack() as stack:
        publisher = stack.enter_context(
            Publisher(open_stream(bucket, signing_key=key), folder / "baseline", maintain=False)
        )
        publisher.publish(versions[0])
        relay = None
        if way != "direct":
            relay = stack.enter_context(relay_process(bucket, folder / "cache"))
        url = relay.url if relay is not None else ""
        fleet = Fleet(
            lambda: open_stream(
                url if way == "relay" else upstream,
                relay=url if way == "beside" else None,
                trusted_keys=[key.public],
            ),
            count,
            folder,
        )
        stack.callback(fleet.close)

        def taken_bytes() -> int:
            through = 0 if relay is None else relay.facts()[0]
            return through + upstream.counts().downloaded_bytes

        rows: dict[str, dict[str, Any]] = {}
        before_bytes = 0
        for version, what in ((1, "join"), (2, "step")):
            if version == 2:
                before_bytes = taken_bytes()
                publisher.publish(versions[1])
            seconds = fleet.reach(version, digest(folder / "baseline"))
            rows[what] = {
                "payload_bytes": payload_bytes(bucket, version),
                f"{way}_s": seconds,
                f"{way}_bytes": taken_bytes() - before_bytes,
            }
        if relay is not None:
            rows["join"][f"{way}_peak_rss_bytes"] = relay.facts()[1]
    return rows


def payload_bytes(url: str, version: int) -> int:
    """What a version's objects have."""
    stream = open_stream(url)
    manifest = stream.manifest(stream.record().lineage, version)
    assert manifest is not None
    return sum(record.size for record in objects_of(manifest).values())


def lean_on(request_count: int, idle_count: int, folder: Path) -> dict[str, Any]:
    """A good client's troubles while others misbehave."""
    bucket = (folder / "relay" / "bucket").as_uri()
    with relay_process(bucket, folder / "cache-2") as relay:
        parts = urlsplit(relay.url)
        stream = open_stream(bucket)
        lineage = stream.record().lineage
        manifest = stream.manifest(lineage, 1)
        assert manifest is not None
        key = max(objects_of(manifest))
        size_bytes = objects_of(manifest)[key].size
        target = Target(
            host=str(parts.hostname),
            port=int(parts.port or 0),
            get=("/health", "/run/list", "/run/o/head.json", "/metrics", f"/run/o/{key}"),
            post=(f"/run/o/leases/{1:012d}-{'a' * 32}.json",),
        )
        store = open_store(relay.url, retry_s=0)
        whole = hashlib.sha256(store.get(key, limit_bytes=size_bytes)).digest()
        _, _, before = relay.facts()
        waits: list[float] = []
        failures: list[str] = []
        ended = threading.Event()

        def be_good() -> None:
            while not ended.is_set():
                begin_s = time.monotonic()
                try:
                    found = hashlib.sha256(store.get(key, limit_bytes=size_bytes)).digest()
                    if found != whole:
                        failures.append("wrong bytes")
                except Exception as error:
                    failures.append(str(error))
                waits.append(time.monotonic() - begin_s)
                ended.wait(0.05)

        async def run() -> Any:
            held = Held(
                target, idle_count=idle_count, slow_head_count=100, slow_body_count=100,
                deaf_count=50,
            )  # fmt: skip
            async with held:
                thread.start()
                outcomes = await send_malformed(target, request_count, seed=7)
                return outcomes, relay.facts()[2]

        thread = threading.Thread(target=be_good)
        try:
            outcomes, during = asyncio.run(run())
        finally:
            ended.set()
            thread.join(60)
        return {
            "requests": request_count,
            "idle": idle_count,
            "silent": outcomes["silent"],
            "good_reads": len(waits),
            "failures": failures[:5],
            "good_p50_s": statistics.median(waits),
            "good_max_s": max(waits),
            "rss_before_bytes": before,
            "rss_during_bytes": during,
            "peak_rss_bytes": relay.facts()[1],
        }


def pace(folder: Path) -> dict[str, float]:
    """Bytes a second that one relay gives out of what it holds in memory."""
    bucket = (folder / "bucket-pace").as_uri()
    with Publisher(bucket, folder / "baseline-pace", maintain=False) as publisher:
        publisher.publish(models(SPEED_MIB)[0])
    with relay_process(bucket, folder / "cache-pace") as relay:
        stream = open_stream(bucket)
        manifest = stream.manifest(stream.record().lineage, 1)
        assert manifest is not None
        objects = objects_of(manifest)
        key = max(objects, key=lambda name: objects[name].size)
        size_bytes = objects[key].size
        whole = open_store(relay.url, retry_s=0).get(key, limit_bytes=size_bytes)
        end_s = time.monotonic() + SPEED_S

        def read(number: int) -> int:
            store = open_store(relay.url, retry_s=0)
            count, start = 0, number * RANGE_BYTES
            while time.monotonic() < end_s:
                stop = min(start + RANGE_BYTES, size_bytes)
                data = store.get_range(key, start, stop)
                if data != whole[start:stop]:
                    sys.exit("the relay gave other bytes than it was given")
                count += len(data)
                start = 0 if stop == size_bytes else stop
            return count

        begin_s = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            total = sum(pool.map(read, range(4)))
        return {"pace_bytes_per_s": total / (time.monotonic() - begin_s)}


def show(rows: list[dict[str, Any]], leant: dict[str, Any], count: int) -> None:
    """Print the tables."""
    print(f"| {count} followers | payload MB | from the bucket MB, direct | through a relay | "
          "with `--relay` | all there s, direct | through a relay | with `--relay` |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["what"]]
        cells += [f"{row[name] / 1e6:.2f}" for name in
                  ("payload_bytes", "direct_bytes", "relay_bytes", "beside_bytes")]  # fmt: skip
        cells += [f"{row[name]:.1f}" for name in ("direct_s", "relay_s", "beside_s")]
        print(f"| {' | '.join(cells)} |")
    print(f"\nThe relay's peak memory: {rows[0]['relay_peak_rss_bytes'] / (1 << 20):.0f} MiB.\n")
    print(
        f"{leant['requests']} malformed requests, {leant['idle']} idle connections, 100 slow heads,"
        f" 100 slow bodies, 50 that do not read: of {leant['good_reads']} good reads "
        f"{len(leant['failures'])} failed; median {leant['good_p50_s']:.2f} s, slowest "
        f"{leant['good_max_s']:.2f} s; memory {leant['rss_before_bytes'] / (1 << 20):.0f} MiB "
        f"before, {leant['peak_rss_bytes'] / (1 << 20):.0f} MiB at most."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--followers", type=int, default=50)
    parser.add_argument("--anchor-mib", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--idle", type=int, default=2_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--speed-only", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-relay-") as name:
        folder = Path(name)
        paced = pace(folder)
        print(f"One relay gives out {paced['pace_bytes_per_s'] / 1e6:.0f} MB/s.\n")
        if options.speed_only:
            return
        rows = measure(options.followers, options.anchor_mib, folder)
        leant = lean_on(options.requests, options.idle, folder)
    show(rows, leant, options.followers)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "leant": leant, **paced}, indent=1))
    if leant["failures"]:
        sys.exit(f"good reads failed: {leant['failures']}")


if __name__ == "__main__":
    main()
