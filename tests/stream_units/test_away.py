"""A stream's folder goes away while it is followed and looked after, and comes back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from thinwire.errors import LineageChanged, ThinwireError, Unavailable
from thinwire.follow import Follower, leases, open_stream
from thinwire.maintain import Maintainer, charge
from thinwire.report.state import Now, ReplicaState
from thinwire.stream import keys
from thinwire.stream.events import Applied, CaughtUp, Maintained, Refused

from .making import DictStore, Recorder, bits, held, history, published, publisher, tiny

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
