"""The relay's parts, each alone: with a clock that stands still, and threads that hang."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import AccessDenied, NotFound, StoreError, Unavailable
from thinwire.relay import needs as needs_room
from thinwire.relay.blocks import Block, Room
from thinwire.relay.needs import Needs, UpstreamLease
from thinwire.relay.sending import Budget
from thinwire.relay.upstream import Upstream
from thinwire.relay.workers import Flights, Workers
from thinwire.store import Store, StoreWrapper
from thinwire.store.clock import VirtualClock
from thinwire.stream import keys
from thinwire.stream.blocks import record_of
from thinwire.stream.places import place_of
from thinwire.stream.records import LEASE_TTL_S

from .making import DictStore, until

LINEAGE = "ab" * 16
HOLDER = "cd" * 16


class Flaky(StoreWrapper):
    """Does next what the test says."""

    def __init__(self) -> None:
        super().__init__(DictStore())
        self.act: Callable[[], bytes] = lambda: b"x"
        self.count = 0

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        self.count += 1
        return self.act()


def fail(error: Exception) -> Callable[[], bytes]:
    def act() -> bytes:
        raise error

    return act


def read(store: Store) -> bytes:
    return store.get("a", limit_bytes=9)


def test_a_passing_failure_is_none() -> None:
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    answers = iter([fail(Unavailable("no")), lambda: b"good"])
    store.act = lambda: next(answers)()
    assert upstream.call(read) == b"good"
    assert upstream.away_s is None


def test_away_and_back() -> None:
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    told: list[str] = []
    upstream.on_away = lambda error: told.append("away")
    upstream.on_back = lambda: told.append("back")
    store.act = fail(Unavailable("no"))
    with pytest.raises(Unavailable):
        upstream.call(read)
    assert told == ["away"]
    # Nobody else waits for it.
    count = store.count
    for _ in range(50):
        with pytest.raises(Unavailable, match="does not answer"):
            upstream.call(read)
    assert store.count == count
    # A missing object is an answer: it is back.
    store.act = fail(NotFound("none"))
    clock.sleep_until(clock.now() + 60)
    upstream.tick()
    until(lambda: told == ["away", "back"])
    assert upstream.away_s is None


def test_probes_come_seldom_and_at_once_when_asked() -> None:
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    store.act = fail(Unavailable("no"))
    with pytest.raises(Unavailable):
        upstream.call(read)
    for _ in range(5):
        count = store.count
        clock.sleep_until(clock.now() + 60)
        upstream.tick()
        until(lambda before=count: store.count > before and not upstream._probe_count)
        count = store.count
        for _ in range(20):
            upstream.tick()
        assert store.count == count
    store.act = lambda: b"x"
    upstream.hurry()
    until(lambda: upstream.away_s is None)


def test_a_store_that_says_nothing_is_away(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    released, began = threading.Event(), threading.Event()

    def hang() -> bytes:
        began.set()
        released.wait(30)
        return b"late"

    store.act = hang
    done: list[bytes] = []
    upstream.workers.submit(lambda: done.append(upstream.call(read, is_small=True)))
    assert began.wait(30)
    upstream.tick()
    assert upstream.away_s is None
    clock.sleep_until(clock.now() + 6.0)
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        upstream.tick()
    assert upstream.away_s is not None
    assert "did not answer" in caplog.text
    # What hangs is not waited for: others go on with new threads.
    ran = threading.Event()
    upstream.workers.submit(ran.set)
    assert ran.wait(30)
    released.set()
    until(lambda: done and upstream.away_s is None)


def test_workers_are_renewed_but_not_without_end() -> None:
    workers = Workers("test", 4)
    released = threading.Event()
    before = threading.active_count()
    for _ in range(40):
        for _ in range(4):
            workers.submit(lambda: released.wait(30))
        workers.renew()
    assert threading.active_count() - before <= 64 + 8
    released.set()
    ran = threading.Event()
    workers.submit(ran.set)
    assert ran.wait(30)
    workers.close()


def test_flights() -> None:
    flights: Flights[str, int] = Flights()
    first, is_new = flights.join("a")
    again, is_new_again = flights.join("a")
    assert (first is again, is_new, is_new_again) == (True, True, False)
    # Whoever gives up does not end it for the others.
    assert not first.cancel()
    flights.land(first, 5)
    flights.forget("a", first)
    assert again.result(0) == 5
    second, is_new = flights.join("a")
    assert is_new
    flights.fail("a", second, ValueError())
    assert flights.join("a")[1]
    assert [key for key, _ in flights.take_all()] == ["a"]
    assert "a" not in flights


def test_room() -> None:
    room = Room(100)
    entered = threading.Event()

    def enter() -> None:
        with room.taking(1):
            entered.set()

    thread = threading.Thread(target=enter)
    # One alone has it, however large; a second one waits.
    with room.taking(1_000):
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(30)
    thread.join()


def test_slow_readers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.relay import sending

    monkeypatch.setattr(sending, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(sending, "_SLOW_BYTES_PER_S", 1 << 40)
    records = [record_of(bytes([n]) * 1000) for n in range(4)]

    async def run() -> None:
        budget = Budget(2_500)
        dropped: list[int] = []
        ended = [asyncio.Event() for _ in range(4)]

        async def hold(number: int) -> None:
            def drop() -> None:
                dropped.append(number)
                ended[number].set()

            async with budget.holding(Block("k", records[number], 0), drop):
                await ended[number].wait()

        tasks = [asyncio.create_task(hold(number)) for number in (0, 1, 1, 2)]
        await asyncio.sleep(0)
        # The same block counts once, the third has to wait.
        assert budget.used_bytes == 2_000
        while not dropped:
            await asyncio.sleep(0.01)
        assert dropped[0] == 0
        assert budget.dropped_count >= 1
        for event in ended:
            event.set()
        await asyncio.gather(*tasks)
        assert budget.used_bytes == 0

    asyncio.run(run())


def test_needs_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    needs = Needs(clock)
    needs.put("a", LINEAGE, 5)
    clock.sleep_until(1000)
    needs.put("b", LINEAGE, 7)
    assert needs.oldest().version == 5  # type: ignore[union-attr]
    clock.sleep_until(LEASE_TTL_S + 1)
    assert needs.oldest().version == 7  # type: ignore[union-attr]
    needs.drop("b", 6)
    assert len(needs) == 1
    needs.drop("b", 7)
    assert needs.oldest() is None
    monkeypatch.setattr(needs_room, "MAX_HOLDERS", 3)
    for holder in "xyz":
        needs.put(holder, LINEAGE, 1)
    with pytest.raises(Unavailable):
        needs.put("w", LINEAGE, 1)
    needs.put("x", LINEAGE, 2)


def test_a_store_that_may_only_be_read(caplog: pytest.LogCaptureFixture) -> None:
    class ReadOnly(StoreWrapper):
        def put(self, key: str, data: bytes) -> None:
            raise AccessDenied(f"cannot write {key}")

    needs = Needs()
    lease = UpstreamLease(ReadOnly(DictStore()), needs)
    for version in (5, 4, 3):
        needs.put("a", LINEAGE, version)
        with caplog.at_level(logging.WARNING, logger="thinwire"):
            lease.renew()
    assert caplog.text.count("told nowhere") == 1
    lease.end()


def test_a_need_outlives_a_store_that_fails_once() -> None:
    store = DictStore()
    needs = Needs()
    is_broken = True

    class Breaking(StoreWrapper):
        def put(self, key: str, data: bytes) -> None:
            if is_broken:
                raise StoreError("no")
            super().put(key, data)

    lease = UpstreamLease(Breaking(store), needs)
    needs.put("a", LINEAGE, 5)
    is_broken = False
    lease.renew()
    is_broken = True
    needs.put("b", LINEAGE, 3)
    lease.renew()
    assert [keys.leased_version(key) for key in store.find("leases/")] == [5]
    is_broken = False
    lease.renew()
    assert [keys.leased_version(key) for key in store.find("leases/")] == [3]


PLACES = {
    keys.STREAM: "stream",
    keys.HEAD: "head",
    keys.catalog(LINEAGE): "catalog",
    keys.manifest(LINEAGE, 7): "manifest",
    keys.merge(LINEAGE, 3, 7): "merge",
    keys.anchor(LINEAGE, 7): "anchor",
    keys.shard(LINEAGE, 6, 7, HOLDER, 0, "e" * 64): "shard",
    keys.anchor_file(LINEAGE, 7, HOLDER, "model.safetensors"): "file",
    keys.lease(HOLDER, 7): "lease",
}


def test_places() -> None:
    for key, kind in PLACES.items():
        place = place_of(key)
        assert place is not None
        assert place.kind == kind
        if kind not in ("stream", "head", "catalog"):
            assert place.version == 7
        for other in (f"{key}x", f"/{key}", key[:-1], key.upper(), f"{key}/x", f"x/{key}"):
            if kind != "file":
                assert place_of(other) is None, other
    assert place_of(keys.maintainer()) is None


@given(st.text())
def test_any_text_is_some_place_or_none(text: str) -> None:
    place = place_of(text)
    assert place is None or place.key == text


def test_a_cache_of_no_use_is_said_so(tmp_path: Path) -> None:
    from thinwire.relay.files import LruFolder

    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        LruFolder(tmp_path / "file", 100)
