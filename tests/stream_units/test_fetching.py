"""Objects come in ranges, verified, in bounded memory, and once per host."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ChecksumMismatch, InvalidArgument, NotFound, StoreError, Truncated
from thinwire.follow.cache import BlockCache
from thinwire.follow.fetch import MIN_MEMORY_BYTES, Fetcher, Wanted, in_parallel
from thinwire.store import Store, StoreWrapper
from thinwire.store.file_store import FileStore
from thinwire.stream.blocks import MIN_BLOCK_BYTES, digest_of, record_of

from .making import DictStore, LoggingStore

BLOCK = MIN_BLOCK_BYTES
RANGE = 8 << 20


def some_bytes(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def put(store: Store, data: bytes, key: str = "x/deltas/object") -> Wanted:
    store.put(key, data)
    return Wanted(key, record_of(data), f"the object {key}")


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK, RANGE, RANGE + BLOCK + 5])
def test_whole_objects(size: int, tmp_path: Path) -> None:
    store = LoggingStore(DictStore())
    data = some_bytes(size)
    wanted = put(store, data)
    fetcher = Fetcher(store)
    seen: list[int] = []
    fetcher.into_file(wanted, tmp_path / "file", on_bytes=seen.append)
    assert (tmp_path / "file").read_bytes() == data
    assert sum(seen) == fetcher.fetched_bytes == size
    # Neighbouring blocks come together.
    assert len(store.log) == max(1, -(-size // RANGE))
    if fetcher.is_small(wanted.record):
        assert fetcher.bytes_of(wanted) == data


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(0, 39), max_size=12))
def test_chosen_blocks_only(numbers: set[int]) -> None:
    data = some_bytes(39 * BLOCK + 9)
    store = LoggingStore(DictStore())
    wanted = put(store, data)
    with tempfile.TemporaryDirectory() as folder:
        Fetcher(store).into_file(wanted, Path(folder, "file"), numbers)
        found = Path(folder, "file").read_bytes()
    assert len(found) == len(data)
    for number in range(40):
        start, stop = wanted.record.span(number)
        assert (found[start:stop] == data[start:stop]) == (number in numbers)
    # One request for each run of neighbours, of at most 32 blocks.
    runs = sum(number - 1 not in numbers for number in numbers)
    assert runs <= len(store.log) <= runs + 1


def test_blocks_are_added_to_a_file(tmp_path: Path) -> None:
    data = some_bytes(4 * BLOCK)
    store = DictStore()
    wanted = put(store, data)
    fetcher = Fetcher(store)
    for numbers in ([2], [0, 3], [1]):
        fetcher.into_file(wanted, tmp_path / "file", numbers)
    assert (tmp_path / "file").read_bytes() == data


class InFlight(StoreWrapper):
    """Counts the bytes that were asked for and not yet given on."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._now_bytes = 0
        self.most_bytes = 0
        self.most_calls = 0
        self._calls = 0

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        with self._lock:
            self._calls += 1
            self._now_bytes += stop - start
            self.most_bytes = max(self.most_bytes, self._now_bytes)
            self.most_calls = max(self.most_calls, self._calls)
        data = super().get_range(key, start, stop)
        with self._lock:
            self._calls -= 1
        return data

    def written(self, count: int) -> None:
        with self._lock:
            self._now_bytes -= count


@pytest.mark.parametrize("memory_bytes", [MIN_MEMORY_BYTES, 4 * MIN_MEMORY_BYTES, 256 << 20])
def test_memory_is_bounded(memory_bytes: int, tmp_path: Path) -> None:
    store = InFlight(DictStore())
    wanted = put(store, some_bytes(8 * RANGE))
    fetcher = Fetcher(store, memory_limit_bytes=memory_bytes)
    fetcher.into_file(wanted, tmp_path / "file", on_bytes=store.written)
    # What waits is held once here, and once more while the client receives it.
    assert store.most_bytes <= max(memory_bytes // 2, RANGE)
    assert (tmp_path / "file").stat().st_size == 8 * RANGE


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="memory_limit_bytes"):
        Fetcher(DictStore(), memory_limit_bytes=MIN_MEMORY_BYTES - 1)


