"""A relay that lies, hides, hangs or dies costs followers a second request, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from thinwire.errors import (
    AccessDenied,
    Corrupt,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    SignatureInvalid,
    StoreError,
    Unavailable,
)
from thinwire.follow import Follower, Stream, open_stream
from thinwire.follow import relay_first as relay_first_room
from thinwire.follow import relays as relays_room
from thinwire.follow.absence import ABSENT_CHECK_S, Absences
from thinwire.follow.gates import Gate, ProbedGate
from thinwire.follow.leases import LeaseKeeper
from thinwire.follow.relayed import RelayedStore
from thinwire.store import Entry, Store, StoreWrapper
from thinwire.store.clock import VirtualClock
from thinwire.store.http_client import Timeouts
from thinwire.stream.places import place_of
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
    resigned,
    until,
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


def forged(key: str, data: bytes) -> bytes:
    """Every manifest is signed, but by somebody else."""
    return resigned(data) if "/manifests/" in key else data


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
    "change", [flipped, rubbish, forged, nothing, refused, broken, away, wrong_now_and_then()]
)
def test_wrong_answers(change: Change, stored: DictStore, tmp_path: Path) -> None:
    relay, upstream = Upstream(stored), Upstream(stored)
    relay.change = change
    stream = through(relay, upstream)
    with Follower(stream, tmp_path / "f") as follower:
        follower.catch_up(2)
        follower.catch_up()
        found = follower.version()
    assert found is not None
    assert found.step is None
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


def test_a_relay_that_hides_what_is_new(tmp_path: Path) -> None:
    stored = DictStore()
    publish(stored, tmp_path / "baseline", VERSIONS[:3], KEY)
    lineage = manifest_of(stored, 1).lineage
    hidden = {f"{lineage}/manifests/{version:012d}.json" for version in (4, 5)}
    clock = VirtualClock()
    relay = Upstream(stored)

    def hide(key: str, data: bytes) -> bytes:
        if key in hidden:
            raise NotFound(key)
        return data

    relay.change = hide
    upstream = Upstream(stored)
    with Follower(through(relay, upstream, clock=clock), tmp_path / "f") as follower:
        assert follower.catch_up().version == 3
        assert follower.catch_up().version == 3
        publish(stored, tmp_path / "baseline", VERSIONS[3:], KEY)
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
        until_nobody_probes()
        tries += [clock.now()] * (len(relay.log) - before)
    waits = [round(b - a) for a, b in pairwise(tries)]
    assert waits[:5] == [1, 2, 4, 8, 16]
    assert max(waits) <= 61
    relay.is_away = False
    clock.sleep_until(clock.now() + 61.0)
    assert stream.manifest(lineage, 1) is not None
    until_nobody_probes()
    for _ in range(10):
        before = len(upstream.log)
        assert stream.manifest(lineage, 1) is not None
        assert len(upstream.log) == before


def until_nobody_probes() -> None:
    until(lambda: "thinwire-probe" not in {thread.name for thread in threading.enumerate()})


def test_nobody_waits_for_a_relay_that_says_nothing(stored: DictStore) -> None:
    """It takes connections, as the kernel does for a process that was stopped."""
    clock = VirtualClock()
    relay, upstream = Upstream(stored), Upstream(stored)
    stream = through(relay, upstream, clock=clock)
    lineage = stream.record().lineage
    relay.is_away = True
    assert stream.manifest(lineage, 1) is not None
    # From here on all that it is asked hangs; each of these would.
    relay.is_away = False
    relay.hanging.clear()
    try:
        for _ in range(300):
            clock.sleep_until(clock.now() + 1.0)
            assert stream.manifest(lineage, 1) is not None
    finally:
        relay.hanging.set()
    until_nobody_probes()


def test_a_probe_runs_alone_and_its_luck_decides() -> None:
    clock = VirtualClock()
    answers: list[bool] = []
    gate = ProbedGate(lambda: answers.pop(0), clock)
    assert gate.may_try()
    gate.close()
    answers += [False, True]
    clock.sleep_until(1.0)
    assert not any(gate.may_try() for _ in range(5))
    until_nobody_probes()
    assert answers == [True]
    clock.sleep_until(2.0)
    assert not gate.may_try()
    clock.sleep_until(3.0)
    assert not gate.may_try()
    until_nobody_probes()
    assert gate.may_try()


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
    # However long it takes, up to a limit.
    clock.sleep_until(30.0)
    assert not gate.may_try()
    gate.pass_on()
    assert gate.may_try()
    assert gate.close() == 2.0
    clock.sleep_until(32.0)
    assert gate.may_try()
    clock.sleep_until(132.0)
    assert gate.may_try()
    gate.open()
    assert [gate.may_try() for _ in range(3)] == [True] * 3


def test_what_a_relay_hides_is_looked_up_more_and_more(
    stored: DictStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lineage = manifest_of(stored, 1).lineage
    clock = VirtualClock()
    relay, upstream = Upstream(stored), Upstream(stored)

    def hide_beyond(shown: int, key: str, data: bytes) -> bytes:
        found = place_of(key)
        if found is not None and found.kind == "manifest" and found.version > shown:
            raise NotFound(key)
        return data

    relay.change = partial(hide_beyond, 1)
    stream = through(relay, upstream, clock=clock)
    late_s = []
    for version in (2, 3, 4, 5):
        # The store has it from now on; the relay never.
        upstream.change = partial(hide_beyond, version)
        begin_s = clock.now()
        while stream.manifest(lineage, version) is None:
            clock.sleep_until(clock.now() + 1.0)
        late_s.append(clock.now() - begin_s)
        # It is asked again for what it denied, some seconds later.
        for _ in range(3):
            clock.sleep_until(clock.now() + 1.0)
            assert stream.manifest(lineage, version + 1) is None
    assert late_s[-1] <= 1.0
    assert "again and again" in caplog.text


def test_an_honest_relay_that_was_late_is_no_liar(
    stored: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It was asked a moment before the commit, or answered from what it knew then."""
    lineage = manifest_of(stored, 1).lineage
    clock = VirtualClock()
    relay, upstream = Upstream(stored), Upstream(stored)
    stream = through(relay, upstream, clock=clock)
    for _ in range(30):
        clock.sleep_until(clock.now() + ABSENT_CHECK_S)
        relay.change = nothing
        assert stream.manifest(lineage, 5) is not None
        relay.change = lambda key, data: data
        for _ in range(5):
            clock.sleep_until(clock.now() + 1.0)
            assert stream.manifest(lineage, 6) is None
        asked = upstream.count_of("/manifests/")
        for _ in range(5):
            clock.sleep_until(clock.now() + 1.0)
            assert stream.manifest(lineage, 6) is None
        assert upstream.count_of("/manifests/") == asked
    assert "again and again" not in caplog.text


