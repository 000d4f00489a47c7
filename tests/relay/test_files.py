"""What lies on the relay's disk: up to its limit, proved when read, and never waited for."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from thinwire.errors import Unavailable
from thinwire.relay import files as files_room
from thinwire.relay.files import LruFolder, own
from thinwire.stream.blocks import digest_of
from thinwire.stream.places import objects_of

from .making import (
    DictStore,
    Upstream,
    bits,
    caught_up,
    connect,
    data_keys,
    large,
    manifest_of,
    publish,
    relaying,
    stepped,
    until,
)

MIB = 1 << 20


def name(number: int) -> str:
    return digest_of(b"%d" % number)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("??/*"))


def test_the_limit_holds_and_the_oldest_go(tmp_path: Path) -> None:
    files = LruFolder(tmp_path, 10 * 1000)
    for number in range(25):
        assert files.put(name(number), bytes(1000))
        assert files.get(name(0)) is not None  # used all the time
        assert on_disk(tmp_path) == files.total_bytes <= 10 * 1000
    assert [n for n in range(25) if name(n) in files] == [0, *range(16, 25)]
    assert files.evicted_count == 15
    assert not files.put(name(99), bytes(10_001))
    assert files.put(name(99), bytes(10_000))
    assert len(files) == 1


def test_what_passes_takes_half_at_most(tmp_path: Path) -> None:
    """More files than fit, read one after another, leave what others use."""
    files = LruFolder(tmp_path, 10 * 1000)
    for number in range(5):
        files.put(name(number), bytes(1000))
    for number in range(100, 140):
        assert files.put(name(number), bytes(1000), is_passing=True)
        assert files.total_bytes == on_disk(tmp_path) <= 10 * 1000
    # One more than the half may be there, and takes one of the others' place.
    assert sum(name(number) in files for number in range(5)) >= 4
    assert name(139) in files
    # What is asked for by others as well is an ordinary file again.
    files.put(name(139), bytes(1000))
    for number in range(140, 180):
        files.put(name(number), bytes(1000), is_passing=True)
    assert name(139) in files
    for number in range(200, 220):
        files.put(name(number), bytes(1000))
    assert files.total_bytes == 10 * 1000
    assert not any(name(number) in files for number in (*range(5), *range(100, 180)))
    assert not files._passing
    assert files._passing_bytes == 0


def test_a_file_that_is_written_again(tmp_path: Path) -> None:
    files = LruFolder(tmp_path, 5000)
    for size in (1000, 3000, 5000, 10):
        assert files.put(name(1), bytes(size))
        assert files.total_bytes == on_disk(tmp_path) == size


def test_stock_is_taken_after_a_kill(tmp_path: Path) -> None:
    files = LruFolder(tmp_path, 10_000)
    for number in range(8):
        files.put(name(number), bytes(1000))
        os.utime(tmp_path / name(number)[:2] / name(number), (number, number))
    half = tmp_path / name(1)[:2] / f".{name(1)[:16]}-0123456789abcdef"
    half.write_bytes(b"half")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_bytes(b"not ours")
    again = LruFolder(tmp_path, 5_500)
    assert [n for n in range(8) if name(n) in again] == [3, 4, 5, 6, 7]
    assert not half.exists()
    assert (tmp_path / "other" / "x").exists()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LruFolder(tmp_path, 10_000)
    files.put(name(0), bytes(10))

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert not files.put(name(1), bytes(10))
        assert files.is_failing
    # It is left alone for a while, and then tried again.
    assert not files.put(name(1), bytes(10))
    assert files.get(name(0)) is not None
    monkeypatch.setattr(files_room, "_PAUSE_S", 0.0)
    files._failed_until_s = 0.0
    assert files.put(name(1), bytes(10))
    assert not files.is_failing


def test_threads(tmp_path: Path) -> None:
    files = LruFolder(tmp_path, 20 * 100)

    def work(seed: int) -> None:
        for number in range(200):
            at = (number * 7 + seed * 13) % 40
            if (found := files.get(name(at))) is not None:
                assert found.data == bytes([at]) * 100
            else:
                files.put(name(at), bytes([at]) * 100)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.total_bytes == on_disk(tmp_path) <= 2000


def test_one_relay_for_one_folder(tmp_path: Path) -> None:
    descriptor = own(tmp_path)
    with pytest.raises(Unavailable, match="another relay"):
        own(tmp_path)
    os.close(descriptor)
    os.close(own(tmp_path))


def test_a_relay_keeps_to_its_limit(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large(size_bytes=24 * MIB)])
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache", limit_bytes=10 * MIB) as relay:
        for number in range(2):
            assert caught_up(relay.url, tmp_path / f"f{number}") == bits(large(size_bytes=24 * MIB))
            assert on_disk(tmp_path / "cache" / "blocks") <= 10 * MIB
        key = max(data_keys(store, 1))
        relay.one.shelf._memory.clear()
        for start in range(0, 24 * MIB, MIB):
            assert relay.get(f"/o/{key}", range=f"bytes={start}-{start}").status_code == 206
        assert relay.metric("cache_evicted_total") > 10
        assert on_disk(tmp_path / "cache" / "blocks") == relay.metric("cache_bytes")


def test_an_anchor_larger_than_the_cache_leaves_the_deltas(tmp_path: Path) -> None:
    store = DictStore()
    versions = [large(size_bytes=24 * MIB)]
    versions.append(stepped(versions[0], 1))
    publish(store, tmp_path / "baseline", versions)
    upstream = Upstream(store)
    (shard,) = data_keys(store, 2)
    (file,) = [key for key, size in data_keys(store, 1).items() if size > MIB]
    with relaying(upstream, tmp_path / "cache", limit_bytes=12 * MIB) as relay:
        delta = relay.get(f"/o/{shard}").content
        taken = upstream.bytes_of(shard)
        assert taken == len(delta)
        assert len(relay.get(f"/o/{file}").content) > 24 * MIB
        relay.one.shelf._memory.clear()
        assert relay.get(f"/o/{shard}").content == delta
        assert upstream.bytes_of(shard) == taken


def test_slow_readers_pin_nothing(tmp_path: Path) -> None:
    """A reader of more than the cache can hold that takes nothing must not stop its being used."""
    store = DictStore()
    versions = [large(size_bytes=24 * MIB)]
    versions.append(stepped(versions[0], 1))
    publish(store, tmp_path / "baseline", versions)
    upstream = Upstream(store)
    (shard,) = data_keys(store, 2)
    (file,) = [key for key, size in data_keys(store, 1).items() if size > MIB]
    with relaying(upstream, tmp_path / "cache", limit_bytes=8 * MIB) as relay:
        relay.get(f"/o/{file}")
        with connect(relay) as reader:
            reader.sendall(f"GET /run/o/{file} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert reader.recv(100).startswith(b"HTTP/1.1 200")
            for _ in range(2):
                relay.get(f"/o/{shard}")
                until(lambda: any(block in relay.one.shelf.files for block in blocks_of(store)))
                relay.one.shelf._memory.clear()
            assert upstream.bytes_of(shard) == data_keys(store, 2)[shard]


def blocks_of(store: DictStore) -> list[str]:
    (record,) = objects_of(manifest_of(store, 2)).values()
    return list(record.blocks)


def test_changed_files_are_noticed(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large()])
    with relaying(store, tmp_path / "cache"):
        pass
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:
        caught_up(relay.url, tmp_path / "f")
    kept = sorted((tmp_path / "cache").glob("*/??/*"))
    assert len(kept) > 20
    for number, path in enumerate(kept):
        data = bytearray(path.read_bytes())
        if number % 4 == 0:
            data[len(data) // 2] ^= 1
        elif number % 4 == 1:
            del data[-1]
        elif number % 4 == 2:
            data += b"more"
        path.write_bytes(data)
    taken = upstream.bytes_of("/anchors/")
    with relaying(upstream, tmp_path / "cache") as relay:
        assert caught_up(relay.url, tmp_path / "g") == bits(large())
        # Only what was changed is fetched again.
        again = upstream.bytes_of("/anchors/") - taken
        assert 0 < again < taken
        assert relay.metric("wrong_blocks_total") == 0


def test_files_that_go_while_it_runs(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large()])
    with relaying(Upstream(store), tmp_path / "cache") as relay:
        caught_up(relay.url, tmp_path / "f")
        relay.one.shelf._memory.clear()
        for path in (tmp_path / "cache").glob("*/??/*"):
            path.unlink()
        assert caught_up(relay.url, tmp_path / "g") == bits(large())


def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large()])
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:
        # What it reads by itself when it begins is kept before the folders go.
        until(lambda: relay.one.watch.head)
        for folder in ("blocks", "records"):
            # In place of the folders: nothing can be made in a file.
            shutil.rmtree(tmp_path / "cache" / folder)
            (tmp_path / "cache" / folder).write_bytes(b"")
        assert caught_up(relay.url, tmp_path / "f") == bits(large())
        until(lambda: relay.metric("cache_failing"))
        assert relay.metric("cache_bytes") == 0
        key = max(data_keys(store, 1))
        assert relay.get(f"/o/{key}").content == store.get(key, limit_bytes=1 << 30)