@pytest.mark.parametrize("size", [1000, 3 * BLOCK, RANGE + BLOCK])
@pytest.mark.parametrize("fault", ["bit", "cut", "longer", "gone"])
def test_other_bytes_are_refused(size: int, fault: str, tmp_path: Path) -> None:
    store = DictStore()
    data = some_bytes(size)
    wanted = put(store, data)
    changed = {
        "bit": data[:-1] + bytes([data[-1] ^ 1]),
        "cut": data[:-1],
        "longer": data + b"x",
    }
    store.delete([wanted.key])
    if fault in changed:
        store.put(wanted.key, changed[fault])
    fetcher = Fetcher(store, cache=BlockCache(tmp_path / "cache"))
    if fault == "longer" and size > RANGE:
        fetcher.into_file(wanted, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == data
        return
    # Both sizes are errors of the format, or of the store's answer.
    with pytest.raises((ChecksumMismatch, Truncated, NotFound, Exception)) as caught:
        fetcher.into_file(wanted, tmp_path / "file")
    assert caught.type.__module__ == "thinwire.errors"
    store.put(wanted.key, data)
    fetcher.into_file(wanted, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data


def test_in_parallel_raises_the_first_error_when_all_ended() -> None:
    done: list[int] = []

    def fail() -> None:
        raise NotFound("first")

    with pytest.raises(NotFound, match="first"):
        in_parallel([fail, lambda: done.append(1), lambda: done.append(2)], 2)
    assert sorted(done) == [1, 2]


# The cache


def test_two_followers_share_what_was_fetched(tmp_path: Path) -> None:
    store = LoggingStore(DictStore())
    data = some_bytes(RANGE + 2 * BLOCK)
    wanted = put(store, data)
    for name in ("one", "two"):
        fetcher = Fetcher(store, cache=BlockCache(tmp_path / "cache"))
        fetcher.into_file(wanted, tmp_path / name)
        assert (tmp_path / name).read_bytes() == data
    assert len(store.log) == 2
    assert (fetcher.fetched_bytes, fetcher.cached_bytes) == (0, len(data))


def test_equal_blocks_are_shared_between_objects(tmp_path: Path) -> None:
    store = LoggingStore(DictStore())
    data = some_bytes(BLOCK)
    fetcher = Fetcher(store, cache=BlockCache(tmp_path / "cache"))
    assert fetcher.bytes_of(put(store, data, "x/deltas/1")) == data
    assert fetcher.bytes_of(put(store, data, "x/deltas/2")) == data
    assert len(store.log) == 1


@pytest.mark.parametrize("poison", [b"", b"wrong", b"\0" * BLOCK, None])
def test_poisoned_cache_is_harmless(poison: bytes | None, tmp_path: Path) -> None:
    """Anyone may write into the folder: bytes, folders, links."""
    store = LoggingStore(DictStore())
    data = some_bytes(3 * BLOCK)
    wanted = put(store, data)
    cache = BlockCache(tmp_path / "cache")
    for digest in wanted.record.blocks:
        path = tmp_path / "cache" / digest[:2] / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        if poison is None:
            path.mkdir()
        else:
            path.write_bytes(poison)
    fetcher = Fetcher(store, cache=cache)
    assert fetcher.bytes_of(wanted) == data
    assert fetcher.fetched_bytes == len(data)
    if poison is not None:
        assert fetcher.bytes_of(wanted) == data
        assert len(store.log) == 1


def test_a_cache_that_cannot_be_used_is_done_without(tmp_path: Path) -> None:
    store = DictStore()
    wanted = put(store, some_bytes(99))
    cache = BlockCache(tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("not a folder")
    assert Fetcher(store, cache=cache).bytes_of(wanted) == some_bytes(99)
    with pytest.raises(StoreError):
        BlockCache(tmp_path / "cache")


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, limit_bytes=250)
    blocks = [some_bytes(100, seed) for seed in range(4)]
    for age, block in enumerate(blocks):
        digest = digest_of(block)
        cache.put(digest, block)
        os.utime(tmp_path / digest[:2] / digest, (age, age))
    # Used just now.
    assert cache.get(digest_of(blocks[0]), 100) == blocks[0]
    cache.trim()
    kept = [cache.get(digest_of(block), 100) is not None for block in blocks]
    assert kept == [True, False, False, True]


def test_the_cache_limits_itself(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, limit_bytes=1000)
    for seed in range(128):
        block = some_bytes(100, seed)
        cache.put(digest_of(block), block)
    assert sum(path.stat().st_size for path in tmp_path.glob("??/*")) <= 1000


def test_processes_fetch_each_object_once(tmp_path: Path) -> None:
    """Three processes want the same two objects at once."""
    store = FileStore(tmp_path / "store")
    wanted = [put(store, some_bytes(RANGE + 5, n), f"x/deltas/{n}") for n in range(2)]
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_APPEND | os.O_RDWR)

    class Counting(StoreWrapper):
        def get_range(self, key: str, start: int, stop: int) -> bytes:
            os.write(log, f"{key} {start}\n".encode())
            return super().get_range(key, start, stop)

    go, start = os.pipe()
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(start)
                os.read(go, 1)
                fetcher = Fetcher(Counting(store), cache=BlockCache(tmp_path / "cache"))
                order = wanted if number else wanted[::-1]
                for index, one in enumerate(order):
                    fetcher.into_file(one, tmp_path / f"{number}-{index}")
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(start)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    os.close(go)
    asked = (tmp_path / "log").read_text().splitlines()
    assert sorted(asked) == sorted(f"x/deltas/{n} {at}" for n in range(2) for at in (0, RANGE))
    assert (tmp_path / "1-0").read_bytes() == some_bytes(RANGE + 5, 0)
