"""A relay that lies, hides, hangs or dies costs followers a second request, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from thinwire.errors import (
    AccessDenied,
    Corrupt,
    InvalidArgument,
    NotFound,
    SignatureInvalid,
    StoreError,
    Unavailable,
)
from thinwire.follow import Follower, Stream, open_stream
from thinwire.follow.relayed import ABSENT_CHECK_S, Gate, RelayedStore
from thinwire.store import Entry, Store, StoreWrapper
from thinwire.store.clock import VirtualClock
from thinwire.stream.signing import SigningKey

from .making import (
    KEY,
    DictStore,
    Upstream,
    bits,
    held,
    history,
    large,
    maintained,
    manifest_of,
    publish,
    relaying,
)

Change = Callable[[str, bytes], bytes]


def through(relay: Store, upstream: Store, *, clock: VirtualClock | None = None) -> Stream:
    store = RelayedStore(
        relay, upstream, trusted_keys=[KEY.public], retry_s=5.0, clock=clock or VirtualClock()
    )
    return Stream(store, trusted_keys=[KEY.public])


@pytest.fixture
def stored(tmp_path: Path) -> DictStore:
    store = DictStore()
    publish(store, tmp_path / "baseline", VERSIONS, KEY)
    return store


VERSIONS = history(5)


def flipped(key: str, data: bytes) -> bytes:
    """Every data object has one wrong bit."""
    if "/deltas/" not in key and "/anchors/" not in key:
        return data
    return bytes([data[0] ^ 1]) + data[1:] if data else data


def rubbish(key: str, data: bytes) -> bytes:
    return b"rubbish"


def nothing(key: str, data: bytes) -> bytes:
    raise NotFound(f"there is no {key}")


def refused(key: str, data: bytes) -> bytes:
    raise AccessDenied(f"no {key} for you")


def broken(key: str, data: bytes) -> bytes:
    raise StoreError(f"nothing sensible about {key}")


def away(key: str, data: bytes) -> bytes:
    raise Unavailable(f"no answer about {key}")


def wrong_now_and_then() -> Change:
    numbers = iter(range(1 << 30))

    def change(key: str, data: bytes) -> bytes:
        return data if next(numbers) % 3 else b"x" + data[1:]

    return change


@pytest.mark.parametrize(
    "change", [flipped, rubbish, nothing, refused, broken, away, wrong_now_and_then()]
)
def test_wrong_answers(change: Change, stored: DictStore, tmp_path: Path) -> None:
    relay, upstream = Upstream(stored), Upstream(stored)
    relay.change = change
    stream = through(relay, upstream)
    with Follower(stream, tmp_path / "f") as follower:
        follower.catch_up(2)
        follower.catch_up()
    assert held(tmp_path / "f") == bits(VERSIONS[-1])
    assert relay.log


def test_an_honest_relay_gives_everything(stored: DictStore, tmp_path: Path) -> None:
    relay, upstream = Upstream(stored), Upstream(stored)
    with Follower(through(relay, upstream), tmp_path / "f") as follower:
        follower.catch_up()
    assert held(tmp_path / "f") == bits(VERSIONS[-1])
    assert not upstream.bytes_of("/deltas/")
    assert not upstream.bytes_of("/anchors/")
    assert not upstream.bytes_of("/manifests/")


def test_without_pinned_keys_records_come_from_the_store(stored: DictStore, tmp_path: Path) -> None:
    forged = DictStore()
    publish(forged, tmp_path / "forged", history(9, VERSIONS[0]))
    relay, upstream = Upstream(forged), Upstream(stored)
    store = RelayedStore(relay, upstream, retry_s=1.0, clock=VirtualClock())
    with Follower(Stream(store), tmp_path / "f") as follower:
        assert follower.catch_up().version == len(VERSIONS)
    assert held(tmp_path / "f") == bits(VERSIONS[-1])
    upstream.is_away = True
    with pytest.raises(Unavailable):
        Stream(store).record()


def test_another_stream_of_the_same_key(stored: DictStore, tmp_path: Path) -> None:
    """All of it is signed by a pinned key, and none of it belongs here."""
    other = DictStore()
    publish(other, tmp_path / "other", history(7), KEY)
    lineage = manifest_of(stored, 1).lineage
    theirs = manifest_of(other, 1).lineage
    moved = {key.replace(theirs, lineage): value for key, value in other.objects.items()}
    relay, upstream = Upstream(DictStore(moved)), Upstream(stored)
    with Follower(through(relay, upstream), tmp_path / "f") as follower:
        assert follower.catch_up().version == len(VERSIONS)
    assert held(tmp_path / "f") == bits(VERSIONS[-1])


def test_records_of_a_stranger(stored: DictStore, tmp_path: Path) -> None:
    stranger = DictStore()
    publish(stranger, tmp_path / "other", history(7), SigningKey.generate())
    with Follower(through(stranger, stored), tmp_path / "f") as follower:
        assert follower.catch_up().version == len(VERSIONS)
    assert held(tmp_path / "f") == bits(VERSIONS[-1])


def test_a_relay_that_hides_what_is_new(stored: DictStore, tmp_path: Path) -> None:
    lineage = manifest_of(stored, 1).lineage
    hidden = {f"{lineage}/manifests/{version:012d}.json" for version in (4, 5)}
    clock = VirtualClock()
    relay = Upstream(stored)

    def hide(key: str, data: bytes) -> bytes:
        if key in hidden:
            raise NotFound(key)
        return data

    upstream = Upstream(stored)
    with Follower(through(relay, upstream, clock=clock), tmp_path / "f") as follower:
        follower.catch_up(3)
        relay.change = hide
        # What is said to be missing is looked up now and then, not each time.
        asked = upstream.count_of("/manifests/")
        for _ in range(20):
            assert follower.catch_up().version == 3
        assert upstream.count_of("/manifests/") == asked
        clock.sleep_until(clock.now() + ABSENT_CHECK_S)
        assert follower.catch_up().version == 5


def test_an_old_catalog_leads_to_a_longer_way_at_worst(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", VERSIONS[:2], KEY)
    from thinwire.maintain import Maintainer

    with Maintainer(open_stream(store, signing_key=KEY), tmp_path / "work") as maintainer:
        maintainer.run_once()
    old = {key: value for key, value in store.objects.items() if "catalog" in key}
    publish(store, tmp_path / "baseline", VERSIONS[2:], KEY)
    relay = Upstream(store)
    relay.change = lambda key, data: old[key][0] if key in old else data
    with Follower(through(relay, store), tmp_path / "f") as follower:
        follower.catch_up()
    assert held(tmp_path / "f") == bits(VERSIONS[-1])


def test_while_the_store_is_away_a_relay_is_enough(stored: DictStore, tmp_path: Path) -> None:
    relay, upstream = Upstream(stored), Upstream(stored)
    stream = through(relay, upstream)
    upstream.is_away = True
    with Follower(stream, tmp_path / "f", lease=False) as follower:
        follower.catch_up()
    assert held(tmp_path / "f") == bits(VERSIONS[-1])


def test_a_relay_that_is_away_is_left_alone_for_longer_and_longer(stored: DictStore) -> None:
    clock = VirtualClock()
    relay, upstream = Upstream(stored), Upstream(stored)
    relay.is_away = True
    stream = through(relay, upstream, clock=clock)
    lineage = stream.record().lineage
    tries = []
    for _ in range(600):
        clock.sleep_until(clock.now() + 1.0)
        before = len(relay.log)
        assert stream.manifest(lineage, 1) is not None
        tries += [clock.now()] * (len(relay.log) - before)
    waits = [round(b - a) for a, b in pairwise(tries)]
    assert waits[:5] == [1, 2, 4, 8, 16]
    assert max(waits) <= 61
    relay.is_away = False
    clock.sleep_until(clock.now() + 61.0)
    for _ in range(10):
        before = len(upstream.log)
        assert stream.manifest(lineage, 1) is not None
        assert len(upstream.log) == before


def test_a_gate() -> None:
    clock = VirtualClock()
    gate = Gate(clock)
    assert gate.may_try()
    # Many that fail at once count once.
    assert [gate.close() for _ in range(5)] == [1.0] * 5
    assert not gate.may_try()
    clock.sleep_until(1.0)
    # One alone tries.
    assert [gate.may_try() for _ in range(3)] == [True, False, False]
    assert gate.close() == 2.0
    gate.open()
    assert [gate.may_try() for _ in range(3)] == [True] * 3


def test_records_are_proved_by_their_place() -> None:
    from thinwire.follow.proving import prove
    from thinwire.stream.places import place_of

    for key, data, error in (
        ("stream.json", b"{}", Corrupt),
        ("stream.json", b"[" * 5000, Corrupt),
        ("head.json", b"\xff", Corrupt),
    ):
        place = place_of(key)
        assert place is not None
        with pytest.raises((error, SignatureInvalid)):
            prove(place, data, [KEY.public], url="here")


@pytest.mark.parametrize(
    "url",
    ["", "relay:80", "ftp://a", "http://", "http://u:p@h", "http://h/?q", "http://h#f", "http://[",
     "http://h:0", "http://h:99999", "s3://bucket"],
)  # fmt: skip
def test_relays_that_are_none(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        open_stream(tmp_path, relay=url)


@contextmanager
def server(answer: bytes, *, hangs: bool = False) -> Iterator[str]:
    """Something that listens and says one thing to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ended = threading.Event()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=say, args=(connection,), daemon=True).start()

        def say(connection: socket.socket) -> None:
            with connection:
                try:
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                except OSError:
                    return
                if hangs:
                    ended.wait(30)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)


