"""What one relay process sends: the busiest thread's CPU, which bounds it on idle cores too.

    python benchmarks/capacity_relay.py [--seconds 4] [--readers 4]

A relay of its own process, a bucket in a folder, readers that take ranges of 8 MiB over kept
connections of this machine, as followers do. An object that the relay's memory holds, one that it
has to read from its disk and prove again, and the first one over TLS. Where nginx is installed,
the second one through a cache of it before the relay, by which a follower joins, too. Wall time is
of the machine as it is: its load is printed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from thinwire import Follower, Publisher, open_stream
from thinwire.capacity.payload import RANGE_BYTES
from thinwire.stream.places import objects_of

# One object in the relay's memory, one that does not fit there.
SMALL_BYTES = 40 << 20
LARGE_BYTES = 160 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Relay:
    """A relay's process."""

    url: str
    pid: int

    def busy_s(self) -> dict[str, float]:
        """CPU seconds of each thread so far."""
        found = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        return found


@contextmanager
def relay_process(bucket: str, folder: Path, *options: str) -> Iterator[Relay]:
    """`thinwire relay`, as long as the block lasts."""
    command = [sys.executable, "-m", "thinwire", "relay", "--stream", f"run={bucket}", "--listen"]
    command += ["127.0.0.1:0", "--cache", str(folder), "--limit-bytes", "1GiB", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        yield Relay(facts["streams"]["run"], process.pid)
    finally:
        process.terminate()
        process.wait(20)


def published(folder: Path, size_bytes: int) -> tuple[str, str]:
    """A bucket with one version, and the key of its only file."""
    random = np.random.default_rng(0)
    weights = {"w": random.integers(0, 1 << 15, size_bytes // 2, dtype=np.uint16).view(np.float16)}
    bucket = (folder / "bucket").as_uri()
    with Publisher(bucket, folder / "baseline", maintain=False) as publisher:
        publisher.publish(weights)
    stream = open_stream(bucket)
    manifest = stream.manifest(stream.record().lineage, 1)
    assert manifest is not None
    return bucket, max(objects_of(manifest))


def read_ranges(url: str, key: str, size_bytes: int, until_s: float) -> int:
    """Read an object range by range, again and again; the bytes read."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 0)
    if parts.scheme == "https":
        # It is this script's own relay, and only the cost of TLS is asked for.
        context = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=60, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=60)
    read_bytes, start = 0, 0
    into = bytearray(_PIECE_BYTES)
    while time.monotonic() < until_s or not read_bytes:
        stop = min(size_bytes, start + RANGE_BYTES)
        connection.request(
            "GET", f"{parts.path}/o/{key}", headers={"range": f"bytes={start}-{stop - 1}"}
        )
        answer = connection.getresponse()
        if answer.status != 206:
            sys.exit(f"the relay answered {answer.status}: {answer.read(500)!r}")
        while count := answer.readinto(into):
            read_bytes += count
        start = 0 if stop == size_bytes else stop
    connection.close()
    return read_bytes


def measure(relay: Relay, key: str, size_bytes: int, readers: int, seconds: float) -> list[float]:
    """Bytes a second by the wall clock, by the busiest thread's CPU, by all threads' CPU."""
    read_ranges(relay.url, key, size_bytes, 0.0)
    # Once through, so that all of it is held.
    for _ in range(-(-size_bytes // RANGE_BYTES)):
        read_ranges(relay.url, key, size_bytes, time.monotonic() + 0.05)
    counts: list[int] = []
    before, begin_s = relay.busy_s(), time.monotonic()

    def read() -> None:
        counts.append(read_ranges(relay.url, key, size_bytes, begin_s + seconds))

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.monotonic() - begin_s
    busy = [busy_s - before.get(name, 0.0) for name, busy_s in relay.busy_s().items()]
    total = sum(counts)
    return [total / wall_s, total / max(busy), total / sum(busy)]


_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/temp;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  proxy_cache_path {folder}/cache keys_zone=run:8m max_size=1g use_temp_path=off;
  proxy_http_version 1.1; proxy_set_header Connection "";
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {relay}; }}
    location ~ "^/run/o/[0-9a-f]+/(deltas|anchors)/.*[.](delta|safetensors)$" {{
      slice 8m; proxy_cache run; proxy_cache_lock on; proxy_cache_valid 200 206 1h;
      proxy_cache_key $uri$slice_range; proxy_set_header Range $slice_range;
      proxy_pass {relay};
    }}
  }}
}}
"""


@contextmanager
def cache_before(relay: Relay, folder: Path) -> Iterator[Relay]:
    """nginx before a relay, with a cache of what never changes."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = urlsplit(relay.url)
    text = _NGINX.format(folder=folder, port=port, relay=f"http://{parts.netloc}")
    (folder / "conf").write_text(text)
    process = subprocess.Popen(["nginx", "-e", str(folder / "errors"), "-c", str(folder / "conf")])
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield Relay(f"http://127.0.0.1:{port}{parts.path}", process.pid)
    finally:
        process.terminate()
        process.wait(20)


def check_join(bucket: str, url: str, folder: Path) -> None:
    """Join by way of a relay, and see that every bit is there."""
    with Follower(open_stream(bucket, relay=url), folder / "follower", lease=False) as follower:
        follower.catch_up()
    name = "model.safetensors"
    if (folder / "follower" / name).read_bytes() != (folder / "baseline" / name).read_bytes():
        sys.exit("the follower holds other weights")


def certificate(folder: Path) -> list[str]:
    """Options for TLS with a certificate made for this run."""
    paths = [str(folder / "cert.pem"), str(folder / "key.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj"]
    command += ["/CN=localhost", "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True)
    return ["--tls-cert", paths[0], "--tls-key", paths[1]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--readers", type=int, default=4)
    options = parser.parse_args()
    print(f"{options.readers} readers, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n")
    print("| from | MB/s by the clock | MB a CPU second, busiest thread | all threads |")
    print("| --- | ---: | ---: | ---: |")
    for name, size_bytes, has_tls in (
        ("memory", SMALL_BYTES, False),
        ("disk", LARGE_BYTES, False),
        ("memory, TLS", SMALL_BYTES, True),
        ("nginx before it", LARGE_BYTES, False),
    ):
        has_cache = name.startswith("nginx")
        if has_cache and shutil.which("nginx") is None:
            continue
        with tempfile.TemporaryDirectory(prefix="thinwire-capacity-") as made:
            folder = Path(made)
            bucket, key = published(folder, size_bytes)
            size_bytes = (folder / "bucket" / key).stat().st_size
            more = certificate(folder) if has_tls else []
            with ExitStack() as stack:
                relay = stack.enter_context(relay_process(bucket, folder / "cache", *more))
                if has_cache:
                    relay = stack.enter_context(cache_before(relay, folder / "nginx"))
                    check_join(bucket, relay.url, folder)
                found = measure(relay, key, size_bytes, options.readers, options.seconds)
        print(f"| {name} | " + " | ".join(f"{one / 1e6:.0f}" for one in found) + " |", flush=True)


if __name__ == "__main__":
    main()
