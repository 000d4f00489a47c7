"""What hangs, is slow, or was replaced holds up nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from thinwire.errors import Unavailable
from thinwire.relay import records as records_room
from thinwire.relay import upstream as upstream_room
from thinwire.relay import watch as watch_room
from thinwire.relay.files import LruFolder
from thinwire.relay.records import Records
from thinwire.relay.upstream import PARALLEL
from thinwire.relay.upstream import Upstream as RelaysUpstream
from thinwire.store.clock import VirtualClock
from thinwire.stream import keys

from .making import (
    KEY,
    DictStore,
    Running,
    Upstream,
    bits,
    caught_up,
    data_keys,
    history,
    large,
    manifest_of,
    place,
    publish,
    relaying,
    until,
)


def reading(
    relay: Running, key: str, start: int, stop: int
) -> tuple[threading.Thread, list[bytes]]:
    """A follower that reads a range meanwhile, and what it got."""
    got: list[bytes] = []

    def read() -> None:
        answer = httpx.get(
            f"{relay.url}/o/{key}",
            headers={"range": f"bytes={start}-{stop - 1}"},
            trust_env=False,
            timeout=60,
        )
        got.append(answer.content)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, got


@pytest.mark.parametrize("path", ["/o/head.json", "/list?prefix="])
def test_records_do_not_queue_behind_data(path: str, tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large(size_bytes=50 << 20)])
    upstream = Upstream(store)
    (key,) = [key for key, size in data_keys(store, 1).items() if size > 1 << 20]
    released, came = threading.Event(), threading.Semaphore(0)

    def before(operation: str, name: str) -> None:
        if operation == "get_range":
            came.release()
            released.wait(60)

    with relaying(upstream, tmp_path / "cache", limit_bytes=128 << 20, poll_s=0.5) as relay:
        upstream.before = before
        readers = [reading(relay, key, n * (12 << 20), (n + 1) * (12 << 20)) for n in range(4)]
        for _ in range(PARALLEL):
            assert came.acquire(timeout=30)
        # All that fetch data are busy, and more of it waits.
        answer = relay.get(path)
        assert (answer.status_code, "thinwire-age-s" in answer.headers) == (200, False)
        assert not released.is_set()
        released.set()
        whole = store.get(key, limit_bytes=1 << 30)
        for number, (thread, got) in enumerate(readers):
            thread.join(60)
            assert got == [whole[number * (12 << 20) : (number + 1) * (12 << 20)]]


def test_a_key_that_is_throttled_breaks_off_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_room, "_WAITS_S", (0.01, 0.01))
    store = DictStore()
    publish(store, tmp_path / "baseline", [large(size_bytes=8 << 20)])
    upstream = Upstream(store)
    (key,) = [key for key, size in data_keys(store, 1).items() if size > 1 << 20]
    lineage = manifest_of(store, 1).lineage
    # One that the relay itself does not look for.
    throttled = keys.manifest(lineage, 77)
    released, came = threading.Event(), threading.Event()

    def before(operation: str, name: str) -> None:
        if name == throttled:
            raise Unavailable("503 SlowDown")
        if operation == "get_range":
            came.set()
            released.wait(60)

    with relaying(upstream, tmp_path / "cache", poll_s=1000.0) as relay:
        until(lambda: relay.one.watch.head)
        upstream.before = before
        thread, got = reading(relay, key, 0, 8 << 20)
        assert came.wait(30)
        for _ in range(5):
            answer = relay.get(f"/o/{throttled}")
            # Whoever asked comes back, and does not take it for an absence, or the relay for gone.
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        until(lambda: not relay.one.upstream._probe_count)
        assert relay.metric("upstream_up") == 1
        released.set()
        thread.join(60)
        assert got == [store.get(key, limit_bytes=1 << 30)[: 8 << 20]]


def test_a_large_record_that_takes_its_time_is_no_stall(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = DictStore()
    publish(store, tmp_path / "baseline", history(1))
    upstream = Upstream(store)
    near = RelaysUpstream(upstream, clock)
    records = Records(near, LruFolder(tmp_path / "cache", 1 << 20), clock=clock)
    lineage = manifest_of(store, 1).lineage
    released, came = threading.Event(), threading.Event()

    def before(operation: str, name: str) -> None:
        if name == keys.catalog(lineage):
            came.set()
            released.wait(60)

    upstream.before = before
    flight = records.find(place(keys.catalog(lineage)))
    assert came.wait(30)
    clock.sleep_until(clock.now() + 10)
    near.tick()
    assert near.away_s is None
    released.set()
    flight.result(30)


def replaced(store: DictStore, folder: Path) -> None:
    store.objects.clear()
    publish(store, folder / "other", history(5), KEY)


def set_back(store: DictStore, folder: Path) -> None:
    lineage = manifest_of(store, 1).lineage
    store.delete([keys.manifest(lineage, version) for version in (2, 3)])
    store.delete([keys.HEAD])


@pytest.mark.parametrize(("change", "version"), [(replaced, 5), (set_back, 1)])
def test_a_stream_that_was_replaced_or_set_back(
    change: Callable[[DictStore, Path], None],
    version: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watch_room, "_CHECK_S", 0.2)
    store = DictStore()
    publish(store, tmp_path / "baseline", history(3), KEY)
    trusted = [KEY.public]
    with relaying(store, tmp_path / "cache", trusted_keys=trusted, poll_s=0.05) as relay:
        until(lambda: relay.one.watch.head and relay.one.watch.head.version == 3)
        lineage = manifest_of(store, 1).lineage
        assert relay.get(f"/o/{keys.manifest(lineage, 3)}").status_code == 200
        change(store, tmp_path)
        until(lambda: relay.one.watch.head and relay.one.watch.head.version == version)
        head = relay.one.watch.head
        assert head is not None
        assert head.lineage == manifest_of(store, 1).lineage
        assert relay.get(f"/o/{keys.manifest(lineage, 3)}").status_code == 404
        assert caplog.text.count("replaced or set back") == 1
        model = history(version)[-1]
        assert caught_up(relay.url, tmp_path / "f", trusted_keys=trusted) == bits(model)


def test_a_stream_that_is_not_there_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DictStore()
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache", poll_s=0.01) as relay:
        until(lambda: upstream.count_of("") or relay.one.watch._failures > 4)
        until(lambda: relay.one.watch._failures > 4)
        assert caplog.text.count("cannot look for new versions") == 1
        publish(store, tmp_path / "baseline", history(1))
        until(lambda: relay.one.watch.head)
    assert caplog.text.count("works again") == 1


def test_what_is_not_there_pushes_out_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_room, "_MAX_ABSENT", 10)
    store = DictStore()
    publish(store, tmp_path / "baseline", history(2))
    upstream = Upstream(store)
    lineage = manifest_of(store, 1).lineage
    with relaying(upstream, tmp_path / "cache", poll_s=1000.0) as relay:
        first = f"/o/{keys.manifest(lineage, 1)}"
        assert relay.get(first).status_code == 200
        # Its own first look reads some as well.
        until(lambda: relay.one.watch.head)
        held_bytes = relay.one.records._held_bytes
        for version in range(100, 150):
            assert relay.get(f"/o/{keys.manifest(lineage, version)}").status_code == 404
        assert relay.one.records._held_bytes == held_bytes
        assert len(relay.one.records._absent) == 10


def test_lineages_that_nothing_names_are_asked_for_seldom(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = DictStore()
    publish(store, tmp_path / "baseline", history(2))
    upstream = Upstream(store)
    records = Records(
        RelaysUpstream(upstream, clock), LruFolder(tmp_path / "cache", 1 << 20), clock=clock
    )
    lineage = manifest_of(store, 1).lineage
    assert records.find(place(keys.manifest(lineage, 1))).result(30).data
    flights = [records.find(place(keys.manifest(f"{n:032x}", 1))) for n in range(200)]
    errors = [flight.exception(30) for flight in flights]
    assert 0 < errors.count(None) < 40
    # It cannot be told, and is not said to be absent.
    assert all("nothing names" in str(error) for error in errors if error is not None)
    # What is known is found all the same, and a second later others are again.
    assert records.find(place(keys.manifest(lineage, 2))).result(30).data
    clock.sleep_until(clock.now() + 2)
    assert records.find(place(keys.manifest("ef" * 16, 1))).result(30).data is None


def test_a_good_record_is_kept_where_it_cannot_be_proved_now(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", history(2))
    upstream = Upstream(store)
    lineage = manifest_of(store, 1).lineage
    wanted, files = place(keys.manifest(lineage, 1)), LruFolder(tmp_path / "cache", 1 << 20)
    before = Records(RelaysUpstream(upstream), files)
    data = before.read(wanted)
    files.drop(before._name(place(keys.STREAM)))
    upstream.is_away = True
    with pytest.raises(Unavailable):
        Records(RelaysUpstream(upstream), files).read(wanted)
    upstream.is_away = False
    taken = upstream.count_of("/manifests/")
    assert Records(RelaysUpstream(upstream), files).read(wanted) == data
    assert upstream.count_of("/manifests/") == taken


def test_a_tick_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("thinwire.relay.relay._TICK_S", 0.01)
    ticks: list[int] = []

    def breaks(upstream: RelaysUpstream) -> None:
        ticks.append(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(RelaysUpstream, "tick", breaks)
    with caplog.at_level(logging.ERROR, logger="thinwire"), relaying(DictStore(), tmp_path / "c"):
        until(lambda: len(ticks) > 3)
    assert "can't start new thread" in caplog.text


def test_an_object_larger_than_the_cache_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large(size_bytes=12 << 20)])
    (key,) = [key for key, size in data_keys(store, 1).items() if size > 1 << 20]
    with relaying(store, tmp_path / "cache", limit_bytes=8 << 20) as relay:
        for _ in range(3):
            assert relay.get(f"/o/{key}", range="bytes=0-9").status_code == 206
    assert caplog.text.count("--limit-bytes") == 1
