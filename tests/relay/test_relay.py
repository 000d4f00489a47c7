"""Followers through a relay: what they hold, and what crosses to the store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.follow import Follower, open_stream
from thinwire.store import open_store

from .making import (
    DictStore,
    Upstream,
    bits,
    caught_up,
    data_keys,
    held,
    history,
    large,
    maintained,
    manifest_of,
    publish,
    relaying,
    stepped,
    until,
)

FOLLOWERS = 50


def test_fifty_followers_and_one_download(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large()])
    sizes = data_keys(store, 1)
    assert max(sizes.values()) > 4 << 20
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:

        def follow(number: int) -> dict[str, str]:
            return caught_up(relay.url, tmp_path / f"follower-{number}")

        with ThreadPoolExecutor(FOLLOWERS) as pool:
            found = list(pool.map(follow, range(FOLLOWERS)))
        assert all(one == bits(large()) for one in found)
        # Every byte once, by the store's own count and by the relay's.
        for key, size in sizes.items():
            assert upstream.bytes_of(key) == size
        assert relay.metric("missing_bytes_total") == sum(sizes.values())
        assert relay.metric("served_bytes_total") >= FOLLOWERS * sum(sizes.values())
        manifest = f"/manifests/{1:012d}"
        taken = upstream.bytes_of(manifest)
        assert taken == len(store.get(f"{manifest_of(store, 1).lineage}{manifest}.json",
                                      limit_bytes=1 << 20))  # fmt: skip
        assert relay.metric("upstream_bytes_total") < sum(sizes.values()) + (1 << 20)


def test_followers_go_on_step_by_step(tmp_path: Path) -> None:
    versions = history(4)
    store = DictStore()
    publish(store, tmp_path / "baseline", versions[:1])
    with (
        relaying(Upstream(store), tmp_path / "cache") as relay,
        Follower(open_stream(relay.url), tmp_path / "f") as follower,
    ):
        for number, arrays in enumerate(versions, 1):
            if number > 1:
                publish(store, tmp_path / "baseline", [arrays])
            follower.wait_for(number, 30, poll_s=0.05)
            assert held(tmp_path / "f") == bits(arrays)


def test_merged_deltas_and_later_anchors_pass_too(tmp_path: Path) -> None:
    versions = history(8)
    store = DictStore()
    publish(store, tmp_path / "baseline", versions)
    maintained(store, tmp_path / "work")
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:
        assert caught_up(relay.url, tmp_path / "f") == bits(versions[-1])
    assert upstream.count_of("/merges/")


def test_a_new_version_is_fetched_before_anybody_asks(tmp_path: Path) -> None:
    versions = history(2)
    store = DictStore()
    publish(store, tmp_path / "baseline", versions[:1])
    upstream = Upstream(store)
    came = threading.Event()
    with relaying(upstream, tmp_path / "cache", fetches=True, poll_s=0.05) as relay:
        upstream.before = lambda operation, key: "/deltas/" in key and came.set()  # type: ignore[func-returns-value]
        publish(store, tmp_path / "baseline", versions[1:])
        assert came.wait(30)
        (shard,) = data_keys(store, 2)
        until(lambda: relay.one.shelf.files.total_bytes)
        taken = upstream.bytes_of(shard)
        assert relay.get(f"/o/{shard}").content == store.get(shard, limit_bytes=1 << 20)
        assert upstream.bytes_of(shard) == taken


def test_a_wake_up_is_worth_a_look(tmp_path: Path) -> None:
    versions = history(2)
    store = DictStore()
    publish(store, tmp_path / "baseline", versions[:1])
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache", fetches=True, poll_s=1000.0) as relay:
        until(lambda: relay.one.watch.head)
        publish(store, tmp_path / "baseline", versions[1:])
        (shard,) = data_keys(store, 2)
        assert not upstream.bytes_of(shard)
        relay.one.watch.wake()
        until(lambda: upstream.bytes_of(shard))
        assert relay.metric("version") == 2


def test_several_streams_behind_one_relay(tmp_path: Path) -> None:
    stores = {"one": DictStore(), "two.b": DictStore()}
    models = {"one": history(2), "two.b": history(3)}
    for name, store in stores.items():
        publish(store, tmp_path / f"baseline-{name}", models[name])
    with relaying({n: Upstream(s) for n, s in stores.items()}, tmp_path / "cache") as relay:
        for name in stores:
            found = caught_up(f"{relay.root}/{name}", tmp_path / f"f-{name}")
            assert found == bits(models[name][-1])
        # Which of the two is not said, and a key of one is nothing to the other.
        assert relay.get("/../o/head.json").status_code == 421
        key = next(iter(data_keys(stores["two.b"], 1)))
        assert relay.get(f"/o/{key}").status_code == 404


def test_a_relay_before_a_relay(tmp_path: Path) -> None:
    versions = history(2)
    store = DictStore()
    publish(store, tmp_path / "baseline", versions)
    upstream = Upstream(store)
    with (
        relaying(upstream, tmp_path / "far") as far,
        relaying(open_store(far.url, retry_s=0), tmp_path / "near") as near,
    ):
        assert caught_up(near.url, tmp_path / "f") == bits(versions[-1])
        assert caught_up(near.root, tmp_path / "g") == bits(versions[-1])
    for version in (1, 2):
        for key, size in data_keys(store, version).items():
            assert upstream.bytes_of(key) == size


def test_a_partial_follower_costs_only_its_blocks(tmp_path: Path) -> None:
    arrays = large(size_bytes=4 << 20) | {
        "other": large(1, 4 << 20)["w"],
    }
    store = DictStore()
    publish(store, tmp_path / "baseline", [arrays])
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:
        with Follower(open_stream(relay.url), tmp_path / "f", tensors=["other"]) as follower:
            follower.catch_up()
        assert held(tmp_path / "f") == bits({"other": arrays["other"]})
        total = sum(data_keys(store, 1).values())
        assert upstream.bytes_of("/anchors/") < total * 0.75


@pytest.mark.parametrize("is_warm", [False, True])
def test_the_relay_starts_again_with_what_it_holds(is_warm: bool, tmp_path: Path) -> None:
    versions = [large(), stepped(large(), 1)]
    store = DictStore()
    publish(store, tmp_path / "baseline", versions)
    upstream = Upstream(store)
    if is_warm:
        with relaying(upstream, tmp_path / "cache") as relay:
            caught_up(relay.url, tmp_path / "f")
    taken = upstream.bytes_of("/anchors/") + upstream.bytes_of("/deltas/")
    with relaying(upstream, tmp_path / "cache") as relay:
        assert caught_up(relay.url, tmp_path / "g") == bits(versions[-1])
    again = upstream.bytes_of("/anchors/") + upstream.bytes_of("/deltas/")
    assert (again == taken) == is_warm
