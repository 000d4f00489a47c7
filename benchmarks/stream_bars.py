"""The stream's numbers in docs/benchmarks.md, on the MiniLM run of the corpus.

    python benchmarks/stream_bars.py .bench/corpus [--json OUT] [--deltas 1000]

Every row is checked: the follower's files are those of the publisher, by SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from thinwire import Follower, Maintainer, Publisher, open_stream
from thinwire.checkpoint import Checkpoint
from thinwire.store import Store, StoreWrapper, ThrottledStore, open_store
from thinwire.stream import keys

BITS_PER_S = 100e6
LATENCY_S = 0.050


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file that belongs to a checkpoint."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".thinwire")
    }


def check_same(a: Path, b: Path) -> None:
    """Stop everything where two folders differ."""
    if digests(a) != digests(b):
        sys.exit(f"{a} and {b} differ")


def resident_bytes() -> int:
    """Memory of this process that is its own: mapped files are left out."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one measurement."""
    folder = Path(tempfile.mkdtemp(prefix="thinwire-bars-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def replay(steps: list[Path]) -> dict[str, float]:
    """Publish and follow a real run over a folder: sizes and times a version."""
    with scratch() as root:
        stream = open_stream(f"file://{root}/store")
        publish_s, apply_s, payload, manifest = [], [], [], []
        with (
            Publisher(stream, root / "base", maintain=False) as publisher,
            Follower(stream, root / "f") as follower,
        ):
            for number, step in enumerate(steps):
                start_s = time.perf_counter()
                version = publisher.publish(step, step=number)
                published_s = time.perf_counter()
                follower.catch_up()
                if number:
                    apply_s.append(time.perf_counter() - published_s)
                    publish_s.append(published_s - start_s)
                    payload.append(version.payload_bytes)
                    key = keys.manifest(version.lineage, version.version)
                    manifest.append(len(stream.store.get(key, limit_bytes=1 << 20)))
                check_same(step, root / "f")
        raw = version.raw_bytes
        rows = [
            [name, tensor.dtype, list(tensor.shape), "0" * 16]
            for name, tensor in Checkpoint.open(root / "f").tensors.items()
        ]
        listed = len(json.dumps(rows, separators=(",", ":")))
    return {
        "versions": len(payload),
        "payload_percent": 100 * statistics.mean(payload) / raw,
        "manifest_bytes": statistics.mean(manifest),
        "manifest_percent_of_payload": 100 * sum(manifest) / sum(payload),
        "list_of_tensors_percent_of_payload": 100 * listed / statistics.mean(payload),
        "publish_s": statistics.median(publish_s),
        "fetch_and_apply_s": statistics.median(apply_s),
    }


class CommitTimes(StoreWrapper):
    """Notes when the manifest of a version became visible."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.newest_s = 0.0

    def put_if_absent(self, key: str, data: bytes) -> None:
        super().put_if_absent(key, data)
        self.newest_s = time.perf_counter()


def slow_link(steps: list[Path]) -> dict[str, float]:
    """Publisher and follower each behind 100 Mbit/s and 50 ms: from the commit to the mark.

    The follower looks again 20 ms after it found nothing.
    """
    with scratch() as root:
        url = f"file://{root}/store"

        def slow() -> Store:
            return ThrottledStore(open_store(url), bits_per_s=BITS_PER_S, latency_s=LATENCY_S)

        commits = CommitTimes(slow())
        after_commit, after_call, round_trips = [], [], []
        with (
            Publisher(open_stream(commits), root / "base", maintain=False) as publisher,
            Follower(open_stream(slow()), root / "f", lease=False) as follower,
        ):
            publisher.publish(steps[0])
            follower.catch_up()
            applied_s: dict[int, float] = {}

            def follow() -> None:
                for version in follower.follow(poll_s=0.02):
                    applied_s[version.version] = time.perf_counter()

            thread = threading.Thread(target=follow)
            thread.start()
            for step in steps[1:]:
                called_s = time.perf_counter()
                version = publisher.publish(step)
                while version.version not in applied_s:
                    time.sleep(0.002)
                spent_s = applied_s[version.version] - commits.newest_s
                payload_s = version.payload_bytes * 8 / BITS_PER_S
                round_trips.append((spent_s - 1.2 * payload_s) / LATENCY_S)
                after_commit.append(spent_s)
                after_call.append(applied_s[version.version] - called_s)
            follower.stop()
            thread.join()
            check_same(steps[-1], root / "f")
    return {
        "commit_to_applied_s": statistics.median(after_commit),
        "call_of_publish_to_applied_s": statistics.median(after_call),
        "round_trips_beside_1.2_payload": statistics.median(round_trips),
        "worst_round_trips_beside_1.2_payload": max(round_trips),
    }


def many_deltas(first: Path, count: int) -> dict[str, float]:
    """One follower takes ``count`` deltas of a model of this shape, each changing 0.2 %."""
    rng = np.random.default_rng(1)
    weights = {
        name: array.view(np.uint16)
        for name, array in load_bits(first / "model.safetensors").items()
    }
    with scratch() as root:
        stream = open_stream(f"file://{root}/store")
        times, memory = [], []
        with (
            Publisher(stream, root / "base", maintain=False) as publisher,
            Follower(stream, root / "f") as follower,
        ):
            publisher.publish(first)
            follower.catch_up()
            for number in range(count):
                for words in weights.values():
                    flat = words.reshape(-1)
                    chosen = rng.integers(0, flat.size, max(1, flat.size // 500))
                    flat[chosen] ^= 1
                publisher.publish({name: as_bf16(words) for name, words in weights.items()})
                start_s = time.process_time()
                follower.catch_up()
                times.append(time.process_time() - start_s)
                memory.append(resident_bytes())
                if number % 100 == 99:
                    print(f"  {number + 1} deltas, {memory[-1] >> 20} MiB", file=sys.stderr)
            if digests(root / "base") != digests(root / "f"):
                sys.exit("the follower differs from the publisher")
    tenth = max(1, count // 10)
    return {
        "deltas": count,
        "memory_growth_percent": 100
        * (statistics.median(memory[-tenth:]) / statistics.median(memory[tenth : 2 * tenth]) - 1),
        "cpu_s_first_tenth": statistics.median(times[tenth : 2 * tenth]),
        "cpu_s_last_tenth": statistics.median(times[-tenth:]),
    }


def merges(steps: list[Path]) -> dict[str, float]:
    """What merging saves: a merged delta against the step deltas that it stands for."""
    with scratch() as root:
        stream = open_stream(f"file://{root}/store")
        sizes = {}
        with Publisher(stream, root / "base", maintain=False) as publisher:
            for step in steps[:17]:
                version = publisher.publish(step)
                sizes[version.version] = version.payload_bytes
        start_s = time.perf_counter()
        with Maintainer(stream, root / "work") as maintainer:
            made = maintainer.run_once().merge_count
        wall_s = time.perf_counter() - start_s
        catalog = stream.catalog(stream.record().lineage)
        shares: dict[int, list[float]] = {}
        for merge in catalog.merges:
            span = range(merge.base + 1, merge.version + 1)
            share = merge.size / sum(sizes[version] for version in span)
            shares.setdefault(len(span), []).append(share)
    return {f"merge_{level}_of_its_steps": statistics.mean(s) for level, s in shares.items()} | {
        "merges": made,
        "seconds_a_merge": wall_s / made,
    }


def load_bits(path: Path) -> dict[str, np.ndarray]:
    """The BF16 words of a safetensors file."""
    import ml_dtypes  # noqa: F401 - teaches numpy the dtype

    return {name: array.view(np.uint16) for name, array in load_file(path).items()}


def as_bf16(words: np.ndarray) -> np.ndarray:
    """Words as the BF16 that they are."""
    import ml_dtypes

    return words.view(ml_dtypes.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deltas", type=int, default=1000)
    asked = parser.parse_args()
    runs = sorted(path for path in asked.corpus.iterdir() if path.is_dir())
    run = next((path for path in runs if "lr1e-6" in path.name), runs[0])
    steps = sorted(run.glob("[0-9]*"))
    rows = {
        "replay": replay(steps),
        "merges": merges(steps),
        "slow_link": slow_link(steps),
        "many_deltas": many_deltas(steps[0], asked.deltas),
    }
    for name, row in rows.items():
        for key, value in row.items():
            print(f"{name:12} {key:40} {value:.4g}")
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
