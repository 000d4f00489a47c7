"""How many requests a follower makes: few, and no more for a longer history."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.follow import Follower, open_stream
from thinwire.maintain import Maintainer
from thinwire.store import CountingStore
from thinwire.stream.records import Policy

from .making import DictStore, LoggingStore, bits, held, publisher, stepped, tiny


def test_steady_state(tmp_path: Path) -> None:
    """Three requests for each version: its manifest, its delta, and whether there is another."""
    store = DictStore()
    counting = CountingStore(store)
    arrays = tiny()
    with (
        publisher(store, tmp_path / "baseline") as trainer,
        Follower(open_stream(counting), tmp_path / "sink") as follower,
    ):
        trainer.publish(arrays)
        follower.catch_up()
        for seed in range(20):
            arrays = stepped(arrays, seed)
            trainer.publish(arrays)
            counting.reset()
            follower.catch_up()
            assert counting.counts().requests == {"get": 3}
            assert held(tmp_path / "sink") == bits(arrays)
            counting.reset()
            follower.catch_up()
            assert counting.counts().requests == {"get": 1}, "a look that finds nothing"


def test_a_look_in_doubt(tmp_path: Path) -> None:
    """A restarted follower asks once whether what it holds is still in the stream."""
    store = DictStore()
    counting = CountingStore(store)
    with publisher(store, tmp_path / "baseline") as trainer:
        trainer.publish(tiny())
        for _ in range(2):
            counting.reset()
            with Follower(open_stream(counting), tmp_path / "sink", lease=False) as follower:
                follower.catch_up()
    assert counting.counts().requests == {"get": 3}


def test_bytes_are_fetched_once(whole: DictStore, tmp_path: Path) -> None:
    """No object twice, and nothing but what the way needs."""
    store = LoggingStore(whole)
    with Follower(open_stream(store), tmp_path / "sink", lease=False) as follower:
        follower.catch_up(9)
    data = [key for key in store.data_keys() if not key.endswith(".json")]
    assert len(data) == len(set(data)) <= 3


def test_a_longer_history_costs_a_joiner_no_more(tmp_path: Path) -> None:
    """25 versions and 200, looked after: the requests grow with the logarithm at most."""
    store = DictStore()
    arrays = tiny()
    requests = {}
    first_hint = b""
    policy = Policy(merge_levels=[4, 16, 64], anchor_every=64)
    with (
        publisher(open_stream(store, policy=policy), tmp_path / "baseline") as trainer,
        Maintainer(open_stream(store), tmp_path / "work") as maintainer,
    ):
        for version in range(1, 201):
            trainer.publish(arrays, step=version)
            if version in (25, 100, 200):
                maintainer.run_once()
                for head in (True, False):
                    # Also where the hint is stale.
                    if not head:
                        store.put("head.json", first_hint)
                    counting = CountingStore(store)
                    folder = tmp_path / f"sink-{version}-{head}"
                    stream = open_stream(counting)
                    with Follower(stream, folder, lease=False) as follower:
                        assert follower.catch_up().version == version
                    assert held(folder) == bits(arrays)
                    requests[version, head] = sum(counting.counts().requests.values())
            if version == 1:
                first_hint = store.objects["head.json"][0]
            arrays = stepped(arrays, version)
    assert max(requests.values()) <= 40, requests
    for head in (True, False):
        assert requests[200, head] <= requests[25, head] + 12, requests


@pytest.mark.parametrize("tensors", [None, ["layers.0.*"]])
def test_a_shared_cache_spares_the_store(
    tensors: list[str] | None, whole: DictStore, tmp_path: Path
) -> None:
    store = LoggingStore(whole)
    for name in ("one", "two"):
        store.log.clear()
        with Follower(
            open_stream(store),
            tmp_path / name,
            cache_dir=tmp_path / "cache",
            tensors=tensors,
            lease=False,
        ) as follower:
            follower.catch_up(9)
    assert not [key for key in store.data_keys() if not key.endswith(".json")]
    assert held(tmp_path / "one") == held(tmp_path / "two")
