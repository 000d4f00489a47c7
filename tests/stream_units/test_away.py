"""A stream's folder goes away while it is followed and looked after, and comes back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from thinwire.errors import AccessDenied, Deadline, LineageChanged, ThinwireError, Unavailable
from thinwire.follow import Follower, leases, looks, open_stream
from thinwire.maintain import Maintainer, charge
from thinwire.report import HubClient
from thinwire.report.state import Now, ReplicaState
from thinwire.stream import keys
from thinwire.stream.events import Applied, CaughtUp, Maintained, Refused
from thinwire.stream.version import Version

from .making import DictStore, HookStore, Recorder, bits, held, history, published, publisher, tiny

VERSIONS = history(4, tiny())
EMPTY = pytest.mark.parametrize("is_empty", [False, True], ids=["moved", "an empty one"])


@pytest.fixture(autouse=True)
def _busy_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written at every look: the more chances to make what must not be made."""
    monkeypatch.setattr(leases, "_EVERY_S", 0.0)
    monkeypatch.setattr(charge, "_LEASE_TTL_S", 0)


@contextmanager
def away(url: Path, is_empty: bool) -> Iterator[None]:
    """The folder is away meanwhile; nothing may be made in its place."""
    url.rename(url.with_name("away"))
    if is_empty:
        url.mkdir()
    yield
    assert not [*url.glob("*")]
    if is_empty:
        url.rmdir()
    assert not url.exists()
    url.with_name("away").rename(url)


@contextmanager
def running(run: Callable[[], object], stop: Callable[[], None]) -> Iterator[list[ThinwireError]]:
    """Run something on a thread; yields what ended it before it was told to stop."""
    failed: list[ThinwireError] = []

    def act() -> None:
        try:
            run()
        except ThinwireError as error:
            failed.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield failed
    finally:
        stop()
        thread.join(30)
        assert not thread.is_alive()


def unavailable(recorder: Recorder) -> list[Refused]:
    return [event for event in recorder.of(Refused) if event.code == "unavailable"]