ELSEWHERE = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
ANSWERS = [
    b"",
    b"rubbish\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nxxxxx",
    b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
    b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 5-9/10\r\nContent-Length: 5\r\n\r\nxxxxx",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\nx",
    b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
    ELSEWHERE,
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_a_relay_that_speaks_something_else(
    answer: bytes, stored: DictStore, tmp_path: Path
) -> None:
    with server(answer) as url:
        stream = open_stream(stored, relay=url, trusted_keys=[KEY.public], retry_s=5.0)
        with Follower(stream, tmp_path / "f") as follower:
            follower.catch_up()
    assert held(tmp_path / "f") == bits(VERSIONS[-1])


def test_a_relay_that_dies_in_the_middle(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", [large(size_bytes=12 << 20)], KEY)
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache", trusted_keys=[KEY.public]) as relay:
        options = {"relay": relay.url, "trusted_keys": [KEY.public], "retry_s": 5.0}
        stream = open_stream(store, **options)  # type: ignore[arg-type]
        killed = threading.Event()

        def before(operation: str, key: str) -> None:
            if "/anchors/" in key and operation == "get_range" and not killed.is_set():
                killed.set()
                relay.stop_listening()

        upstream.before = before
        with Follower(stream, tmp_path / "f", lease=False) as follower:
            follower.catch_up()
        assert killed.is_set()
    assert held(tmp_path / "f") == bits(large(size_bytes=12 << 20))


def test_leases_go_to_either(stored: DictStore, tmp_path: Path) -> None:
    relay, upstream = Upstream(DictStore()), Upstream(stored)
    with Follower(through(relay, upstream), tmp_path / "f") as follower:
        follower.catch_up()
        assert relay.count_of("leases/") == 1
        assert stored.find("leases/") == []
    relay.is_away = True
    with Follower(through(relay, upstream), tmp_path / "g") as follower:
        follower.catch_up()
        assert len(stored.find("leases/")) == 1
    assert stored.find("leases/") == []


def test_listings_come_from_the_store_while_it_answers(stored: DictStore) -> None:
    class Empty(StoreWrapper):
        def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
            return iter(())

    upstream = Upstream(stored)
    stream = through(Empty(stored), upstream)
    lineage = stream.record().lineage
    assert stream.newest_listed(lineage) == 5
    upstream.is_away = True
    assert stream.newest_listed(lineage) == 0
    stream = through(stored, upstream)
    assert stream.newest_listed(lineage) == 5


def test_maintained_streams_through_a_real_relay(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", VERSIONS)
    maintained(store, tmp_path / "work")
    upstream, direct = Upstream(store), Upstream(store)
    with relaying(upstream, tmp_path / "cache") as relay:
        stream = open_stream(direct, relay=relay.url)
        with Follower(stream, tmp_path / "f") as follower:
            follower.catch_up()
    assert held(tmp_path / "f") == bits(VERSIONS[-1])
    assert not direct.bytes_of("/deltas/")
