"""A stream of a thousand versions under the default policy: what a joiner, and a follower, ask."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from thinwire import Follower, Maintainer, Publisher, open_stream
from thinwire.follow.stream import Stream
from thinwire.store import CountingStore, StoreWrapper, open_store
from thinwire.stream import keys
from thinwire.stream.events import Event, Fetched

VERSIONS = 1000
WORDS = 40_000


class KeyedStore(StoreWrapper):
    """Notes the key of every object that is read."""

    def __init__(self, store: object) -> None:
        super().__init__(store)  # type: ignore[arg-type]
        self.keys: list[str] = []

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        self.keys.append(key)
        return super().get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self.keys.append(key)
        return super().get_range(key, start, stop)


class Long(NamedTuple):
    """A long stream: its URL, the weights of its newest versions, and what publishes to it."""

    url: str
    weights: dict[int, np.ndarray]
    publisher: Publisher
    rng: np.random.Generator
    work: Path


def step(long: Long) -> None:
    """Publish one more version: half a percent of the weights move by one step."""
    version = max(long.weights)
    new = long.weights[version].copy()
    chosen = long.rng.random(new.size) < 0.005
    new.view(np.uint16)[chosen] += np.uint16(1)
    long.publisher.publish({"w": new}, step=version)
    long.weights[version + 1] = new
    long.weights.pop(version - 40, None)


@pytest.fixture(scope="module")
def long(work: Path) -> Long:
    url = f"memory://{secrets.token_hex(8)}"
    rng = np.random.default_rng(3)
    first = rng.normal(0, 0.02, WORDS).astype(np.float16)
    publisher = Publisher(open_stream(url), work / "base", maintain=False)
    publisher.publish({"w": first}, step=0)
    made = Long(url, {1: first}, publisher, rng, work / "work")
    while max(made.weights) < VERSIONS:
        step(made)
    with Maintainer(open_stream(url), made.work) as maintainer:
        maintainer.run_once()
    return made


def counted(url: str) -> tuple[Stream, KeyedStore, CountingStore]:
    counting = CountingStore(open_store(url))
    keyed = KeyedStore(counting)
    return open_stream(keyed), keyed, counting


def best_bytes(sizes: Mapping[str, int], lineage: str, version: int) -> int:
    """The fewest object bytes by which a version can be reached: every object is looked at."""
    best = {1: sum(size for key, size in sizes.items() if key.startswith(keys.anchors(lineage)))}
    edges: Counter[tuple[int, int]] = Counter()
    for key, size in sizes.items():
        if key.startswith(keys.deltas(lineage)):
            found = keys.versions_of(key.removeprefix(keys.deltas(lineage)).split("/")[0])
            assert found is not None
            edges[found] += size
    for base, target in sorted(edges, key=lambda edge: edge[1]):
        # Every base comes before: deltas lead forwards.
        cost = best[base] + edges[base, target]
        best[target] = min(best.get(target, cost), cost)
    return best[version]


def test_a_late_joiner_fetches_an_anchor_and_a_handful(long: Long, tmp_path: Path) -> None:
    worst = 0
    while max(long.weights) <= VERSIONS + 23:
        version = max(long.weights)
        with Maintainer(open_stream(long.url), long.work) as maintainer:
            maintainer.run_once()
        stream, keyed, counting = counted(long.url)
        with Follower(stream, tmp_path / str(version), lease=False) as follower:
            assert follower.catch_up().version == version
        held = load_file(tmp_path / str(version) / "model.safetensors")["w"]
        assert held.tobytes() == long.weights[version].tobytes()
        lineage = stream.record().lineage
        anchors = {key for key in keyed.keys if "/anchors/" in key and not key.endswith(".json")}
        deltas = {key for key in keyed.keys if key.startswith(keys.deltas(lineage))}
        sizes = {entry.key: entry.size_bytes for entry in open_store(long.url).list("")}
        fetched = sum(sizes[key] for key in anchors | deltas)
        assert len(anchors) == 1
        assert len(deltas) <= 16
        assert fetched <= 1.25 * best_bytes(sizes, lineage, version)
        # stream, head, its manifest, a look beyond, catalog, first manifest; then for each delta
        # its object and up to two manifests: that of a merged delta, and that of its target.
        requests = sum(counting.counts().requests.values())
        assert requests <= 6 + len(anchors) + 3 * len(deltas)
        worst = max(worst, len(deltas))
        step(long)
    assert worst > 8  # the hard cases were among them


def test_a_steady_follower_asks_three_times_a_version(long: Long, tmp_path: Path) -> None:
    stream, _, counting = counted(long.url)
    with Follower(stream, tmp_path / "f", lease=False) as follower:
        follower.catch_up()
        for _ in range(12):
            step(long)
            counting.reset()
            assert follower.catch_up().version == max(long.weights)
            assert counting.counts().requests == {"get": 3}


def test_a_follower_far_behind_takes_the_wide_deltas(long: Long, tmp_path: Path) -> None:
    kinds: Counter[str] = Counter()

    class Watch:
        def on_event(self, event: Event) -> None:
            if isinstance(event, Fetched):
                kinds[event.kind] += 1

    with Maintainer(open_stream(long.url), long.work) as maintainer:
        maintainer.run_once()
    with Follower(open_stream(long.url), tmp_path / "f", observer=Watch()) as follower:
        follower.catch_up(VERSIONS - 700)
        kinds.clear()
        assert follower.catch_up().version == max(long.weights)
    assert kinds["merge"] >= 3
    assert sum(kinds.values()) <= 24
