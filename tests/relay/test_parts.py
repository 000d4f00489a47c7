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
from thinwire.relay import upstream as upstream_room
from thinwire.relay.blocks import Block, Blocks, BlockShelf
from thinwire.relay.files import LruFolder
from thinwire.relay.needs import Needs, UpstreamLease
from thinwire.relay.sending import Budget
from thinwire.relay.upstream import Upstream
from thinwire.relay.workers import Flights, Room, Workers
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


def go_away(store: Flaky, upstream: Upstream) -> None:
    store.act = fail(Unavailable("no"))
    with pytest.raises(Unavailable):
        upstream.call(read)
    until(lambda: upstream.away_s is not None and not upstream._probe_count)


def test_away_and_back() -> None:
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    told: list[str] = []
    upstream.on_stall = lambda error: told.append("stalled")
    upstream.on_back = lambda: told.append("back")
    go_away(store, upstream)
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
    until(lambda: told == ["back"])
    assert upstream.away_s is None


def test_what_fails_alone_is_not_the_store() -> None:
    """A bucket that throttles one key, and answers all else."""

    class Throttling(Flaky):
        def get(self, key: str, *, limit_bytes: int) -> bytes:
            self.count += 1
            if key == keys.STREAM:
                return b"here"
            raise Unavailable("503 SlowDown")

    store, clock = Throttling(), VirtualClock()
    upstream = Upstream(store, clock)
    told: list[str] = []
    upstream.on_stall = lambda error: told.append("stalled")
    for _ in range(20):
        clock.sleep_until(clock.now() + 1)
        with pytest.raises(Unavailable, match="SlowDown") as raised:
            upstream.call(read)
        assert not raised.value.context.get("is_away")
        until(lambda: not upstream._probe_count)
    assert upstream.away_s is None
    assert told == []


def test_a_probe_that_cannot_start_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    go_away(store, upstream)
    store.act = lambda: b"x"

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(60):
            clock.sleep_until(clock.now() + 60)
            with pytest.raises(RuntimeError):
                upstream.tick()
    clock.sleep_until(clock.now() + 60)
    upstream.tick()
    until(lambda: upstream.away_s is None)


def test_data_under_way_is_left_in_peace() -> None:
    """Over a thin link each piece takes long; only where nothing ends is it asked why."""
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    released, began = threading.Event(), threading.Event()
    ended: list[bytes] = []

    def slow() -> bytes:
        began.set()
        released.wait(30)
        return b"piece"

    store.act = slow
    upstream.workers.submit(lambda: ended.append(upstream.call(read)))
    assert began.wait(30)
    store.act = lambda: b"piece"
    for _ in range(10):
        clock.sleep_until(clock.now() + 4)
        upstream.call(read)
        count = store.count
        upstream.tick()
        assert store.count == count
        assert not upstream._probe_count
    clock.sleep_until(clock.now() + 6)
    upstream.tick()
    until(lambda: store.count == count + 1)
    assert upstream.away_s is None
    released.set()
    until(lambda: ended)


def test_probes_come_seldom_and_at_once_when_asked() -> None:
    store, clock = Flaky(), VirtualClock()
    upstream = Upstream(store, clock)
    go_away(store, upstream)
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
    entered: list[bool] = []
    threads = [threading.Thread(target=lambda: entered.append(room.take(1))) for _ in range(2)]
    # One alone has it, however large; a second one waits.
    assert room.take(1_000)
    threads[0].start()
    threads[0].join(0.2)
    assert not entered
    room.give(1_000)
    threads[0].join(30)
    assert entered == [True]
    # What never comes back holds up nobody: they are sent to the next room.
    assert room.take(99)
    threads[1].start()
    room.retire()
    threads[1].join(30)
    assert entered == [True, False]