def test_how_doubts_grow() -> None:
    absences = Absences(0.0)
    absences.note_denied("k", 10.0)
    assert not absences.take_denied(11.0)
    assert absences.take_denied(12.0) == "k"
    assert not absences.take_denied(99.0)
    assert [absences.note_hidden(100.0 * n) for n in (1, 2, 3)] == [5.0, 10.0, 20.0]
    assert absences.is_due(310.0)
    assert absences.is_due(311.0)
    absences.forgive()
    assert not absences.is_due(312.0)
    assert absences.note_hidden(9_999.0) == 5.0


def test_a_store_that_hangs_costs_seconds(
    stored: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that have no way to the bucket at all need none."""
    monkeypatch.setattr(relay_first_room, "_SOON_S", 0.2)
    upstream = Upstream(stored)
    upstream.hanging.clear()
    try:
        stream = through(Upstream(stored), upstream)
        with Follower(stream, tmp_path / "f", lease=False) as follower:
            follower.catch_up()
        assert held(tmp_path / "f") == bits(VERSIONS[-1])
    finally:
        upstream.hanging.set()
    until_nobody_probes()


def test_data_that_takes_its_time_is_waited_for(stored: DictStore, tmp_path: Path) -> None:
    """Nothing comes from a relay until it has a whole block."""
    relay, upstream = Upstream(stored), Upstream(stored)
    late = iter([1] * 3)

    def slow(key: str, data: bytes) -> bytes:
        if "/anchors/" in key and next(late, 0):
            raise Unavailable("no answer in time")
        return data

    relay.change = slow
    with Follower(through(relay, upstream), tmp_path / "f", lease=False) as follower:
        follower.catch_up(1)
    assert not upstream.bytes_of("/anchors/")
    assert next(late, 0) == 0


def test_data_that_never_comes_is_not_waited_for_again_and_again(
    stored: DictStore, tmp_path: Path
) -> None:
    relay, upstream, clock = Upstream(stored), Upstream(stored), VirtualClock()

    def never(key: str, data: bytes) -> bytes:
        if "/anchors/" in key or "/deltas/" in key:
            raise Unavailable("no answer in time")
        return data

    relay.change = never
    with Follower(through(relay, upstream, clock=clock), tmp_path / "f", lease=False) as follower:
        follower.catch_up()
    assert held(tmp_path / "f") == bits(VERSIONS[-1])
    assert clock.now() < 200


def test_what_must_be_there_is_never_believed_to_be_missing(
    stored: DictStore, tmp_path: Path
) -> None:
    """Whoever cannot find what is named gives up: a relay could end its followers by one word."""
    relay, upstream, clock = Upstream(stored), Upstream(stored), VirtualClock()
    stream = through(relay, upstream, clock=clock)
    lineage = stream.record().lineage
    assert stream.manifest(lineage, 5) is not None
    # The absence of something has just been looked up, so that it is not due.
    assert stream.manifest(lineage, 6) is None
    clock.sleep_until(30.0)
    relay.change = nothing
    assert stream.manifest(lineage, 1) is not None
    with Follower(stream, tmp_path / "f", lease=False) as follower:
        assert follower.catch_up().version == 5


def test_another_servers_404_is_no_absence(stored: DictStore) -> None:
    lineage = manifest_of(stored, 1).lineage
    with server(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n") as url:
        stream = open_stream(stored, relay=url, trusted_keys=[KEY.public], retry_s=5.0)
        for version in (1, 2, 3, 4, 5):
            assert stream.manifest(lineage, version) is not None


def test_a_name_that_was_misspelt_is_seen(
    stored: DictStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lineage = manifest_of(stored, 1).lineage
    with relaying(stored, tmp_path / "cache") as relay:
        url = f"{relay.root}/nur"
        stream = open_stream(stored, relay=url, trusted_keys=[KEY.public], retry_s=5.0)
        assert all(stream.manifest(lineage, version) for version in (1, 2, 3, 4, 5))
    assert "http://HOST:PORT/NAME" in caplog.text


def test_a_relay_that_cannot_know_is_not_believed(tmp_path: Path) -> None:
    """Its way to the bucket is broken, the follower's is not."""
    store = DictStore()
    publish(store, tmp_path / "baseline", VERSIONS[:2], KEY)
    lineage = manifest_of(store, 1).lineage
    upstream = Upstream(store)
    with relaying(upstream, tmp_path / "cache", trusted_keys=[KEY.public]) as relay:
        stream = open_stream(store, relay=relay.url, trusted_keys=[KEY.public], retry_s=5.0)
        assert stream.manifest(lineage, 2) is not None
        assert stream.manifest(lineage, 3) is None
        upstream.is_away = True
        until(lambda: relay.metric("upstream_up") == 0)
        publish(store, tmp_path / "baseline", VERSIONS[2:3], KEY)
        assert stream.manifest(lineage, 3) is not None


class Odd(StoreWrapper):
    """Of leases it says what no store says."""

    def put(self, key: str, data: bytes) -> None:
        raise Corrupt("ok")

    def delete(self, keys: object) -> None:
        raise Corrupt("ok")


def test_nothing_that_is_said_of_a_lease_ends_a_follower(stored: DictStore, tmp_path: Path) -> None:
    with Follower(through(Odd(stored), stored), tmp_path / "f") as follower:
        follower.catch_up()
        assert len(stored.find("leases/")) == 1
    keeper = LeaseKeeper(Odd(stored))
    assert isinstance(keeper.renew("ab" * 16, 1), Corrupt)
    keeper.end()


def test_a_record_of_the_store_that_is_too_large(stored: DictStore) -> None:
    stored.put("stream.json", b"x" * 70_000)
    store = RelayedStore(DictStore(), stored, trusted_keys=[KEY.public], clock=VirtualClock())
    with pytest.raises(LimitExceeded):
        store.get("stream.json", limit_bytes=1 << 16)


def test_without_pinned_keys_no_record_is_the_relays(stored: DictStore) -> None:
    relay = Upstream(stored)
    store = RelayedStore(relay, stored, clock=VirtualClock())
    lineage = manifest_of(stored, 1).lineage
    for key in ("stream.json", "head.json", f"{lineage}/catalog.json",
                f"{lineage}/manifests/{1:012d}.json"):  # fmt: skip
        try:
            store.get(key, limit_bytes=1 << 25)
        except NotFound:
            assert key.endswith("catalog.json")
    assert relay.log == []


def test_wrong_data_is_not_forgotten_for_right_records(stored: DictStore, tmp_path: Path) -> None:
    relay, upstream = Upstream(stored), Upstream(stored)
    relay.change = flipped
    clock = VirtualClock()
    stream = through(relay, upstream, clock=clock)
    with Follower(stream, tmp_path / "f", lease=False) as follower:
        for version in range(1, 6):
            follower.catch_up(version)
            clock.sleep_until(clock.now() + 1.5)
    # One try at first, one after a second; then it is left alone for two, four ...
    assert relay.count_of("/deltas/") + relay.count_of("/anchors/") <= 4
    assert relay.count_of("/manifests/") >= 5


def test_another_stream_in_its_place_is_nobodys_fault(
    stored: DictStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    relay = Upstream(stored)
    stream = through(relay, stored)
    lineage = stream.record().lineage
    assert stream.manifest(lineage, 1) is not None
    stored.objects.clear()
    publish(stored, tmp_path / "other", history(3, VERSIONS[0]), KEY)
    lineage = manifest_of(stored, 1).lineage
    key = f"{lineage}/manifests/{1:012d}.json"
    for _ in range(3):
        assert stream.store.get(key, limit_bytes=1 << 20)
    assert "gave a wrong" not in caplog.text
    assert relay.count_of(key) == 3


def test_a_relay_whose_store_is_busy_is_asked_again(stored: DictStore, tmp_path: Path) -> None:
    relay, upstream = Upstream(stored), Upstream(stored)
    refusals = iter([1] * 4)

    def busy(key: str, data: bytes) -> bytes:
        if ("/deltas/" in key or "/anchors/" in key) and next(refusals, 0):
            raise Unavailable("busy", status=503, retry_after_s=1.0)
        return data

    relay.change = busy
    with Follower(through(relay, upstream), tmp_path / "f", lease=False) as follower:
        follower.catch_up(1)
    assert not upstream.bytes_of("/anchors/")
    assert next(refusals, 0) == 0


@pytest.mark.parametrize(
    ("url", "is_taken"),
    [
        ("http://10.0.0.1:8766/run", False),
        ("HTTP://relay/run", False),
        ("http://127.0.0.1:8766/run", True),
        ("http://[::1]/run", True),
        ("http://localhost/run", True),
        ("https://relay/run", True),
    ],
)
def test_plain_http_needs_pinned_keys(url: str, is_taken: bool) -> None:
    assert open_stream(url, trusted_keys=[KEY.public])
    with nullcontext() if is_taken else pytest.raises(InvalidArgument, match="plain HTTP"):
        open_stream(url)


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


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", ANSWERS[5]])
def test_a_relay_that_hangs(
    answer: bytes, stored: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped does: the kernel goes on taking connections for it."""
    quick = Timeouts(1.0, 0.2, head_s=0.2, patience_s=0.2)
    monkeypatch.setattr(relays_room, "_RECORDS", quick)
    monkeypatch.setattr(relays_room, "_DATA", quick)
    with server(answer, hangs=True) as url:
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


def test_who_answers_while_the_store_is_away(
    stored: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a relay is no answer of the store: who looks for the fault must not stop there."""

    def busy_once(operation: str, key: str) -> None:
        relay.before = lambda operation, key: None
        raise Unavailable("busy", status=503)

    relay, upstream, clock = Upstream(stored.copy()), Upstream(stored), VirtualClock()
    relay.before = busy_once
    stream = through(relay, upstream, clock=clock)

    def told_on_looks(count: int) -> list[str]:
        caplog.clear()
        for _ in range(count):
            clock.sleep_until(clock.now() + 9)
            stream.forget()
            stream.record()
            until_nobody_probes()
        return [record.getMessage() for record in caplog.records]

    upstream.is_away = True
    failed, instead = told_on_looks(1)
    assert "it is away; it is tried again for 5 s" in failed
    assert instead == f"{upstream.url} does not answer; {relay.url} does in its place"
    assert told_on_looks(2) == [f"{instead}; still so after 18 s"]
    upstream.is_away = False
    (back,) = told_on_looks(30)
    assert f"{upstream.url} answers again, " in back