def until(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@EMPTY
def test_a_follower(is_empty: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = tmp_path / "store"
    trainer = publisher(open_stream(url), tmp_path / "baseline")
    trainer.publish(VERSIONS[0])
    recorder = Recorder()
    stream = open_stream(url, retry_s=0)
    with trainer, Follower(stream, tmp_path / "sink", observer=recorder) as follower:

        def follow() -> None:
            for _ in follower.follow(poll_s=0.01):
                pass

        with running(follow, follower.stop) as failed:
            for number in (1, 2):
                until(lambda: 1 in [event.version for event in recorder.of(CaughtUp)])
                caplog.clear()
                before, told = len(recorder.events), len(unavailable(recorder))
                with away(url, is_empty):
                    until(lambda told=told: len(unavailable(recorder)) > told + 2)
                assert failed == []
                # As it is told to the hub: a fault until it is back, and ready all the while.
                state = ReplicaState("a", region="", engine="", now=Now(0, 0))
                for event in recorder.events[:before]:
                    state.take(event, Now(1, 1))
                state.take(unavailable(recorder)[-1], Now(2, 2))
                beat = state.beat(Now(3, 3))
                assert beat.is_ready
                assert beat.fault is not None
                assert beat.fault.code == "unavailable"
                assert url.as_uri() in unavailable(recorder)[-1].reason
                trainer.publish(VERSIONS[number])
                recorder.wait_for(Applied, 1 + number)
                until(lambda: "can be used again" in caplog.text)
        assert held(tmp_path / "sink") == bits(VERSIONS[2])
    assert [event.code for event in recorder.of(Refused) if event.code != "unavailable"] == []


@EMPTY
def test_a_follower_that_is_started_meanwhile(is_empty: bool, tmp_path: Path) -> None:
    """It holds a version, so there was a stream."""
    url = tmp_path / "store"
    with publisher(open_stream(url), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        with Follower(open_stream(url), tmp_path / "sink") as follower:
            follower.catch_up()
        recorder = Recorder()
        stream = open_stream(url, retry_s=0)
        with away(url, is_empty):
            with Follower(open_stream(url, retry_s=0), tmp_path / "sink") as follower:
                with pytest.raises(Unavailable) as raised:
                    follower.catch_up()
                assert "mounted" in raised.value.hint
            follower = Follower(stream, tmp_path / "sink", observer=recorder)
            found = follower.follow(poll_s=0.01)
            threading.Timer(0.1, follower.stop).start()
            assert [*found] == []
            assert unavailable(recorder)
        trainer.publish(VERSIONS[1])
        assert follower.catch_up().version == 2
        follower.close()


@EMPTY
def test_what_is_held_is_known_without_the_store(is_empty: bool, tmp_path: Path) -> None:
    """So whoever asks for it, such as a driver, or a client of a hub, starts and goes on."""
    url, sink = tmp_path / "store", tmp_path / "sink"
    with publisher(open_stream(url), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        with Follower(open_stream(url), sink) as follower:
            follower.catch_up()
        recorder = Recorder()
        with (
            Follower(open_stream(url, retry_s=0), sink, observer=recorder) as follower,
            away(url, is_empty),
        ):
            held_version = follower.version()
            assert held_version is not None
            assert held_version.version == 1
            assert follower.wait_for(1, 0.0) == held_version
            client = HubClient("http://127.0.0.1:1", "run", replica="a")
            with client.reporting(follower):
                assert follower.version() == held_version
            with pytest.raises(Deadline, match="here is 1"):
                follower.wait_for(2, 0.2, poll_s=0.01)
            assert unavailable(recorder)


def test_it_is_not_waited_for_by_who_is_to_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is tried again for a minute; half of that is left until somebody is killed."""
    monkeypatch.setattr(leases, "_END_WITHIN_S", 0.1)
    url = tmp_path / "store"
    with publisher(open_stream(url), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        stream = open_stream(url, retry_s=3600)
        with Follower(stream, tmp_path / "sink") as follower:
            follower.catch_up()
            with away(url, False), Maintainer(stream, tmp_path / "work") as maintainer:
                for run, stop in (
                    (lambda: [*follower.follow(poll_s=0.01)], follower.stop),
                    (maintainer.watch, maintainer.stop),
                ):
                    caplog.clear()
                    with running(run, stop) as failed:
                        until(lambda: "it is tried again for 36" in caplog.text)
                    assert failed == []
                    # One outage for both of them: a success in between.
                    stream.store._outage.note_answer()


def test_it_is_waited_for_until_it_is_back(tmp_path: Path) -> None:
    url, sink, recorder = tmp_path / "store", tmp_path / "sink", Recorder()
    with publisher(open_stream(url), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        with Follower(open_stream(url), sink) as follower:
            follower.catch_up()
        trainer.publish(VERSIONS[1])
        with Follower(open_stream(url, retry_s=0), sink, observer=recorder) as follower:
            found: list[Version] = []

            def wait() -> None:
                found.append(follower.wait_for(2, 30.0, poll_s=0.01))

            url.rename(tmp_path / "away")
            with running(wait, follower.stop) as failed:
                until(lambda: unavailable(recorder) or failed)
                (tmp_path / "away").rename(url)
                until(lambda: found or failed)
            assert failed == []
        assert held(sink) == bits(VERSIONS[1])


def test_who_holds_what_belongs_elsewhere(tmp_path: Path) -> None:
    """The message says which folder it is; a wrong URL ends what is to be done once."""
    sink = tmp_path / "sink"
    first = DictStore()
    published(first, tmp_path / "first", VERSIONS[:1])
    with Follower(open_stream(first), sink) as follower:
        follower.catch_up()
    with Follower(open_stream(tmp_path / "stroe"), sink) as follower:
        with pytest.raises(Unavailable) as raised:
            follower.catch_up()
        assert str(sink) in raised.value.message
        assert "stroe" in raised.value.message
        assert "there was a stream" not in raised.value.message
        assert f"give another folder than {sink}" in raised.value.hint
    assert not (tmp_path / "stroe").exists()


def test_a_bucket_that_looks_empty_is_noticed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing newer is there, as it seems: how many looks say so does not matter."""
    monkeypatch.setattr(looks, "_DOUBT_EVERY_S", 0.1)
    store, recorder = DictStore(), Recorder()
    published(store, tmp_path / "baseline", VERSIONS[:2])
    with Follower(open_stream(store), tmp_path / "sink", observer=recorder) as follower:
        found = follower.follow(poll_s=0.03)
        assert next(found).version == 2
        objects, store.objects = store.objects, {}
        counts: list[int] = []

        def until_told() -> None:
            until(lambda: unavailable(recorder))
            counts.append(len(recorder.of(CaughtUp)))
            store.objects = objects
            follower.stop()

        with running(until_told, follower.stop):
            assert [*found] == []
        assert counts[0] < 20


def test_a_lease_where_what_is_missing_may_not_be_asked_for(tmp_path: Path) -> None:
    """As S3 answers, where one may not list."""
    store = DictStore()
    published(store, tmp_path / "baseline", VERSIONS[:1])
    is_empty = True

    def before(operation: str, key: str) -> None:
        if is_empty and key == keys.STREAM:
            raise AccessDenied("no")

    keeper = leases.LeaseKeeper(HookStore(store, before))
    assert isinstance(keeper.renew("ab" * 16, 1), AccessDenied)
    is_empty = False
    assert keeper.renew("ab" * 16, 1) is None
    assert keeper.is_written


def test_a_bucket_that_is_emptied_while_it_is_maintained(tmp_path: Path) -> None:
    store = DictStore()
    published(store, tmp_path / "baseline", history(12, tiny())[:10])
    saved: dict[str, tuple[bytes, float]] = {}

    def empty(operation: str, key: str) -> None:
        if "/deltas/" in key and operation.startswith("get") and not saved:
            saved.update(store.objects)
            store.objects = {}

    stream = open_stream(HookStore(store, empty))
    with Maintainer(stream, tmp_path / "work") as maintainer:
        with pytest.raises(Unavailable):
            maintainer.run_once()
        assert saved
        assert store.objects == {}
        store.objects = saved
        assert maintainer.run_once().merge_count


def test_another_stream_in_its_place(tmp_path: Path) -> None:
    """No reset takes it, and nothing says that one would; what is held is held."""
    store, sink = DictStore(), tmp_path / "sink"
    published(store, tmp_path / "first", VERSIONS[:2])
    with Follower(open_stream(store), sink) as follower:
        at = follower.catch_up()
        store.objects = {}
        published(store, tmp_path / "other", VERSIONS[2:])
        for reset in (False, True):
            with pytest.raises(LineageChanged, match="another stream") as raised:
                follower.check_known()
            assert "reset" not in raised.value.hint
            with pytest.raises(LineageChanged, match="another stream"):
                follower.catch_up(reset=reset)
            assert follower.version() == at
    assert held(sink) == bits(VERSIONS[1])
    # A process that never knew the right one finds that out, and says so from then on.
    with Follower(open_stream(store), sink) as follower:
        assert follower.version() == at
        with pytest.raises(LineageChanged, match="another stream"):
            follower.catch_up(reset=True)
        with pytest.raises(LineageChanged, match="another stream"):
            follower.version()


def test_a_follower_that_waits_for_the_first_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody published yet: that is told once, and is no outage."""
    url, recorder = tmp_path / "store", Recorder()
    stream = open_stream(url, retry_s=0)
    with Follower(stream, tmp_path / "sink", observer=recorder) as follower:
        found = follower.watch(poll_s=0.01, idle_s=0.02)
        assert next(found) is None
        url.mkdir()
        assert next(found) is None
        assert [event.code for event in recorder.of(Refused)] == ["not-found"]
        with publisher(open_stream(url), tmp_path / "baseline") as trainer:
            trainer.publish(VERSIONS[0])
            assert next(version for version in found if version is not None).version == 1
    assert caplog.text == ""


def test_a_bucket_that_looks_empty(tmp_path: Path) -> None:
    """As with another endpoint: what was there is not gone for good."""
    store = DictStore()
    published(store, tmp_path / "baseline", VERSIONS[:2])
    with Follower(open_stream(store), tmp_path / "sink") as follower:
        follower.catch_up()
        objects, store.objects = store.objects, {}
        with pytest.raises(Unavailable, match="there was a stream at"):
            follower.check_known()
        with pytest.raises(Unavailable, match="there was a stream at"):
            follower.catch_up()
        assert store.objects == {}
        store.objects = objects
        assert follower.catch_up().version == 2
        # Where there is one, it was replaced.
        store.objects = {}
        published(store, tmp_path / "other", VERSIONS[2:])
        with pytest.raises(LineageChanged):
            follower.check_known()


@EMPTY
def test_a_maintainer(is_empty: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = tmp_path / "store"
    stream = open_stream(url, retry_s=0)
    recorder = Recorder()
    with publisher(open_stream(url), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        with Maintainer(stream, tmp_path / "work", observer=recorder) as maintainer:

            def watch() -> None:
                maintainer.watch(every_s=0.01)

            with running(watch, maintainer.stop) as failed:
                until((url / keys.maintainer()).exists)
                with away(url, is_empty):
                    until(lambda: len(unavailable(recorder)) > 3)
                for arrays in VERSIONS[1:]:
                    trainer.publish(arrays)
                for _ in range(3):
                    trainer.publish(tiny(7))
                recorder.wait_for(Maintained)
                assert failed == []
    assert "can be used again" in caplog.text


def test_an_outage_that_is_none(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    store = DictStore()
    published(store, tmp_path / "baseline", VERSIONS[:1])
    with caplog.at_level(logging.INFO), Follower(open_stream(store), tmp_path / "f") as follower:
        follower.catch_up()
        follower.catch_up()
    assert caplog.text == ""
