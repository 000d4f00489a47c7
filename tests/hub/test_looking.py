"""Where a stream is, over everything that may happen to its bucket; with real publishers."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from thinwire.errors import NotFound, SignatureInvalid, ThinwireError, Unavailable, VersionGap
from thinwire.follow import open_stream
from thinwire.hub.looking import Looker, versions_before
from thinwire.hub.versions import History, note_of
from thinwire.hub.watcher import Watcher
from thinwire.report.messages import VersionNote
from thinwire.store import open_store
from thinwire.stream.signing import SigningKey
from thinwire.testing.faults import NO_FAULTS, FaultStore, Rates

from .making import training, until


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def numbers(looker: Looker, *, doubts: bool = False) -> list[int]:
    return [manifest.version for manifest in looker.look(doubts=doubts).found]


def manifest_path(url: str, version: int) -> Path:
    (path,) = Path(url).glob(f"*/manifests/{version:012d}.json")
    return path


def test_versions_one_after_the_other(tmp_path: Path) -> None:
    looker = Looker(open_stream(tmp_path / "policy"))
    with pytest.raises(NotFound):
        looker.look(doubts=False)
    with training(tmp_path) as trainer:
        assert numbers(looker) == []
        trainer.publish()
        trainer.publish()
        assert looker.look(doubts=False).is_jump
        assert numbers(looker) == []
        trainer.publish()
        trainer.publish()
        assert numbers(looker) == [3, 4]
        for _ in range(20):
            trainer.publish()
        look = looker.look(doubts=True)
        assert look.is_jump
        assert not look.is_other
        assert look.found[-1].version == 24


def test_a_look_that_finds_nothing_asks_once(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.publish()
        asked: list[str] = []

        def note_asked(when: str, operation: str, key: str) -> None:
            if when == "before":
                asked.append(key)

        store = FaultStore(open_store(trainer.url), random.Random(0), hook=note_asked)
        looker = Looker(open_stream(store))
        looker.look(doubts=True)
        asked.clear()
        looker.look(doubts=False)
        assert len(asked) == 1


def test_lineages(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with training(tmp_path) as trainer:
        looker = Looker(open_stream(trainer.url))
        for _ in range(10):
            trainer.publish()
        looker.look(doubts=False)
        trainer.begin_again()
        # The lineage has ended, and the next has no version yet.
        assert numbers(looker) == []
        # And is given up before it has one.
        trainer.begin_again()
        assert numbers(looker) == []
        trainer.publish()
        trainer.publish()
        assert numbers(looker, doubts=True) == [11, 12]
        assert looker.head is not None
        trainer.begin_again()
        trainer.publish()
        (first,) = looker.look(doubts=False).found
        before = list(versions_before(open_stream(trainer.url), first, pool, lambda: True))
        assert [one.version for one in before] == list(range(12, 0, -1))
        assert len({one.lineage for one in before} | {first.lineage}) == 3


def test_another_stream_in_its_place(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        for _ in range(3):
            trainer.publish()
        looker = Looker(open_stream(trainer.url, retry_s=0))
        looker.look(doubts=False)
    shutil.rmtree(trainer.url)
    shutil.rmtree(tmp_path / "policy-copy")
    # Whoever knows the folder takes it for a mount that is gone.
    with pytest.raises(Unavailable):
        looker.look(doubts=True)
    assert looker.head is not None
    with training(tmp_path) as trainer:
        trainer.publish()
        assert numbers(looker) == []
        look = looker.look(doubts=True)
        assert look.is_other
        assert [manifest.version for manifest in look.found] == [1]


def test_a_stream_that_was_set_back(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        for _ in range(3):
            trainer.publish()
        looker = Looker(open_stream(trainer.url))
        looker.look(doubts=False)
        manifest_path(trainer.url, 3).unlink()
        assert numbers(looker) == []
        look = looker.look(doubts=True)
        assert look.is_other
        assert [manifest.version for manifest in look.found] == [2]


def test_a_version_that_does_not_follow(tmp_path: Path) -> None:
    """One that was made for another history is not told of; the head stays."""
    with training(tmp_path) as trainer:
        trainer.publish()
        shutil.copytree(tmp_path, tmp_path.with_name("fork"))
        trainer.publish()
        looker = Looker(open_stream(trainer.url))
        looker.look(doubts=False)
        trainer.publish()
        third = manifest_path(trainer.url, 3).read_bytes()
    with training(tmp_path.with_name("fork")) as fork:
        fork.publish(step=7)
        second = looker.head
        fork_looker = Looker(open_stream(fork.url))
        fork_looker.look(doubts=False)
        manifest_path(fork.url, 2).with_name(f"{3:012d}.json").write_bytes(third)
        with pytest.raises(VersionGap, match="does not follow"):
            fork_looker.look(doubts=False)
        assert fork_looker.head is not None
        assert fork_looker.head.version == 2
        assert fork_looker.head != second
    shutil.rmtree(tmp_path.with_name("fork"))


def test_a_history_that_was_altered_ends_there(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with training(tmp_path) as trainer:
        for _ in range(6):
            trainer.publish()
        stream = open_stream(trainer.url)
        head = stream.tip().head
        assert head is not None
        manifest_path(trainer.url, 3).unlink()
        found: list[int] = []

        def walk() -> None:
            for one in versions_before(stream, head, pool, lambda: True):
                found.append(one.version)  # one by one: it ends with an error

        with pytest.raises(VersionGap, match="version 3"):
            walk()
        assert found == [5, 4]


def test_only_what_a_pinned_key_signed(tmp_path: Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    with training(tmp_path, signing_key=key) as trainer:
        trainer.publish()
        good = Looker(open_stream(trainer.url, trusted_keys=[key.public]))
        assert numbers(good) == [1]
        with pytest.raises(SignatureInvalid):
            Looker(open_stream(trainer.url, trusted_keys=[other.public])).look(doubts=False)


class Told:
    """Keeps what a watcher tells."""

    def __init__(self) -> None:
        self.taken: list[VersionNote] = []
        self.filled: list[int] = []
        self.faults: list[str] = []
        self.other_count = 0
        self.looked = threading.Event()

    def take(self, notes: list[VersionNote], *, model: str, is_other: bool) -> None:
        self.other_count += is_other
        self.taken += notes
        self.looked.set()

    def fill(self, note: VersionNote) -> bool:
        self.filled.append(note.version)
        return True

    def fail(self, error: ThinwireError) -> None:
        self.faults.append(error.code)

    def head(self) -> int:
        return self.taken[-1].version if self.taken else 0


def test_a_watcher_outlives_a_store_that_fails(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with training(tmp_path) as trainer:
        for _ in range(12):
            trainer.publish(step=4)
        store = FaultStore(open_store(trainer.url), random.Random(0))
        told = Told()
        watcher = Watcher(open_stream(store), told, pool, poll_s=0.02)
        watcher.start()
        until(lambda: told.head() == 12)
        until(lambda: told.filled == list(range(11, 0, -1)))
        store.set_rates(Rates(fail_before=1.0))
        until(lambda: told.faults)
        trainer.publish()
        assert told.head() == 12
        store.set_rates(NO_FAULTS)
        watcher.wake()
        until(lambda: told.head() == 13)
        watcher.stop()
        watcher.join()
        stream = open_stream(trainer.url)
        head = stream.tip().head
        assert head is not None
        assert told.taken[-1] == note_of(head)


def test_a_signal_makes_it_look(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with training(tmp_path) as trainer:
        trainer.publish()
        told = Told()
        watcher = Watcher(open_stream(trainer.url), told, pool, poll_s=3600)
        watcher.start()
        until(lambda: told.head() == 1)
        trainer.publish()
        watcher.wake()
        until(lambda: told.head() == 2)
        told.looked.clear()
        # Said before it can be seen.
        watcher.wake(30)
        assert told.looked.wait(30)
        trainer.publish()
        until(lambda: told.head() == 3)
        watcher.stop()
        watcher.join()


def test_that_it_is_another_stream_is_told_once_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path) as trainer:
        trainer.publish()
        url = trainer.url
    stream = open_stream(url)
    looker = Looker(stream)
    looker.look(doubts=True)
    shutil.rmtree(url)
    with training(tmp_path / "other") as trainer:
        trainer.publish()
        shutil.copytree(trainer.url, url)
    # Found to be another one, and then not to be read for a moment.
    with monkeypatch.context() as broken:
        broken.setattr(stream, "tip", partial(pytest.fail, "away"))
        with pytest.raises(pytest.fail.Exception):
            looker.look(doubts=True)
    look = looker.look(doubts=False)
    assert look.is_other
    assert [one.version for one in look.found] == [1]
    assert not looker.look(doubts=True).is_other


class Recording:
    """Whom a watcher tells."""

    def __init__(self, room: int = 1000) -> None:
        self.history = History(room)
        self.errors: list[ThinwireError] = []
        self.failures_left = 0

    def take(self, notes: list[VersionNote], *, model: str, is_other: bool) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise RuntimeError("a bug")
        for one in notes:
            self.history.add(one)

    def fill(self, note: VersionNote) -> bool:
        self.history.add(note)
        return self.history.has_room_before(note.version)

    def fail(self, error: ThinwireError) -> None:
        self.errors.append(error)

    @property
    def numbers(self) -> list[int]:
        return [one.version for one in self.history.newest(1000)]


def test_a_watcher_outlives_a_bug_of_whom_it_tells(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with training(tmp_path) as trainer:
        trainer.publish()
        told = Recording()
        told.failures_left = 1
        watcher = Watcher(open_stream(trainer.url), told, pool, poll_s=0.05)
        watcher.start()
        try:
            until(lambda: told.errors, "the bug")
            trainer.publish()
            until(lambda: told.numbers == [2, 1], "both versions")
        finally:
            watcher.stop()
            watcher.join()


def test_holes_of_the_history_are_closed(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where reading it failed, also below what a later reading knew already."""
    monkeypatch.setattr("thinwire.hub.watcher._FILL_AGAIN_S", 0.1)
    with training(tmp_path) as trainer:
        for _ in range(30):
            trainer.publish()
        missing = manifest_path(trainer.url, 12)
        kept = missing.read_bytes()
        missing.unlink()
        told = Recording()
        watcher = Watcher(open_stream(trainer.url), told, pool, poll_s=0.05)
        watcher.start()
        try:
            until(lambda: 13 in told.numbers, "what can be read")
            assert 11 not in told.numbers
            missing.write_bytes(kept)
            until(lambda: told.numbers == list(range(30, 0, -1)), "all of it")
        finally:
            watcher.stop()
            watcher.join()


def test_what_stays_missing_is_asked_for_more_and_more_seldom(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.hub.watcher._FILL_AGAIN_S", 0.01)
    asked: list[str] = []

    def note_asked(when: str, operation: str, key: str) -> None:
        if when == "before":
            asked.append(key)

    with training(tmp_path) as trainer:
        for _ in range(30):
            trainer.publish()
        missing = manifest_path(trainer.url, 12)
        missing.unlink()
        store = FaultStore(open_store(trainer.url), random.Random(0), hook=note_asked)
        told = Recording()
        watcher = Watcher(open_stream(store), told, pool, poll_s=0.01)
        watcher.start()
        try:
            # At 0, 10, 30, 70, 150, 310, 630 ms and so on.
            until(lambda: sum(key.endswith(missing.name) for key in asked) >= 5, "five tries")
        finally:
            watcher.stop()
            watcher.join()
    # What was read is not read again: only the batch that begins with what is missing.
    assert sum(key.endswith(manifest_path(trainer.url, 25).name) for key in asked) == 1
    assert watcher._fill_pause_s >= 2**4 * 0.01
