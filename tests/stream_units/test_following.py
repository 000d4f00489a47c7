"""Following: waiting, waking, stopping, leases, rights, and whose folder it is."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import (
    AccessDenied,
    BaseUnusable,
    Deadline,
    InvalidArgument,
    LineageChanged,
    NotFound,
    Unavailable,
)
from thinwire.follow import CheckpointSink, Follower, open_stream
from thinwire.follow import leases as leases_module
from thinwire.stream import keys
from thinwire.stream.encoding import parse_hint
from thinwire.stream.events import Applied, Fetched, Progressed, Published, Refused
from thinwire.stream.records import Lease

from .making import (
    Arrays,
    DictStore,
    HookStore,
    Look,
    Recorder,
    bits,
    held,
    history,
    joined,
    published,
    publisher,
    read_only,
    tiny,
)

NEVER_S = 1e6


def test_every_version(whole: DictStore, versions: list[Arrays], tmp_path: Path) -> None:
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        assert follower.version() is None
        for number, arrays in enumerate(versions, 1):
            version = follower.catch_up(number)
            assert (version.version, version.step) == (number, number)
            assert held(tmp_path / "sink") == bits(arrays)
            assert follower.version() == version
        assert follower.catch_up().version == 10


def test_jumps_and_resets(whole: DictStore, versions: list[Arrays], tmp_path: Path) -> None:
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        follower.catch_up(3)
        follower.catch_up(9)
        assert held(tmp_path / "sink") == bits(versions[8])
        with pytest.raises(LineageChanged, match="reset=True"):
            follower.catch_up(2)
        assert held(tmp_path / "sink") == bits(versions[8])
        assert follower.catch_up(2, reset=True).version == 2
        assert held(tmp_path / "sink") == bits(versions[1])


@pytest.mark.parametrize("target", [0, -1, 11, 10**13])
def test_versions_that_are_not_there(target: int, whole: DictStore, tmp_path: Path) -> None:
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        with pytest.raises(NotFound, match="the newest is 10"):
            follower.catch_up(target)
        assert follower.version() is None


def test_no_stream_and_nothing_published(tmp_path: Path) -> None:
    store = DictStore()
    with Follower(open_stream(store), tmp_path / "sink") as follower:
        with pytest.raises(NotFound, match="there is no stream"):
            follower.catch_up()
        with publisher(store, tmp_path / "baseline"), pytest.raises(NotFound, match="nothing was"):
            follower.catch_up()


# Waiting: nothing here sleeps; whoever waits is woken


class Following:
    """A follower that follows on a thread of its own."""

    def __init__(self, follower: Follower, poll_s: float = NEVER_S) -> None:
        self.versions: list[int] = []
        self._seen = threading.Condition()
        self._thread = ThreadPoolExecutor(1)
        self.ended: Future[None] = self._thread.submit(self._follow, follower, poll_s)

    def _follow(self, follower: Follower, poll_s: float) -> None:
        for version in follower.follow(poll_s=poll_s):
            with self._seen:
                self.versions.append(version.version)
                self._seen.notify_all()

    def saw(self, version: int) -> None:
        with self._seen:
            assert self._seen.wait_for(lambda: version in self.versions, timeout=60)


def test_follow_from_before_the_first_version(tmp_path: Path) -> None:
    """Woken, it looks at once, although it would have looked again in days."""
    store, look, recorder = DictStore(), Look(), Recorder()
    stream = open_stream(HookStore(store, look))
    with Follower(stream, tmp_path / "sink", observer=recorder) as follower:
        following = Following(follower)
        look.wait()
        with publisher(store, tmp_path / "baseline") as trainer:
            for number, arrays in enumerate(history(3, tiny()), 1):
                trainer.publish(arrays)
                follower.wake()
                following.saw(number)
                assert held(tmp_path / "sink") == bits(arrays)
        follower.stop()
        following.ended.result(60)
    assert following.versions == [1, 2, 3]
    told = [event.code for event in recorder.of(Refused)]
    assert told == ["not-found"], "once: a URL may be misspelled, or the trainer not yet there"


def test_follow_polls_without_being_woken(tmp_path: Path) -> None:
    store = DictStore()
    with Follower(open_stream(store), tmp_path / "sink") as follower:
        following = Following(follower, poll_s=0.01)
        published(store, tmp_path / "baseline", history(2, tiny()))
        following.saw(2)
        follower.stop()
        following.ended.result(60)


def test_stop_ends_a_wait(whole: DictStore, tmp_path: Path) -> None:
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        following = Following(follower)
        following.saw(10)
        follower.stop()
        following.ended.result(60)


def test_stop_ends_a_way_at_a_whole_version(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    """From inside a signal handler, say, while a long way is walked."""
    whole.delete(
        [*whole.find("/merges/"), *whole.find("/catalog"), *whole.find("anchors/000000000010")]
    )

    class Stopping(Recorder):
        def on_event(self, event: Any) -> None:
            super().on_event(event)
            if isinstance(event, Applied) and event.version == 3:
                follower.stop()

    with Follower(open_stream(whole), tmp_path / "sink", observer=Stopping()) as follower:
        assert [version.version for version in follower.follow()] == [3]
    assert held(tmp_path / "sink") == bits(versions[2])


def test_wait_for(whole: DictStore, tmp_path: Path) -> None:
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        assert follower.wait_for(4, timeout_s=NEVER_S).version == 10
        assert follower.wait_for(10, timeout_s=0).version == 10
        with pytest.raises(Deadline, match="version 11 did not come") as caught:
            follower.wait_for(11, timeout_s=0)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.retryable
        assert "here is 10" in str(caught.value)


def test_wait_for_a_stream_that_never_begins(tmp_path: Path) -> None:
    with (
        Follower(open_stream(DictStore()), tmp_path / "sink") as follower,
        pytest.raises(Deadline, match="here is none"),
    ):
        follower.wait_for(1, timeout_s=0.01)


def test_wait_for_a_version_that_comes(tmp_path: Path) -> None:
    store, look = DictStore(), Look()
    with (
        publisher(store, tmp_path / "baseline") as trainer,
        Follower(open_stream(HookStore(store, look)), tmp_path / "sink") as follower,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(follower.wait_for, 2, 60, poll_s=NEVER_S)
        look.wait()
        for one in history(2, tiny()):
            trainer.publish(one)
            follower.wake()
        assert waiting.result(60).version == 2


def test_passing_failures_are_told_and_others_raised(whole: DictStore, tmp_path: Path) -> None:
    failures: list[Exception] = [Unavailable("no answer"), AccessDenied("no rights")]

    def fail(operation: str, key: str) -> None:
        if key == keys.HEAD and failures:
            raise failures.pop(0)

    recorder = Recorder()
    store = HookStore(whole, fail)
    with Follower(open_stream(store), tmp_path / "sink", observer=recorder) as follower:
        with pytest.raises(AccessDenied):
            next(follower.follow(poll_s=0.001))
        assert recorder.of(Refused)[0].code == "unavailable"
        assert next(follower.follow()).version == 10


def test_wait_for_does_not_wait_longer_because_versions_keep_coming(tmp_path: Path) -> None:
    store = DictStore()
    arrays = tiny()
    trainer = publisher(store, tmp_path / "baseline")
    trainer.publish(arrays)
    count = 0

    def publish_another(operation: str, key: str) -> None:
        nonlocal count
        if "/deltas/" in key and count < 60:
            count += 1
            trainer.publish(arrays)

    stream = open_stream(HookStore(store, publish_another))
    with trainer, Follower(stream, tmp_path / "sink") as follower:
        follower.catch_up()
        trainer.publish(arrays)
        with pytest.raises(Deadline):
            follower.wait_for(10**6, timeout_s=0.01)
    assert count < 60


# Lineages


@pytest.mark.parametrize("accepts", [None, True, False])
@pytest.mark.parametrize("policy_accepts", [True, False])
def test_a_restart_from_other_weights(
    accepts: bool | None, policy_accepts: bool, tmp_path: Path
) -> None:
    """Followed only where the follower, or else the stream's policy, says so."""
    store = DictStore()
    versions = history(3, tiny())
    published(store, tmp_path / "baseline", versions[:2], accept_new_lineages=policy_accepts)
    stream = open_stream(store)
    with Follower(stream, tmp_path / "sink", accept_new_lineages=accepts) as follower:
        old = follower.catch_up()
        with publisher(store, tmp_path / "baseline", new_lineage=True) as trainer:
            new = trainer.publish(versions[2])
        if policy_accepts if accepts is None else accepts:
            assert follower.catch_up() == new
            assert held(tmp_path / "sink") == bits(versions[2])
            return
        for _ in range(2):
            with pytest.raises(LineageChanged, match="new lineage with version 3"):
                follower.catch_up()
            with pytest.raises(LineageChanged):
                next(follower.follow())
        assert follower.version() == old
        assert held(tmp_path / "sink") == bits(versions[1])
        assert follower.catch_up(reset=True) == new
        assert held(tmp_path / "sink") == bits(versions[2])


