"""What one hub takes: how soon 1,000 followers are woken, its memory, and clients nobody wants.

    python benchmarks/hub_bars.py [--followers 1000] [--commits 30] [--json OUT] [--markdown]

A real hub process over HTTP on this machine's loopback, a real publisher that commits to a folder,
followers in another process: half by events, half by long polls, all with heartbeats. The time of a
commit is that of its manifest's file. First with signals, as `thinwire publish --hub` sends them,
then without: the hub finds the versions by looking once a second. Then malformed requests, slow
clients and idle connections, while a good client asks all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rude_clients import Held, Target, send_malformed
from thinwire import Publisher

STREAM = "/v1/streams/policy"
MAX_P99_S = 1.0
MAX_RSS_BYTES = 300 << 20


@contextmanager
def hub_process(url: str) -> Iterator[tuple[int, str]]:
    """A hub: its process's id and its URL."""
    command = [sys.executable, "-m", "thinwire", "hub", "--stream", url, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.communicate(timeout=30)


def memory(pid: int) -> dict[str, int]:
    """A process's memory, now and at most."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) << 10
    return {"rss_bytes": found["VmRSS"], "peak_rss_bytes": found["VmHWM"]}


def cpu_s(pid: int) -> float:
    """The processor time that a process took."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


class Trainer:
    """Commits versions of a small model."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "policy")
        self._weights = np.arange(4000, dtype=np.float16)
        self._publisher = Publisher(self.url, folder / "copy", maintain=False)
        self.committed_s: dict[int, float] = {}

    def publish(self) -> int:
        """One more version; its number."""
        self._weights[len(self.committed_s)] += 1
        found = self._publisher.publish({"w": self._weights}, step=len(self.committed_s))
        (path,) = Path(self.url).glob(f"*/manifests/{found.version:012d}.json")
        self.committed_s[found.version] = path.stat().st_mtime
        return found.version

    def close(self) -> None:
        """Let go of the folder."""
        self._publisher.close()


def measure_wakes(
    trainer: Trainer, pid: int, url: str, follower_count: int, commit_count: int
) -> dict[str, Any]:
    """Commit, with signals and without, and ask followers what they heard."""
    parts = urlsplit(url)
    program = str(Path(__file__).resolve().parent / "hub_followers.py")
    command = [sys.executable, program, str(parts.hostname), str(parts.port), "policy"]
    with (
        httpx.Client(base_url=url, timeout=30) as client,
        subprocess.Popen(
            [*command, str(follower_count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as followers,
    ):
        assert followers.stdout is not None
        assert followers.stdout.readline() == "ready\n"
        # Until all have reported once.
        time.sleep(6)
        ways: dict[str, list[int]] = {}
        for way in ("signalled", "polled"):
            start_s = cpu_s(pid), time.monotonic()
            ways[way] = []
            for number in range(commit_count):
                version = trainer.publish()
                ways[way].append(version)
                if way == "signalled":
                    client.post(f"{STREAM}/signal", json={"version": version}).raise_for_status()
                # So that commits fall anywhere between two looks.
                time.sleep(1.5 + (number * 0.37) % 1)
            busy = (cpu_s(pid) - start_s[0]) / (time.monotonic() - start_s[1])
            ways[f"{way}_busy"] = [round(100 * busy)]
        status = client.get(STREAM).json()
        facts = memory(pid)
        told, _ = followers.communicate("", timeout=60)
    heard = json.loads(told)
    assert not heard["faults"], Counter(heard["faults"])
    found: dict[str, Any] = {
        "follower_count": follower_count,
        "ready_count": status["counts"]["ready"],
        "beat_count": heard["beat_count"],
        **facts,
    }
    for way in ("signalled", "polled"):
        all_s: list[float] = []
        for kind, followers_heard in heard["heard"].items():
            assert len(followers_heard) == follower_count // 2, "a follower heard nothing"
            here_s = []
            for times in followers_heard.values():
                for version in ways[way]:
                    # Whoever hears of a later one at once needs no more.
                    woken_s = next(at_s for found, at_s in times if found >= version)
                    here_s.append(woken_s - trainer.committed_s[version])
            found[f"{way}_{kind}"] = quantiles(here_s)
            all_s += here_s
        found[way] = quantiles(all_s)
        found[f"{way}_busy_percent"] = ways[f"{way}_busy"][0]
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    """Some of them, in seconds."""
    cuts = statistics.quantiles(values, n=100)
    return {
        "count": len(values),
        "p50_s": round(cuts[49], 4),
        "p99_s": round(cuts[98], 4),
        "max_s": round(max(values), 4),
    }


class GoodClient(threading.Thread):
    """Asks all the time, as replicas and dashboards do."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._is_over = False
        self.took_s: list[float] = []
        self.faults: Counter[str] = Counter()

    def stop(self) -> None:
        """End after the request that runs."""
        self._is_over = True
        self.join()

    def run(self) -> None:
        """Ask, by one connection that is kept and by new ones."""
        said = {"replica": "good", "region": "eu"}
        with httpx.Client(base_url=self._url, timeout=30) as kept:
            while not self._is_over:
                self._ask(lambda: kept.get(STREAM))
                self._ask(lambda: kept.post(f"{STREAM}/heartbeats", json=said))
                self._ask(lambda: kept.get(f"{STREAM}/wait", params={"timeout_s": 0}))
                self._ask(lambda: httpx.get(f"{self._url}/health", timeout=30))
                time.sleep(0.01)

    def _ask(self, act: Any) -> None:
        start_s = time.monotonic()
        try:
            answer = act()
        except httpx.HTTPError as error:
            self.faults[repr(error)] += 1
            return
        self.took_s.append(time.monotonic() - start_s)
        if answer.status_code != 200:
            self.faults[str(answer.status_code)] += 1


def measure_rudeness(pid: int, url: str, request_count: int, idle_count: int) -> dict[str, Any]:
    """Everything at once, and a good client."""
    parts = urlsplit(url)
    target = Target(
        host=str(parts.hostname),
        port=int(parts.port or 0),
        get=("/health", "/v1/streams", f"{STREAM}/versions", "/metrics", f"{STREAM}/replicas"),
        post=(f"{STREAM}/heartbeats", f"{STREAM}/signal"),
    )
    good = GoodClient(url)

    async def run() -> tuple[Counter[str], int, float]:
        held = Held(
            target, idle_count=idle_count, slow_head_count=100, slow_body_count=100, deaf_count=50
        )
        async with held:
            good.start()
            start_s = time.monotonic()
            outcomes = await send_malformed(target, request_count, seed=7)
            took_s = time.monotonic() - start_s
            # Longer than the hub's patience, so that it shows with each kind.
            await asyncio.sleep(max(0.0, 40 - took_s))
            return outcomes, held.lost_count, took_s

    outcomes, lost_count, took_s = asyncio.run(run())
    good.stop()
    return {
        "request_count": request_count,
        "outcomes": dict(outcomes.most_common()),
        "held_count": idle_count + 250,
        "ended_by_the_hub_count": lost_count,
        "took_s": round(took_s, 1),
        "good": quantiles(good.took_s),
        "good_faults": dict(good.faults),
        **memory(pid),
    }


def shown(wakes: dict[str, Any], rude: dict[str, Any]) -> str:
    """Both as a table."""
    rows = [("", "p50", "p99", "max", "bar")]
    for way, bar in (("signalled", "p99 < 1 s"), ("polled", "next look")):
        for kind in ("", "_events", "_wait"):
            one = wakes[way + kind]
            name = f"commit to wake-up, {way}{kind.replace('_', ', ')}"
            cells = (f"{one[key]:.3f} s" for key in ("p50_s", "p99_s", "max_s"))
            rows.append((name, *cells, bar if not kind else ""))
    one = rude["good"]
    cells = (f"{one[key]:.3f} s" for key in ("p50_s", "p99_s", "max_s"))
    rows.append((f"good requests among rude ones ({one['count']})", *cells, "none fails"))
    for name, facts in (("followed", wakes), ("under rude clients", rude)):
        size = f"{facts['peak_rss_bytes'] / 2**20:.0f} MiB"
        rows.append((f"peak memory, {name}", "", "", size, "< 300 MiB"))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * 5, *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--followers", type=int, default=1000)
    parser.add_argument("--commits", type=int, default=30, help="of each kind")
    parser.add_argument("--requests", type=int, default=10_000, help="malformed ones")
    parser.add_argument("--idle", type=int, default=2000, help="idle connections")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder))
        trainer.publish()
        with hub_process(trainer.url) as (pid, url):
            wakes = measure_wakes(trainer, pid, url, given.followers, given.commits)
        # Another hub, so that its memory is of what it bears.
        with hub_process(trainer.url) as (pid, url):
            rude = measure_rudeness(pid, url, given.requests, given.idle)
        trainer.close()
    found = {"wakes": wakes, "rude": rude}
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1))
    print(shown(wakes, rude) if given.markdown else json.dumps(found, indent=1))
    held = [
        wakes["signalled"]["p99_s"] < MAX_P99_S,
        wakes["peak_rss_bytes"] < MAX_RSS_BYTES,
        rude["peak_rss_bytes"] < MAX_RSS_BYTES,
        not rude["good_faults"],
        not {"500", "silent"} & set(rude["outcomes"]),
    ]
    if not all(held):
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()
