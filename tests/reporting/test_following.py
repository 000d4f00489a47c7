"""What a follower tells of its progress, and how often it looks where somebody wakes it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from thinwire.follow import Follower, metering, open_stream
from thinwire.follow.looks import Looks
from thinwire.follow.wakes import Wakes
from thinwire.stream.events import CaughtUp, Event, Fetched, Observers, Progressed

from .making import NEVER_S, WITHIN_S, eventually, training


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def test_progress_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "_EVERY_S", 0.0)
    recorder = Recorder()
    with training(tmp_path) as trainer:
        trainer.publish()
        with Follower(trainer.url, tmp_path / "f", observer=recorder) as follower:
            follower.catch_up()
            trainer.publish()
            follower.catch_up()
    for version, phases in ((1, {"fetch"}), (2, {"fetch", "apply"})):
        seen = [
            event
            for event in recorder.events
            if isinstance(event, Progressed) and event.version == version
        ]
        assert {event.phase for event in seen} == phases
        fetches = [event for event in seen if event.phase == "fetch"]
        assert fetches[0].done_bytes == 0
        done = [event.done_bytes for event in fetches]
        assert done == sorted(done)
        (fetched,) = [
            event
            for event in recorder.events
            if isinstance(event, Fetched) and event.version == version
        ]
        assert done[-1] == fetches[-1].total_bytes == fetched.payload_bytes


def test_nothing_is_told_too_often(tmp_path: Path) -> None:
    recorder = Recorder()
    first = Progressed(url="u", lineage="", version=1, phase="fetch", total_bytes=10**6)
    meter = metering.ProgressMeter(Observers(recorder), first)
    threads = [
        threading.Thread(target=lambda: [meter.count(1) for _ in range(10_000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert recorder.events[0] == first
    assert len(recorder.events) < 1000


def test_without_an_observer_nothing_is_counted() -> None:
    first = Progressed(url="u", lineage="", version=1, phase="fetch")
    meter = metering.ProgressMeter(Observers(None), first)
    meter.count(7)
    assert meter._done_bytes == 0
    both: list[int] = []
    meter.beside(both.append)(5)
    assert both == [5]


def test_looks_are_rare_while_somebody_wakes(tmp_path: Path) -> None:
    """And as they were once nobody does any more, at once and without another look."""
    recorder = Recorder()
    with training(tmp_path) as trainer:
        trainer.publish()
        follower = Follower(open_stream(trainer.url), tmp_path / "f", observer=recorder)
        follower.expect_wakes(True)
        versions: list[int] = []

        def run() -> None:
            with follower:
                versions.extend(version.version for version in follower.follow(poll_s=0.01))

        thread = threading.Thread(target=run)
        thread.start()

        def looks() -> int:
            return len([event for event in recorder.events if isinstance(event, CaughtUp)])

        try:
            # The first, and the one after what the first found.
            eventually(lambda: looks() == 2)
            for count in (3, 4):
                follower.wake()
                eventually(lambda count=count: looks() == count)
            follower.expect_wakes(False)
            eventually(lambda: looks() > 20)
        finally:
            follower.stop()
            thread.join(WITHIN_S)
        assert not thread.is_alive()


def quiet_looks() -> Looks:
    """Looks that find a version which is there already."""
    return Looks(lambda: None, lambda: None, lambda: False, lambda error: None)  # type: ignore[arg-type, return-value]


def test_idle_is_told_no_more_often_however_often_minds_change() -> None:
    """What is asked in between is asked of an engine."""
    looks = quiet_looks()
    is_over = threading.Event()

    def flap() -> None:
        while not is_over.is_set():
            looks.wakes.expect(not looks.wakes.are_expected)

    thread = threading.Thread(target=flap)
    thread.start()
    begin_s = time.monotonic()
    try:
        idle_count = sum(1 for _ in looks.updates(1000.0, begin_s + 1.0, 0.25))
    finally:
        is_over.set()
        thread.join()
    assert 1 <= idle_count <= 4


def test_idle_is_told_though_looks_are_closer() -> None:
    looks = quiet_looks()
    assert 1 <= sum(1 for _ in looks.updates(0.02, time.monotonic() + 1.0, 0.2)) <= 5


def test_sleeping() -> None:
    wakes = Wakes()
    wakes.wake()
    wakes.wake()
    assert wakes.sleep(NEVER_S)
    assert not wakes.sleep(0.001)
    wakes.expect(True)
    assert not wakes.sleep(NEVER_S)
    # The same again is nothing to think about.
    wakes.expect(True)
    assert not wakes.sleep(0.001)
    wakes.expect(False)
    wakes.wake()
    assert wakes.sleep(NEVER_S)