# Leases


def leases(store: DictStore) -> list[Lease]:
    return [parse_hint(store.objects[key][0], Lease, key) for key in store.find("leases/")]


def test_leases_are_written_renewed_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by those who call catch_up themselves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(leases_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    store = DictStore()
    arrays = history(4, tiny())
    with (
        publisher(store, tmp_path / "baseline") as trainer,
        Follower(open_stream(store), tmp_path / "sink") as follower,
    ):
        trainer.publish(arrays[0])
        follower.catch_up()
        assert [lease.version for lease in leases(store)] == [1]
        written_s = store.objects[store.find("leases/")[0]][1]
        trainer.publish(arrays[1])
        store.now_s += 100
        clock.now += 100
        follower.catch_up()
        assert [lease.version for lease in leases(store)] == [1], "not each time"
        clock.now += 900
        store.now_s += 900
        trainer.publish(arrays[2])
        follower.catch_up()
        assert [lease.version for lease in leases(store)] == [3]
        assert store.objects[store.find("leases/")[0]][1] > written_s
        clock.now += 900
        store.now_s += 900
        renewed_s = store.objects[store.find("leases/")[0]][1]
        follower.catch_up()
        assert store.objects[store.find("leases/")[0]][1] > renewed_s, "nothing new, still here"
    assert leases(store) == []


def test_no_lease_where_none_is_wanted(whole: DictStore, tmp_path: Path) -> None:
    before = whole.find()
    joined(whole, tmp_path / "sink")
    assert whole.find() == before


def test_a_store_that_may_only_be_read(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    """No lease, told once; everything else works."""
    recorder = Recorder()
    store = read_only(whole)
    with Follower(open_stream(store), tmp_path / "sink", observer=recorder) as follower:
        for number in (1, 2, 5):
            follower.catch_up(number)
        follower.wait_for(10, 60)
    assert held(tmp_path / "sink") == bits(versions[9])
    assert [event.code for event in recorder.of(Refused)] == ["access-denied"]


def test_a_lease_that_failed_for_now_is_tried_again(whole: DictStore, tmp_path: Path) -> None:
    failures = [Unavailable("no answer")]

    def fail(operation: str, key: str) -> None:
        if operation == "put" and failures:
            raise failures.pop()

    with Follower(open_stream(HookStore(whole, fail)), tmp_path / "sink") as follower:
        follower.catch_up(1)
        follower.catch_up(9)
        assert len(leases(whole)) == 1


# Whose folder it is


def test_one_follower_per_folder(whole: DictStore, tmp_path: Path) -> None:
    folder = tmp_path / "sink"
    with Follower(open_stream(whole), folder) as follower:
        follower.catch_up(1)
        for make in (
            lambda: Follower(open_stream(whole), folder),
            lambda: publisher(whole, folder),
        ):
            with pytest.raises(BaseUnusable):
                make()
        follower.catch_up()
    joined(whole, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt", "folder"])
def test_folders_with_files_of_others_are_left_alone(
    name: str, whole: DictStore, tmp_path: Path
) -> None:
    folder = tmp_path / "sink"
    folder.mkdir()
    if name == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    with Follower(open_stream(whole), folder) as follower:
        with pytest.raises(InvalidArgument, match="did not put there"):
            follower.catch_up()
        with pytest.raises(InvalidArgument):
            next(follower.follow())
    assert [path.name for path in folder.iterdir() if path.name[0] != "."] == [name]


def test_another_stream_and_other_tensors(whole: DictStore, tmp_path: Path) -> None:
    other = DictStore()
    published(other, tmp_path / "baseline", [tiny()])
    joined(whole, tmp_path / "sink")
    with (
        Follower(open_stream(other), tmp_path / "sink") as follower,
        pytest.raises(LineageChanged, match="another stream"),
    ):
        follower.catch_up(reset=True)
    with (
        Follower(open_stream(whole), tmp_path / "sink", tensors=["norm"]) as follower,
        pytest.raises(InvalidArgument, match="whole model"),
    ):
        follower.catch_up()


@pytest.mark.parametrize("mark", [b"", b"{}", b"not json", b'{"format":1}'])
def test_a_mark_of_others(mark: bytes, whole: DictStore, tmp_path: Path) -> None:
    joined(whole, tmp_path / "sink")
    (tmp_path / "sink" / ".thinwire-mark").write_bytes(mark)
    with (
        Follower(open_stream(whole), tmp_path / "sink") as follower,
        pytest.raises(BaseUnusable, match="mark"),
    ):
        follower.catch_up()


def test_a_stream_that_was_set_back(whole: DictStore, tmp_path: Path) -> None:
    """The bucket was restored from an older copy: said, not followed."""
    joined(whole, tmp_path / "sink")
    older = whole.copy()
    older.delete(older.find("manifests/000000000010") + older.find("manifests/000000000009"))
    with Follower(open_stream(older), tmp_path / "sink") as follower:
        with pytest.raises(LineageChanged, match="set back"):
            follower.catch_up()
        assert follower.catch_up(reset=True).version == 8


# Events


def test_events_of_a_whole_life(tmp_path: Path) -> None:
    store, recorder = DictStore(), Recorder()
    arrays = history(2, tiny())
    with (
        publisher(store, tmp_path / "baseline", observer=recorder) as trainer,
        Follower(
            open_stream(store), tmp_path / "sink", cache_dir=tmp_path / "cache", observer=recorder
        ) as follower,
    ):
        made = []
        for step, one in enumerate(arrays):
            made.append(trainer.publish(one, step=step))
            follower.catch_up()
    told = [
        (type(event).__name__, event.version)
        for event in recorder.events
        # How often it is told how far something is depends on the clock; that it begins does not.
        if not (isinstance(event, Progressed) and event.done_bytes)
    ]
    assert told == [
        ("Published", 1),
        ("Progressed", 1),
        ("Fetched", 1),
        ("Applied", 1),
        ("CaughtUp", 1),
        ("Published", 2),
        ("Progressed", 2),
        ("Fetched", 2),
        ("Progressed", 2),
        ("Applied", 2),
        ("CaughtUp", 2),
    ]
    assert {event.url for event in recorder.events} == {store.url}
    assert {event.lineage for event in recorder.events} == {made[0].lineage}
    for event, version in zip(recorder.of(Published), made, strict=True):
        assert (event.step, event.payload_bytes) == (version.step, version.payload_bytes)
        assert (event.raw_bytes, event.changed_count) == (version.raw_bytes, version.changed_count)
    for fetched, version in zip(recorder.of(Fetched), made, strict=True):
        assert fetched.kind == version.kind
        assert fetched.payload_bytes + fetched.cached_bytes == version.payload_bytes
    assert [(event.kind, event.base) for event in recorder.of(Applied)] == [
        ("anchor", None),
        ("delta", 1),
    ]


def test_where_the_store_gets_in_the_way_it_is_refused(whole: DictStore, tmp_path: Path) -> None:
    recorder = Recorder()
    key = whole.find("deltas/000000000004-000000000005/")[0]
    whole.delete([key, *whole.find("catalog"), *whole.find("/merges/")])
    with Follower(open_stream(whole), tmp_path / "sink", observer=recorder) as follower:
        follower.catch_up(4)
        with pytest.raises(NotFound):
            follower.catch_up(5)
        assert follower.version() is not None
    assert [(event.code, event.version) for event in recorder.of(Refused)] == [("not-found", 5)]


def test_progress_of_a_whole_version(whole: DictStore, tmp_path: Path) -> None:
    seen: list[int] = []
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        version = follower.catch_up(1, on_bytes=seen.append)
    assert sum(seen) == version.payload_bytes


# Disks


@pytest.mark.parametrize("target", [1, 2])
def test_a_full_disk(
    target: int,
    whole: DictStore,
    versions: list[Arrays],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen before anything is fetched; the sink is as before, and goes on once there is room."""
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        if target == 2:
            follower.catch_up(1)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
            with pytest.raises(Unavailable, match="are free"):
                follower.catch_up(target)
        assert held(tmp_path / "sink") == (bits(versions[0]) if target == 2 else {})
        follower.catch_up(target)
    assert held(tmp_path / "sink") == bits(versions[target - 1])


def test_a_disk_that_fails_while_applying(
    whole: DictStore, versions: list[Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    real: Callable[..., Any] = os.posix_fallocate

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        follower.catch_up(1)
        real_write = os.pwrite
        monkeypatch.setattr(os, "posix_fallocate", full)
        monkeypatch.setattr(os, "pwrite", full)
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(Unavailable):
            follower.catch_up(2)
        monkeypatch.undo()
        assert (os.posix_fallocate, os.pwrite) == (real, real_write)
        assert held(tmp_path / "sink") == bits(versions[0])
        assert follower.catch_up(2).version == 2
    assert held(tmp_path / "sink") == bits(versions[1])


def test_a_sink_can_be_given_as_such(whole: DictStore, tmp_path: Path) -> None:
    sink = CheckpointSink(tmp_path / "sink", workers=2)
    with Follower(open_stream(whole), sink) as follower:
        assert follower.sink is sink
        follower.catch_up()
    mark = sink.mark()
    assert mark is not None
    assert mark.version == 10
