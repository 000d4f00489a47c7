from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import AlreadyExists, NotFound, ThinwireError, Unavailable, UnsafeStore
from thinwire.store import (
    CountingStore,
    Entry,
    RetryingStore,
    SingleWriterStore,
    Store,
    StoreWrapper,
    ThrottledStore,
    open_store,
    prove_put_if_absent,
)
from thinwire.store.clock import SystemClock, VirtualClock
from thinwire.testing import FaultStore, Rates


@pytest.fixture
def memory(tmp_path: Path) -> Store:
    return open_store(f"memory://{tmp_path.name}", retry_s=0)


class Failing(StoreWrapper):
    """Fails as often as told, before doing it."""

    def __init__(self, store: Store, failures: int, error: ThinwireError) -> None:
        super().__init__(store)
        self.failures, self.error, self.calls = failures, error, 0

    def _strike(self) -> None:
        self.calls += 1
        if self.failures > 0:
            self.failures -= 1
            raise self.error

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        self._strike()
        return super().get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._strike()
        return super().get_range(key, start, stop)

    def put(self, key: str, data: bytes) -> None:
        self._strike()
        super().put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self._strike()
        super().put_file(key, path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._strike()
        super().put_if_absent(key, data)

    def delete(self, keys: Any) -> None:
        self._strike()
        super().delete(keys)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        for entry in super().list(prefix, after=after):
            yield entry
            self._strike()


def retrying(store: Store, deadline_s: float, clock: VirtualClock, seed: int = 1) -> RetryingStore:
    return RetryingStore(store, deadline_s, clock=clock, randomness=random.Random(seed))


CALLS: dict[str, Callable[[Store, Path], Any]] = {
    "get": lambda store, path: store.get("old", limit_bytes=9),
    "get_range": lambda store, path: store.get_range("old", 1, 2),
    "put": lambda store, path: store.put("new", b"x"),
    "put_file": lambda store, path: store.put_file("new", path),
    "put_if_absent": lambda store, path: store.put_if_absent("new", b"x"),
    "delete": lambda store, path: store.delete(key for key in ["old", "none"]),
}


@pytest.mark.parametrize("operation", CALLS)
def test_every_operation_is_retried(memory: Store, operation: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    memory.put("old", b"abc")
    memory.delete(["new"])
    clock = VirtualClock()
    failing = Failing(memory, 3, Unavailable("busy"))
    CALLS[operation](retrying(failing, 60, clock), tmp_path / "f")
    assert failing.calls == 4
    assert 0 < clock.now() < 0.1 + 0.2 + 0.4
    if operation == "delete":
        assert [entry.key for entry in memory.list("")] == []


def test_a_listing_goes_on_where_it_broke(memory: Store) -> None:
    keys = [f"a/{index}" for index in range(5)]
    for key in keys:
        memory.put(key, b"")
    failing = Failing(memory, 3, Unavailable("busy"))
    assert [e.key for e in retrying(failing, 60, VirtualClock()).list("a/")] == keys


def test_what_no_retry_mends_is_raised_at_once(memory: Store) -> None:
    failing = Failing(memory, 9, UnsafeStore("no"))
    clock = VirtualClock()
    with pytest.raises(UnsafeStore):
        retrying(failing, 60, clock).put("a", b"")
    assert (failing.calls, clock.now()) == (1, 0)


def test_waiting_is_told_of_at_once_and_then_now_and_then(
    memory: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that does not answer must not look like a program that hangs."""
    clock = VirtualClock()
    failing = Failing(memory, 10**9, Unavailable("no answer from there"))
    with caplog.at_level("WARNING", logger="thinwire"), pytest.raises(Unavailable):
        retrying(failing, 60, clock).put("a", b"")
    told = [record.getMessage() for record in caplog.records]
    assert "no answer from there" in told[0]
    assert "60 s" in told[0]
    # Ever more rarely, not at every try.
    assert len(told) == 3
    assert "no answer from there; still so after 1" in told[1]


def test_one_outage_is_told_as_one(memory: Store, caplog: pytest.LogCaptureFixture) -> None:
    """However many calls fail in it: an hour of them must not bury all else."""
    memory.put("a", b"")
    clock = VirtualClock()
    failing = Failing(memory, 10**9, Unavailable("no answer from there"))
    store = retrying(failing, 5, clock)
    while clock.now() < 3600:
        with pytest.raises(Unavailable):
            store.get("a", limit_bytes=9)
        clock.sleep_until(clock.now() + 4)
    told = [record.getMessage() for record in caplog.records]
    assert 8 <= len(told) <= 12
    assert "still so after 5" in told[-1]
    assert told[-1].endswith(" min")
    failing.failures = 0
    store.get("a", limit_bytes=9)
    store.get("a", limit_bytes=9)
    last = [record.getMessage() for record in caplog.records][len(told) :]
    assert len(last) == 1
    assert last[0].startswith(f"{memory.url} answers again, 36")
    # Another one is told anew.
    failing.failures = 1
    store.put("a", b"")
    assert "it is tried again for 5 s" in caplog.records[-2].getMessage()


@pytest.mark.parametrize("around", [lambda store: store, CountingStore], ids=["", "in another"])
def test_waits_end_when_told_to(around: Callable[[Store], StoreWrapper], memory: Store) -> None:
    """Whoever is to stop does not wait for a store that is away."""
    failing = Failing(memory, 10**9, Unavailable("busy"))
    store = around(RetryingStore(failing, 3600, first_wait_s=3600, longest_wait_s=3600))
    failed: list[ThinwireError] = []

    def put() -> None:
        try:
            store.put("a", b"")
        except Unavailable as error:
            failed.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    while failing.calls == 0:
        thread.join(0.01)
    store.end_waits()
    thread.join(30)
    assert [error.context["tries"] for error in failed] == [failing.calls]
    # What begins later is tried again.
    failing.failures = 1
    RetryingStore.end_waits(retry := RetryingStore(failing, 60))
    retry.put("a", b"")
    assert memory.get("a", limit_bytes=9) == b""


def test_a_listing_ends_an_outage(memory: Store, caplog: pytest.LogCaptureFixture) -> None:
    memory.put("a", b"")
    assert [*retrying(Failing(memory, 1, Unavailable("busy")), 60, VirtualClock()).list("")]
    assert "answers again" in caplog.records[-1].getMessage()


def test_the_deadline_ends_it(memory: Store) -> None:
    failing = Failing(memory, 10**9, Unavailable("busy"))
    clock = VirtualClock()
    with pytest.raises(Unavailable) as caught:
        retrying(failing, 60, clock).put("a", b"")
    assert 40 < clock.now() <= 60
    assert caught.value.context["tries"] == failing.calls > 10


def test_an_attempt_that_hung_gets_another(memory: Store) -> None:
    clock = VirtualClock()

    class Hanging(Failing):
        def _strike(self) -> None:
            clock.sleep_until(clock.now() + 1000)
            super()._strike()

    retrying(Hanging(memory, 1, Unavailable("timeout")), 1, clock).put("a", b"x")
    assert memory.get("a", limit_bytes=1) == b"x"


def test_waits_differ_between_followers(memory: Store) -> None:
    waits = set()
    for seed in range(20):
        clock = VirtualClock()
        retrying(Failing(memory, 1, Unavailable("busy")), 60, clock, seed).put("a", b"")
        waits.add(clock.now())
    assert len(waits) == 20


def test_a_lost_answer_to_a_creation_reads_as_already_there(memory: Store) -> None:
    faulty = FaultStore(memory, random.Random(1), rates={"put_if_absent": Rates(fail_after=0.5)})
    store = retrying(faulty, 60, VirtualClock())
    outcomes = set()
    for index in range(50):
        try:
            store.put_if_absent(f"a/{index}", b"mine")
            outcomes.add("won")
        except AlreadyExists:
            outcomes.add("compare")
        assert store.get(f"a/{index}", limit_bytes=9) == b"mine"
    assert outcomes == {"won", "compare"}


def test_counting(memory: Store, tmp_path: Path) -> None:
    store = CountingStore(memory)
    (tmp_path / "f").write_bytes(b"1234")
    store.put("a/b", b"123")
    store.put_file("a/c", tmp_path / "f")
    store.put_if_absent("a/d", b"1")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a/d", b"1")
    with pytest.raises(NotFound):
        store.get("none", limit_bytes=1)
    store.get("a/b", limit_bytes=9)
    store.get_range("a/b", 1, 2)
    assert len(list(store.list("a/"))) == 3
    store.delete(f"x/{index}" for index in range(1001))
    found = store.counts()
    assert found.requests == {
        "put": 1, "put_file": 1, "put_if_absent": 2, "get": 2, "get_range": 1, "list": 1,
        "delete": 2,
    }  # fmt: skip
    assert (found.uploaded_bytes, found.downloaded_bytes) == (8, 4)
    store.reset()
    assert store.counts() == type(found)()


def test_counting_by_many_threads(memory: Store) -> None:
    store = CountingStore(memory)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: store.put(f"a/{index % 5}", b"12"), range(400)))
    assert store.counts().requests == {"put": 400}
    assert store.counts().uploaded_bytes == 800


def test_throttling_takes_exactly_as_long_as_the_link(memory: Store, tmp_path: Path) -> None:
    clock = VirtualClock()
    store = ThrottledStore(memory, bits_per_s=8_000, latency_s=0.5, clock=clock)
    took = []

    def timed(call: Callable[[], Any]) -> None:
        before = clock.now()
        call()
        took.append(round(clock.now() - before, 6))

    (tmp_path / "f").write_bytes(bytes(2000))
    timed(lambda: store.put("a/1", bytes(1000)))
    timed(lambda: store.put_file("a/2", tmp_path / "f"))
    timed(lambda: store.put_if_absent("a/3", b""))
    timed(lambda: store.get("a/1", limit_bytes=1000))
    timed(lambda: store.get_range("a/2", 0, 500))
    timed(lambda: list(store.list("a/")))
    timed(lambda: store.delete(["a/1", "a/2"]))
    with pytest.raises(NotFound):
        store.get("a/1", limit_bytes=1000)
    assert took == [1.5, 2.5, 0.5, 1.5, 1.0, 0.5, 0.5]
    assert clock.now() == pytest.approx(sum(took) + 0.5)


def test_one_link_is_shared_by_all_threads(memory: Store) -> None:
    clock = VirtualClock()
    store = ThrottledStore(memory, bits_per_s=8_000, clock=clock)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: store.put(f"a/{index}", bytes(1000)), range(16)))
    assert clock.now() == pytest.approx(16)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: store.get(f"a/{index}", limit_bytes=1000), range(16)))
    assert clock.now() == pytest.approx(32)


def test_both_directions_at_once(memory: Store) -> None:
    clock = VirtualClock()
    store = ThrottledStore(memory, bits_per_s=8_000, clock=clock)
    memory.put("a", bytes(10_000))
    start = threading.Barrier(2)

    def upload() -> None:
        start.wait()
        store.put("b", bytes(10_000))

    def download() -> None:
        start.wait()
        store.get("a", limit_bytes=10_000)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(upload), pool.submit(download)]:
            future.result()
    # Alone each takes 10 s; whoever starts after the other's jump takes its own 10 s on top.
    assert clock.now() in (10, 20)


def test_the_system_clock_waits() -> None:
    clock = SystemClock()
    moment = clock.now() + 0.02
    clock.sleep_until(moment)
    assert clock.now() >= moment
    clock.sleep_until(0)


def test_a_proof_harms_nothing(memory: Store) -> None:
    memory.put("probe", b"same")
    prove_put_if_absent(memory, "probe", b"same")
    with pytest.raises(UnsafeStore, match=r"probe be created twice.*single_writer"):
        prove_put_if_absent(_Overwriting(memory), "probe", b"same")
    assert memory.get("probe", limit_bytes=4) == b"same"


class _Overwriting(StoreWrapper):
    def put_if_absent(self, key: str, data: bytes) -> None:
        self._store.put(key, data)


def test_single_writer_looks_first(memory: Store) -> None:
    store = SingleWriterStore(_Overwriting(memory))
    store.put_if_absent("a", b"1")
    prove_put_if_absent(store, "a", b"1")
    with pytest.raises(Unavailable):
        SingleWriterStore(Failing(memory, 1, Unavailable("busy"))).put_if_absent("b", b"")
    assert [entry.key for entry in memory.list("")] == ["a"]


def test_wrappers_show_what_they_wrap(memory: Store) -> None:
    store = ThrottledStore(CountingStore(memory), bits_per_s=1)
    assert repr(store) == f"ThrottledStore(CountingStore(ObjectStore({memory.url!r})))"
    assert store.url == memory.url