def test_a_fetch_that_hangs_holds_up_no_other_stream_nor_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_room, "FETCHING_BYTES", 1500)
    store = DictStore()
    records = []
    for number in range(3):
        data = bytes([number]) * 1000
        store.put(f"a/{number}", data)
        records.append(record_of(data))
    released, began = threading.Event(), threading.Event()

    class Hanging(StoreWrapper):
        def get_range(self, key: str, start: int, stop: int) -> bytes:
            if key == "a/0":
                began.set()
                released.wait(60)
            return super().get_range(key, start, stop)

    shelf = BlockShelf(LruFolder(tmp_path, 1 << 30))
    clock = VirtualClock()
    broken = Upstream(Hanging(store), clock)
    these, others = Blocks(broken, shelf), Blocks(Upstream(store), shelf)
    broken.on_stall = these.fail_all
    hung = these.want(Block("a/0", records[0], 0), 1)
    assert began.wait(30)
    waiting = these.want(Block("a/1", records[1], 0), 1)
    assert others.want(Block("a/2", records[2], 0), 1).result(30) == bytes([2]) * 1000
    assert not waiting.done()
    # Once the store is known to be away, and back, all goes on without what hangs.
    broken._failed(Unavailable("no"))
    clock.sleep_until(clock.now() + 6)
    broken.tick()
    for flight in (hung, waiting):
        with pytest.raises(Unavailable):
            flight.result(30)
    until(lambda: broken.away_s is None)
    found = these.want(Block("a/1", records[1], 0), 1)
    assert found.result(30) == bytes([1]) * 1000
    assert not released.is_set()
    released.set()


def test_workers_outlive_what_they_are_given(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers("test", 2)
    for _ in range(10):
        workers.submit(lambda: 1 // 0)  # type: ignore[arg-type]
    ran = threading.Event()
    workers.submit(ran.set)
    assert ran.wait(30)
    assert "ZeroDivisionError" in caplog.text
    workers.close()


def test_a_disk_that_breaks_in_an_unknown_way_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = BlockShelf(LruFolder(tmp_path, 1 << 20))
    store = DictStore()
    store.put("a/0", b"data")
    blocks = Blocks(Upstream(store), shelf)
    block = Block("a/0", record_of(b"data"), 0)
    assert blocks.want(block, 1).result(30) == b"data"
    until(lambda: block.digest in shelf.files)
    shelf._memory.clear()

    def breaks(block: Block) -> bytes | None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(shelf, "read", breaks)
        for _ in range(5):
            with pytest.raises(MemoryError):
                blocks.want(block, 1).result(30)
    assert blocks.want(block, 1).result(30) == b"data"


def test_slow_readers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.relay import sending

    monkeypatch.setattr(sending, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(sending, "_SLOW_BYTES_PER_S", 1 << 40)
    records = [record_of(bytes([n]) * 1000) for n in range(4)]

    async def run(waiting: set[int], first: int) -> None:
        budget = Budget(2_500)
        dropped: list[int] = []
        ended = [asyncio.Event() for _ in range(4)]

        async def hold(number: int) -> None:
            def drop() -> None:
                dropped.append(number)
                ended[number].set()

            async with budget.holding(Block("k", records[number], 0), drop) as hold:
                if number not in waiting:
                    hold.begin()
                await ended[number].wait()

        tasks = [asyncio.create_task(hold(number)) for number in (0, 1, 1, 2)]
        await asyncio.sleep(0)
        # The same block counts once, the third has to wait.
        assert budget.used_bytes == 2_000
        while not dropped:
            await asyncio.sleep(0.01)
        assert dropped[0] == first
        assert budget.dropped_count >= 1
        for event in ended:
            event.set()
        await asyncio.gather(*tasks)
        assert budget.used_bytes == 0

    asyncio.run(run(set(), 0))
    # Whoever waits for the store is not slow: the next one goes.
    asyncio.run(run({0}, 1))


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
            if is_refused:
                raise AccessDenied(f"cannot write {key}")
            super().put(key, data)

    is_refused = ["yes"]
    store, clock = DictStore(), VirtualClock()
    store.put(keys.STREAM, b"{}")
    needs = Needs(clock)
    lease = UpstreamLease(ReadOnly(store), needs, clock)
    for version in (5, 4, 3):
        needs.put("a", LINEAGE, version)
        with caplog.at_level(logging.WARNING, logger="thinwire"):
            lease.renew()
    assert caplog.text.count("told nowhere") == 1
    with pytest.raises(AccessDenied, match="may not write leases"):
        lease.check_may_write()
    # It is tried again now and then, and said when it is told after all.
    clock.sleep_until(clock.now() + 3600)
    needs.put("a", LINEAGE, 3)
    lease.check_may_write()
    is_refused.clear()
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        lease.renew()
    assert "told again" in caplog.text
    assert [keys.leased_version(key) for key in store.find("leases/")] == [3]
    lease.end_unneeded()
    assert store.find("leases/")
    needs.drop("a", 3)
    lease.end_unneeded()
    assert not store.find("leases/")


def test_a_need_outlives_a_store_that_fails_once() -> None:
    store = DictStore()
    store.put(keys.STREAM, b"{}")
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
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        LruFolder(tmp_path / "file", 100)
