"""The store goes away, hangs, comes back, or has something else than it must."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from thinwire.errors import ChecksumMismatch, FormatError, Unavailable
from thinwire.follow import Follower, open_stream
from thinwire.relay import blocks as blocks_room
from thinwire.relay import upstream as upstream_room
from thinwire.store import open_store
from thinwire.testing.faults import FaultStore, Rates

from .making import (
    KEY,
    DictStore,
    Running,
    Upstream,
    bits,
    caught_up,
    data_keys,
    held,
    history,
    large,
    manifest_of,
    publish,
    relaying,
    resigned,
    stepped,
    until,
)


@pytest.fixture(autouse=True)
def _quick_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_room, "_STALLED_S", 0.7)
    monkeypatch.setattr(upstream_room, "_WAITS_S", (0.01,))


def is_away(relay: Running) -> bool:
    return relay.metric("upstream_up") == 0


def wait_until_away(relay: Running) -> None:
    until(lambda: relay.get("/o/head.json") and is_away(relay))


def wait_until_back(relay: Running) -> None:
    until(lambda: not is_away(relay))


def read_what_comes(url: str) -> tuple[int, bytes]:
    """The status, 0 where the answer broke off, and the bytes until then."""
    received = b""
    try:
        with httpx.stream("GET", url, trust_env=False) as answer:
            for piece in answer.iter_raw():
                received += piece
    except httpx.HTTPError:
        return 0, received
    return answer.status_code, received


@pytest.mark.parametrize("hangs", [False, True])
def test_what_is_held_is_served_while_the_store_is_away(hangs: bool, tmp_path: Path) -> None:
    versions = history(3)
    store = DictStore()
    publish(store, tmp_path / "baseline", versions[:2])
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:
        caught_up(relay.url, tmp_path / "before")
        if hangs:
            upstream.hanging.clear()
        else:
            upstream.is_away = True
        wait_until_away(relay)
        # A new follower finds the newest version that is held, and what it needs.
        assert caught_up(relay.url, tmp_path / "meanwhile") == bits(versions[1])
        head = relay.get("/o/head.json")
        assert head.status_code == 200
        assert float(head.headers["thinwire-age-s"]) >= 0
        # Published meanwhile, elsewhere: nobody here can know, and nobody waits.
        publish(store, tmp_path / "baseline", versions[2:])
        lineage = manifest_of(store, 1).lineage
        later = relay.get(f"/o/{lineage}/manifests/{3:012d}.json")
        assert (later.status_code, "thinwire-age-s" in later.headers) == (404, True)
        upstream.is_away = False
        upstream.hanging.set()
        wait_until_back(relay)
        with Follower(open_stream(relay.url), tmp_path / "meanwhile") as follower:
            follower.wait_for(3, 30, poll_s=0.05)
        assert held(tmp_path / "meanwhile") == bits(versions[2])
        assert "thinwire-age-s" not in relay.get("/o/head.json").headers


def test_what_is_not_held_is_said_at_once(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large()])
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:
        relay.get("/o/stream.json")
        lineage = manifest_of(store, 1).lineage
        assert relay.get(f"/o/{lineage}/manifests/{1:012d}.json").status_code == 200
        upstream.is_away = True
        wait_until_away(relay)
        (key,) = [key for key, size in data_keys(store, 1).items() if size > 1 << 20]
        tries = len(upstream.log)
        answers = [relay.get(f"/o/{key}") for _ in range(20)]
        assert {answer.status_code for answer in answers} == {503}
        error = answers[0].json()["error"]
        assert error["code"] == "unavailable"
        assert upstream.url in error["message"]
        assert "does not answer" in error["message"]
        # Nor is the store asked for each of them.
        assert len(upstream.log) - tries < 15
        with pytest.raises(Unavailable, match="HTTP 503"):
            open_store(relay.url, retry_s=0).get(key, limit_bytes=1 << 30)


def test_a_restart_while_the_store_is_away(tmp_path: Path) -> None:
    versions = history(3)
    store = DictStore()
    publish(store, tmp_path / "baseline", versions, KEY)
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache", trusted_keys=[KEY.public]) as relay:
        caught_up(relay.url, tmp_path / "f", trusted_keys=[KEY.public])
    upstream.is_away = True
    with relaying(upstream, tmp_path / "cache", trusted_keys=[KEY.public]) as relay:
        found = caught_up(relay.url, tmp_path / "g", trusted_keys=[KEY.public])
    assert found == bits(versions[-1])


def test_the_store_goes_away_in_the_middle_of_an_object(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large(size_bytes=12 << 20)])
    upstream = Upstream(store)
    first = threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "get_range" and "/anchors/" in key:
            if first.is_set():
                upstream.is_away = True
            first.set()

    with relaying(upstream, tmp_path / "cache") as relay:
        upstream.before = before
        (key,) = [key for key, size in data_keys(store, 1).items() if size > 1 << 20]
        whole = store.get(key, limit_bytes=1 << 30)
        status, received = read_what_comes(f"{relay.url}/o/{key}")
        # What came is right, and the end that was not due shows.
        assert status == 0
        assert len(received) < len(whole)
        assert whole.startswith(received)
        upstream.before = lambda operation, key: None
        upstream.is_away = False
        wait_until_back(relay)
        assert relay.get(f"/o/{key}").content == whole


def test_a_corrupt_object_is_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_room, "_WRONG_S", 3600.0)
    store = DictStore()
    publish(store, tmp_path / "baseline", [large()])
    upstream = Upstream(store)
    (key,) = [key for key, size in data_keys(store, 1).items() if size > 1 << 20]
    whole = store.get(key, limit_bytes=1 << 30)
    # The fifth block of the object in the store is another one.
    at = 4 * (1 << 18) + 77
    bad = bytearray(whole)
    bad[at] ^= 1
    store.put(key, bytes(bad))
    with relaying(upstream, tmp_path / "cache") as relay:

        def read(number: int) -> bytes:
            status, received = read_what_comes(f"{relay.url}/o/{key}")
            assert status in (0, 502)
            return received if status == 0 else b""

        with ThreadPoolExecutor(8) as pool:
            for received in pool.map(read, range(16)):
                assert whole.startswith(received)
                assert len(received) <= 4 << 18
        # The rest of the object is to be had.
        good = relay.get(f"/o/{key}", range=f"bytes={5 << 18}-")
        assert good.content == whole[5 << 18 :]
        refused = relay.get(f"/o/{key}", range=f"bytes={at}-{at}")
        assert refused.status_code == 502
        assert refused.json()["error"]["code"] == "checksum-mismatch"
        with pytest.raises(ChecksumMismatch):
            open_store(relay.url, retry_s=0).get(key, limit_bytes=1 << 30)
        assert relay.metric("wrong_blocks_total") >= 1
        with pytest.raises(FormatError):
            caught_up(relay.url, tmp_path / "f")
        # And once it was mended it is fetched again, but not at once.
        store.put(key, whole)
        refused = relay.get(f"/o/{key}", range=f"bytes={at}-{at}")
        assert refused.status_code == 502
        monkeypatch.setattr(blocks_room, "_WRONG_S", 0.0)
        assert caught_up(relay.url, tmp_path / "f") == bits(large())


def test_a_manifest_by_nobody_known_is_never_served(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", history(2), KEY)
    lineage = manifest_of(store, 1).lineage
    second = f"{lineage}/manifests/{2:012d}.json"
    good = store.get(second, limit_bytes=1 << 20)
    first = store.get(f"{lineage}/manifests/{1:012d}.json", limit_bytes=1 << 20)
    changed = good.replace(b'"created_ms":1', b'"created_ms":2')
    for bad in (changed, resigned(good), b"", b"{}", first, good[:-1]):
        store.put(second, bad)
        with relaying(store, tmp_path / "cache", trusted_keys=[KEY.public]) as relay:
            answer = relay.get(f"/o/{second}")
            assert answer.status_code == 502, bad
            assert answer.json()["error"]["code"] in ("signature-invalid", "corrupt")
            key = next(iter(data_keys_of(good)))
            assert relay.get(f"/o/{key}").status_code == 502


def data_keys_of(data: bytes) -> list[str]:
    from thinwire.stream.encoding import parse
    from thinwire.stream.places import objects_of
    from thinwire.stream.records import Manifest

    return [*objects_of(parse(data, Manifest, "it"))]


def test_a_store_of_many_faults(tmp_path: Path) -> None:
    versions = [large(size_bytes=2 << 20)]
    versions.append(stepped(versions[0], 1))
    store = DictStore()
    publish(store, tmp_path / "baseline", versions)
    rates = Rates(fail_before=0.1, fail_after=0.05, truncate=0.05, drop=0.2, duplicate=0.2)
    faulty = FaultStore(store, random.Random(7), rates=rates)
    with relaying(faulty, tmp_path / "cache") as relay:

        def follow(number: int) -> dict[str, str]:
            with Follower(open_stream(relay.url), tmp_path / f"f{number}") as follower:
                follower.wait_for(2, 60, poll_s=0.05)
            return held(tmp_path / f"f{number}")

        with ThreadPoolExecutor(2) as pool:
            assert all(found == bits(versions[-1]) for found in pool.map(follow, range(2)))
