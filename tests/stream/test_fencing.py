"""Rivals, zombies and restarts: of any number of publishers one wins, the others harm nothing."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest

from thinwire.errors import (
    BaseUnusable,
    CommitConflict,
    Fenced,
    LineageChanged,
    ThinwireError,
    Truncated,
    Unavailable,
)
from thinwire.follow import Follower, Stream, open_stream
from thinwire.maintain import Maintainer, fsck
from thinwire.publish import Publisher
from thinwire.store import CountingStore, Entry, Store, StoreWrapper, open_store
from thinwire.stream.events import Event, Refused
from thinwire.stream.records import Policy
from thinwire.stream.version import Version
from thinwire.testing.faults import NO_FAULTS, FaultStore, Rates

from .making import (
    Arrays,
    ClockStore,
    DictStore,
    all_bytes,
    content_of,
    first_arrays,
    read_checkpoint,
    read_mark,
    stepped,
)

_numbers = itertools.count()
POLICY = Policy(merge_levels=(2, 4), keep_age_s=0, grace_s=10)
ROUNDS = 8


@pytest.fixture
def clock() -> ClockStore:
    """A new bucket."""
    return ClockStore(open_store(f"memory://fencing-{next(_numbers)}", retry_s=0), 2e9)


@pytest.fixture
def faults(clock: ClockStore) -> FaultStore:
    return FaultStore(clock, random.Random(0))


def stream_of(store: Store) -> Stream:
    return open_stream(store, policy=POLICY)


def publisher(store: Store, folder: Path, *, new_lineage: bool = False) -> Publisher:
    return Publisher(stream_of(store), folder, new_lineage=new_lineage, maintain=False)


def objects(store: Store) -> dict[str, bytes]:
    """The whole bucket."""
    keys = [entry.key for entry in store.list("")]
    return {key: store.get(key, limit_bytes=1 << 30) for key in keys}


def manifests(store: Store) -> list[str]:
    return [entry.key for entry in store.list("") if "/manifests/" in entry.key]


def head_content(store: Store, folder: Path) -> tuple[Version, object]:
    """What somebody who joins gets."""
    shutil.rmtree(folder, ignore_errors=True)
    with Follower(stream_of(store), folder, accept_new_lineages=True, lease=False) as follower:
        version = follower.catch_up()
    return version, read_checkpoint(folder)


def assert_whole(store: Store) -> None:
    report = fsck(stream_of(store), deep=True)
    assert report.is_whole, report.problems


def versions_in(arrays: Arrays, count: int) -> Iterator[Arrays]:
    for seed in range(count):
        arrays = stepped(arrays, seed)
        yield arrays


class TestRace:
    def test_of_two_that_publish_at_once_exactly_one_wins(
        self, clock: ClockStore, tmp_path: Path
    ) -> None:
        arrays = first_arrays()
        with publisher(clock, tmp_path / "0") as first:
            first.publish(arrays, step=0)
        published = {1: arrays}
        wins = [0, 0]
        for number in range(ROUNDS):
            pair = [publisher(clock, tmp_path / str(who)) for who in range(2)]
            news = [stepped(arrays, 2 * number + who) for who in range(2)]
            before = [all_bytes(tmp_path / str(who)) for who in range(2)]
            results = race(
                [partial(pair[who].publish, news[who], step=2 * number + who) for who in range(2)]
            )
            won = [who for who in range(2) if isinstance(results[who], Version)]
            assert len(won) == 1, results
            winner, loser = won[0], 1 - won[0]
            version, error = results[winner], results[loser]
            assert isinstance(version, Version)
            assert version.version == number + 2
            assert isinstance(error, CommitConflict), repr(error)
            assert all_bytes(tmp_path / str(loser)) == before[loser]
            with pytest.raises(Fenced):
                pair[loser].publish(news[loser])
            arrays = published[version.version] = news[winner]
            wins[winner] += 1
            for each in pair:
                each.close()
            assert read_checkpoint(tmp_path / str(winner)) == content_of(arrays)
        assert len(manifests(clock)) == ROUNDS + 1
        self.check_orphans(clock, tmp_path)
        for number, content in published.items():
            with Follower(stream_of(clock), tmp_path / "each", lease=False) as follower:
                follower.catch_up(number, reset=True)
            assert read_checkpoint(tmp_path / "each") == content_of(content)
        assert_whole(clock)

    @staticmethod
    def check_orphans(clock: ClockStore, tmp_path: Path) -> None:
        with Maintainer(stream_of(clock), tmp_path / "work") as maintainer:
            clock.now_s += 20
            maintainer.run_once()
            clock.now_s += 20
            maintainer.run_once()
        steps: dict[str, int] = {}
        for entry in clock.list(""):
            if "/deltas/" in entry.key:
                folder = entry.key.split("/")[2]
                steps[folder] = steps.get(folder, 0) + 1
        assert len(steps) >= ROUNDS
        assert set(steps.values()) == {1}, "something of the losers is left"

    @pytest.mark.parametrize("count", [2, 8])
    def test_of_many_that_begin_a_stream_one_makes_it(
        self, clock: ClockStore, tmp_path: Path, count: int
    ) -> None:
        arrays = first_arrays()

        def begin(who: int) -> Version:
            with publisher(clock, tmp_path / str(who)) as each:
                return each.publish(stepped(arrays, who), step=who)

        results = race([partial(begin, who) for who in range(count)])
        won = [found for found in results if isinstance(found, Version)]
        # One that was late may have begun from the head that another one made.
        assert [found.version for found in sorted(won, key=lambda v: v.version)] == list(
            range(1, len(won) + 1)
        )
        lost = [found for found in results if not isinstance(found, Version)]
        assert all(isinstance(error, CommitConflict) for error in lost), lost
        version, content = head_content(clock, tmp_path / "joiner")
        assert version.version == len(won)
        assert version.step is not None
        assert content == content_of(stepped(arrays, version.step))
        assert_whole(clock)

    def test_of_two_new_lineages_at_once_one_wins(self, clock: ClockStore, tmp_path: Path) -> None:
        arrays = first_arrays()
        with publisher(clock, tmp_path / "first") as first:
            first.publish(arrays, step=0)
        for number in range(5):
            pair = [
                publisher(clock, tmp_path / f"{number}-{who}", new_lineage=True) for who in range(2)
            ]
            results = race(
                [
                    partial(pair[who].publish, stepped(arrays, step), step=step)
                    for who, step in enumerate((10 * number, 10 * number + 1))
                ]
            )
            for each in pair:
                each.close()
            won = [found for found in results if isinstance(found, Version)]
            lost = [found for found in results if not isinstance(found, Version)]
            assert len(won) >= 1, results
            assert all(isinstance(error, CommitConflict | Fenced) for error in lost), lost
            version, content = head_content(clock, tmp_path / "joiner")
            newest = max(won, key=lambda found: found.version)
            assert version == newest
            assert content == content_of(stepped(arrays, newest.step or 0))
        assert_whole(clock)

    def test_the_loser_had_uploaded_the_same_bytes(
        self, faults: FaultStore, tmp_path: Path
    ) -> None:
        """What it removes of its own must not be the winner's."""
        arrays = first_arrays()
        new = stepped(arrays, 1)
        winner = publisher(faults, tmp_path / "winner")
        winner.publish(arrays, step=1)
        loser = publisher(faults, tmp_path / "loser")
        faults.hook = once_at("put_if_absent", lambda: winner.publish(new, step=2))
        with pytest.raises(CommitConflict):
            loser.publish(new, step=2)
        version, content = head_content(faults, tmp_path / "joiner")
        assert version.version == 2
        assert content == content_of(new)
        assert_whole(faults)
        assert len([key for key in objects(faults) if "/deltas/" in key]) == 1

    @pytest.mark.parametrize("operation", ["put_file", "put_if_absent", "put"])
    def test_a_rival_acts_at_every_moment(
        self, faults: FaultStore, tmp_path: Path, operation: str
    ) -> None:
        arrays = first_arrays()
        with publisher(faults, tmp_path / "a") as first:
            first.publish(arrays, step=1)
        one, two = publisher(faults, tmp_path / "a"), publisher(faults, tmp_path / "b")

        def act() -> None:
            with pytest.raises(CommitConflict) if operation == "put" else nullcontext():
                two.publish(stepped(arrays, 2), step=2)

        faults.hook = once_at(operation, act)
        if operation == "put":
            # Its version is there: what is left to write is only the hint.
            assert one.publish(stepped(arrays, 1), step=3).version == 2
        else:
            with pytest.raises(CommitConflict):
                one.publish(stepped(arrays, 1), step=3)
            assert read_checkpoint(tmp_path / "a") == content_of(arrays)
            assert (read_mark(tmp_path / "a") or {})["version"] == 1
        assert len(manifests(faults)) == 2
        one.close()
        two.close()
        assert_whole(faults)


class TestZombie:
    def test_after_a_new_lineage_it_is_fenced(self, clock: ClockStore, tmp_path: Path) -> None:
        arrays = first_arrays()
        zombie = publisher(clock, tmp_path / "zombie")
        zombie.publish(arrays, step=1)
        zombie.publish(stepped(arrays, 1), step=2)
        with publisher(clock, tmp_path / "new", new_lineage=True) as new:
            assert new.publish(arrays, step=1).version == 3
            before = objects(clock), all_bytes(tmp_path / "zombie")
            for _ in range(2):
                with pytest.raises(Fenced):
                    zombie.publish(stepped(arrays, 9), step=3)
            assert (objects(clock), all_bytes(tmp_path / "zombie")) == before
            assert new.publish(stepped(arrays, 2), step=2).version == 4
        zombie.close()
        # Opened again it is no zombie: it goes on from the head.
        with publisher(clock, tmp_path / "zombie") as again:
            assert again.head is not None
            assert again.head.version == 4
            assert again.publish(stepped(arrays, 3), step=3).version == 5
        assert_whole(clock)

    def test_one_that_wanted_a_new_lineage_too(self, clock: ClockStore, tmp_path: Path) -> None:
        arrays = first_arrays()
        with publisher(clock, tmp_path / "a") as first:
            first.publish(arrays, step=1)
        late = publisher(clock, tmp_path / "late", new_lineage=True)
        with publisher(clock, tmp_path / "new", new_lineage=True) as new:
            new.publish(stepped(arrays, 1), step=2)
            with pytest.raises((CommitConflict, Fenced)):
                late.publish(stepped(arrays, 2), step=3)
            with pytest.raises(Fenced):
                late.publish(stepped(arrays, 2), step=3)
            assert new.publish(stepped(arrays, 3), step=4).version == 3
        late.close()
        version, content = head_content(clock, tmp_path / "joiner")
        assert (version.version, content) == (3, content_of(stepped(arrays, 3)))
        assert_whole(clock)

    def test_a_zombie_that_comes_back_long_after_maintenance(
        self, clock: ClockStore, tmp_path: Path
    ) -> None:
        """Pruning never frees a place that was taken."""
        arrays = first_arrays()
        policy = Policy(merge_levels=(2,), keep_versions=1, keep_age_s=0, grace_s=0, anchor_every=1)
        zombie = Publisher(open_stream(clock, policy=policy), tmp_path / "zombie", maintain=False)
        zombie.publish(arrays, step=0)
        with Publisher(open_stream(clock), tmp_path / "b", maintain=False) as other:
            for number in range(5):
                other.publish(stepped(arrays, number), step=number + 1)
                with Maintainer(open_stream(clock), tmp_path / "work") as maintainer:
                    clock.now_s += 1000
                    maintainer.run_once()
        with pytest.raises(CommitConflict):
            zombie.publish(stepped(arrays, 9), step=9)
        zombie.close()
        assert_whole(clock)


class TestRestart:
    @pytest.fixture
    def history(self, clock: ClockStore, tmp_path: Path) -> list[Arrays]:
        """Five versions of a stream, the last of which is head."""
        arrays = [first_arrays(), *versions_in(first_arrays(), 4)]
        with publisher(clock, tmp_path / "own") as first:
            for step, each in enumerate(arrays):
                first.publish(each, step=step)
        return arrays

    def test_from_its_own_folder_nothing_is_fetched(
        self, clock: ClockStore, tmp_path: Path, history: list[Arrays]
    ) -> None:
        counting = CountingStore(clock)
        with publisher(counting, tmp_path / "own") as again:
            assert again.head is not None
            assert again.head.version == 5
            assert counting.counts().downloaded_bytes < 20_000
            assert again.publish(stepped(history[-1], 9), step=9).version == 6
        assert len({json.loads(data)["lineage"] for data in self.manifests_of(clock)}) == 1

    def test_from_its_own_folder_when_others_went_on(
        self, clock: ClockStore, tmp_path: Path, history: list[Arrays]
    ) -> None:
        with publisher(clock, tmp_path / "other") as other:
            for seed in range(3):
                other.publish(stepped(history[-1], seed), step=10 + seed)
        with publisher(clock, tmp_path / "own") as again:
            assert read_checkpoint(tmp_path / "own") == content_of(stepped(history[-1], 2))
            assert again.publish(history[0], step=20).version == 9
        assert head_content(clock, tmp_path / "joiner")[1] == content_of(history[0])

    @pytest.mark.parametrize("version", [2, 5])
    def test_from_a_follower(
        self, clock: ClockStore, tmp_path: Path, history: list[Arrays], version: int
    ) -> None:
        with Follower(stream_of(clock), tmp_path / "follower") as follower:
            follower.catch_up(version)
            with pytest.raises(BaseUnusable):
                publisher(clock, tmp_path / "follower")
        with publisher(clock, tmp_path / "follower") as again:
            assert again.publish(stepped(history[-1], 9), step=9).version == 6
        assert read_checkpoint(tmp_path / "follower") == content_of(stepped(history[-1], 9))
        assert_whole(clock)

    def test_not_from_a_follower_of_some_tensors(
        self, clock: ClockStore, tmp_path: Path, history: list[Arrays]
    ) -> None:
        with Follower(stream_of(clock), tmp_path / "part", tensors=["layers.0.*"]) as follower:
            follower.catch_up()
        before = all_bytes(tmp_path / "part")
        with pytest.raises(ThinwireError):
            publisher(clock, tmp_path / "part")
        assert all_bytes(tmp_path / "part") == before

    def test_from_an_empty_folder(
        self, clock: ClockStore, tmp_path: Path, history: list[Arrays]
    ) -> None:
        with publisher(clock, tmp_path / "empty") as again:
            assert read_checkpoint(tmp_path / "empty") == content_of(history[-1])
            assert again.publish(stepped(history[-1], 9), step=9).version == 6
        assert_whole(clock)

    def test_not_from_another_stream(
        self, clock: ClockStore, tmp_path: Path, history: list[Arrays]
    ) -> None:
        other = ClockStore(open_store(f"memory://fencing-{next(_numbers)}", retry_s=0), 2e9)
        with publisher(other, tmp_path / "other") as one:
            one.publish(first_arrays(5), step=1)
        before = all_bytes(tmp_path / "other")
        with pytest.raises(LineageChanged):
            publisher(clock, tmp_path / "other")
        assert all_bytes(tmp_path / "other") == before

    def test_not_over_a_set_back_bucket(self, clock: ClockStore, tmp_path: Path) -> None:
        """A baseline newer than the stream is not thrown away without a word."""
        arrays = first_arrays()
        with publisher(clock, tmp_path / "own") as own:
            own.publish(arrays, step=1)
            old = objects(clock)
            own.publish(stepped(arrays, 1), step=2)
        clock.delete([key for key in objects(clock) if key not in old])
        for key, data in old.items():
            clock.put(key, data)
        before = all_bytes(tmp_path / "own")
        with pytest.raises(LineageChanged):
            publisher(clock, tmp_path / "own")
        assert all_bytes(tmp_path / "own") == before
        # Told to begin anew, it does.
        with publisher(clock, tmp_path / "own", new_lineage=True) as again:
            assert again.publish(stepped(arrays, 2), step=2).version == 2
        assert_whole(clock)

    @pytest.mark.parametrize("is_open", [True, False])
    @pytest.mark.parametrize("harm", ["bit", "cut", "removed", "mark", "config", "hidden"])
    def test_a_baseline_that_someone_changed(
        self, clock: ClockStore, tmp_path: Path, history: list[Arrays], is_open: bool, harm: str
    ) -> None:
        """Proved, and fetched again or refused; nobody ever gets a delta from other weights."""
        folder = tmp_path / "own"
        new = stepped(history[-1], 9)
        opened = publisher(clock, folder) if is_open else None
        damage(folder, harm)
        try:
            opened = opened or publisher(clock, folder)
            version = opened.publish(new, step=9)
        except ThinwireError:
            assert len(manifests(clock)) == 5
        else:
            assert version.version == 6
            assert head_content(clock, tmp_path / "joiner")[1] == content_of(new)
            assert read_checkpoint(folder) == content_of(new)
        if opened is not None:
            opened.close()
        if harm != "mark":
            with publisher(clock, folder) as again:
                newer = stepped(new, 10)
                again.publish(newer, step=10)
                assert read_checkpoint(folder) == content_of(newer)
            assert head_content(clock, tmp_path / "joiner")[1] == content_of(newer)
        assert_whole(clock)

    @staticmethod
    def manifests_of(store: Store) -> list[bytes]:
        return [store.get(key, limit_bytes=1 << 20) for key in manifests(store)]


class TestLostAnswers:
    def test_of_the_commit(self, faults: FaultStore, tmp_path: Path) -> None:
        """A store that retries finds its own manifest there: published once, and said so."""
        arrays = first_arrays()
        store = Retrying(faults)
        with publisher(store, tmp_path / "own") as own:
            own.publish(arrays, step=0)
            for step in range(1, 6):
                arrays = stepped(arrays, step)
                faults.set_rates({"put_if_absent": Rates(fail_after=1.0)})
                store.mends_after = 2
                version = own.publish(arrays, step=step)
                assert version.version == step + 1
                assert own.head == version
        assert len(manifests(faults)) == 6
        assert head_content(faults, tmp_path / "joiner")[1] == content_of(arrays)
        assert_whole(faults)

    @pytest.mark.parametrize("landed", [True, False])
    @pytest.mark.parametrize("is_same", [True, False])
    @pytest.mark.parametrize("is_first", [True, False])
    def test_publish_goes_on_after_unavailable(
        self, faults: FaultStore, tmp_path: Path, landed: bool, is_same: bool, is_first: bool
    ) -> None:
        arrays = first_arrays()
        own = publisher(faults, tmp_path / "own")
        if not is_first:
            own.publish(arrays, step=0)
        head = own.head
        count = len(manifests(faults))
        rates = Rates(fail_after=1.0) if landed else Rates(fail_before=1.0)
        faults.set_rates({"put_if_absent": rates})
        lost = stepped(arrays, 1)
        before = all_bytes(tmp_path / "own")
        with pytest.raises(Unavailable):
            own.publish(lost, step=1)
        assert own.head == head
        assert all_bytes(tmp_path / "own") == before
        assert len(manifests(faults)) == count + landed
        faults.set_rates(NO_FAULTS)
        new = lost if is_same else stepped(arrays, 2)
        version = own.publish(new, step=1 if is_same else 2)
        assert version.version == count + 1 + (landed and not is_same)
        assert version.step == (1 if is_same else 2)
        assert len(manifests(faults)) == version.version
        newer = stepped(new, 3)
        assert own.publish(newer, step=3).version == version.version + 1
        own.close()
        for number, content in ((version.version, new), (version.version + 1, newer)):
            with Follower(stream_of(faults), tmp_path / "each", lease=False) as follower:
                follower.catch_up(number, reset=True)
            assert read_checkpoint(tmp_path / "each") == content_of(content)
        assert_whole(faults)

    def test_unavailable_again_and_again(self, faults: FaultStore, tmp_path: Path) -> None:
        arrays = first_arrays()
        own = publisher(faults, tmp_path / "own")
        own.publish(arrays, step=0)
        steps = [0]
        for step in range(1, 12):
            rates = Rates(fail_after=1.0) if step % 2 else Rates(fail_before=1.0)
            faults.set_rates({"put_if_absent": rates})
            with pytest.raises(Unavailable):
                own.publish(stepped(arrays, step), step=step)
            # What landed stays; what did not leaves no hole.
            faults.set_rates({})
            steps = self.steps_of(faults)
            assert len(steps) == len(set(steps))
        own.publish(stepped(arrays, 99), step=99)
        own.close()
        steps = self.steps_of(faults)
        assert steps[0] == 0
        assert steps[-1] == 99
        assert steps == sorted(set(steps))
        assert len(steps) > 2
        assert_whole(faults)

    def test_the_orphans_of_one_that_goes_on_are_collected(
        self, clock: ClockStore, faults: FaultStore, tmp_path: Path
    ) -> None:
        """They lie beside the shards of the version that took their place, of the same session."""
        arrays = first_arrays()
        with publisher(faults, tmp_path / "own") as own:
            own.publish(arrays, step=0)
            faults.set_rates({"put_if_absent": Rates(fail_before=1.0)})
            for step in range(1, 4):
                with pytest.raises(Unavailable):
                    own.publish(stepped(arrays, step), step=step)
            faults.set_rates(NO_FAULTS)
            own.publish(stepped(arrays, 4), step=4)
        assert len([key for key in objects(clock) if "/deltas/" in key]) == 4
        tidy(clock, tmp_path)
        assert len([key for key in objects(clock) if "/deltas/" in key]) == 1
        assert_whole(clock)

    @pytest.mark.parametrize("operation", ["put", "put_file", "put_if_absent"])
    @pytest.mark.parametrize("is_lost", [True, False])
    def test_of_every_write(
        self, faults: FaultStore, tmp_path: Path, operation: str, is_lost: bool
    ) -> None:
        arrays = first_arrays()
        own = publisher(faults, tmp_path / "own")
        own.publish(arrays, step=0)
        faults.set_rates({operation: Rates(fail_after=is_lost, fail_before=not is_lost)})
        try:
            own.publish(stepped(arrays, 1), step=1)
        except Unavailable:
            assert operation != "put", "the hint is not worth failing"
        faults.set_rates(NO_FAULTS)
        own.publish(stepped(arrays, 2), step=2)
        own.close()
        steps = self.steps_of(faults)
        assert steps in ([0, 2], [0, 1, 2])
        assert_whole(faults)

    def test_a_publish_by_a_rival_after_a_lost_answer(
        self, faults: FaultStore, tmp_path: Path
    ) -> None:
        """What landed was built upon: it counts, and its publisher is not told that it failed."""
        arrays = first_arrays()
        own = publisher(faults, tmp_path / "own")
        own.publish(arrays, step=0)
        faults.set_rates({"put_if_absent": Rates(fail_after=1.0)})
        with pytest.raises(Unavailable):
            own.publish(stepped(arrays, 1), step=1)
        faults.set_rates(NO_FAULTS)
        with publisher(faults, tmp_path / "rival") as rival:
            rival.publish(stepped(arrays, 2), step=2)
        with pytest.raises(CommitConflict):
            own.publish(stepped(arrays, 3), step=3)
        own.close()
        assert self.steps_of(faults) == [0, 1, 2]
        assert_whole(faults)

    @staticmethod
    def steps_of(store: Store) -> list[int]:
        return [json.loads(store.get(k, limit_bytes=1 << 20))["step"] for k in manifests(store)]


class TestNewLineage:
    @pytest.mark.parametrize("death", ["put_file", "put_if_absent"])
    @pytest.mark.parametrize("is_lost", [True, False])
    def test_a_crash_between_the_end_and_the_first_version(
        self, faults: FaultStore, tmp_path: Path, death: str, is_lost: bool
    ) -> None:
        arrays = first_arrays()
        with publisher(faults, tmp_path / "old") as old:
            old.publish(arrays, step=0)
            old.publish(stepped(arrays, 1), step=1)
        follower = Follower(stream_of(faults), tmp_path / "f", accept_new_lineages=True)
        follower.catch_up()
        begun = publisher(faults, tmp_path / "new", new_lineage=True)
        wants = 2 if death == "put_if_absent" else 1
        faults.hook = nth_fails(faults, death, wants, is_lost=is_lost)
        with pytest.raises(Unavailable):
            begun.publish(stepped(arrays, 2), step=2)
        faults.hook = lambda when, operation, key: None
        faults.set_rates(NO_FAULTS)
        begun.close()
        has_landed = death == "put_if_absent" and is_lost
        assert len(manifests(faults)) == 3 + has_landed
        # Followers stay where they are; joiners get the last version that there is.
        assert follower.catch_up().version == 2 + has_landed
        version, content = head_content(faults, tmp_path / "joiner")
        assert version.version == 2 + has_landed
        assert content == content_of(stepped(arrays, 1 + has_landed))
        if not has_landed:
            for folder in ("old", "other"):
                with pytest.raises(LineageChanged, match="new_lineage"):
                    publisher(faults, tmp_path / folder)
        with publisher(faults, tmp_path / "newer", new_lineage=not has_landed) as again:
            found = again.publish(stepped(arrays, 3), step=3)
            assert found.version == 3 + has_landed
        assert follower.catch_up() == found
        assert read_checkpoint(tmp_path / "f") == content_of(stepped(arrays, 3))
        follower.close()
        assert_whole(faults)
        lineages = {key.partition("/")[0] for key in manifests(faults)}
        assert len(lineages) == 2

    @pytest.mark.parametrize("is_lost", [True, False])
    def test_the_end_itself_was_not_answered(
        self, faults: FaultStore, tmp_path: Path, is_lost: bool
    ) -> None:
        arrays = first_arrays()
        with publisher(faults, tmp_path / "old") as old:
            old.publish(arrays, step=0)
        begun = publisher(faults, tmp_path / "new", new_lineage=True)
        faults.set_rates({"put_if_absent": Rates(fail_after=is_lost, fail_before=not is_lost)})
        with pytest.raises(Unavailable):
            begun.publish(stepped(arrays, 1), step=1)
        faults.set_rates(NO_FAULTS)
        assert begun.publish(stepped(arrays, 2), step=2).version == 2
        assert begun.publish(stepped(arrays, 3), step=3).version == 3
        begun.close()
        assert head_content(faults, tmp_path / "joiner")[1] == content_of(stepped(arrays, 3))
        assert_whole(faults)

    def test_a_new_lineage_of_nothing(self, clock: ClockStore, tmp_path: Path) -> None:
        arrays = first_arrays()
        with publisher(clock, tmp_path / "own", new_lineage=True) as own:
            assert own.publish(arrays, step=0).version == 1
            assert own.publish(stepped(arrays, 1), step=1).version == 2
        assert len({key.partition("/")[0] for key in manifests(clock)}) == 1
        assert_whole(clock)

    def test_a_publish_while_the_lineage_is_ended(self, faults: FaultStore, tmp_path: Path) -> None:
        """The old trainer was just faster: the new lineage follows its version."""
        arrays = first_arrays()
        old = publisher(faults, tmp_path / "old")
        old.publish(arrays, step=0)
        new = publisher(faults, tmp_path / "new", new_lineage=True)
        faults.hook = once_at("put_if_absent", lambda: old.publish(stepped(arrays, 1), step=1))
        assert new.publish(stepped(arrays, 2), step=2).version == 3
        with pytest.raises(Fenced):
            old.publish(stepped(arrays, 3), step=3)
        with Follower(stream_of(faults), tmp_path / "f") as follower:
            follower.catch_up(2)
            assert read_checkpoint(tmp_path / "f") == content_of(stepped(arrays, 1))
            with pytest.raises(LineageChanged):
                follower.catch_up()
            assert read_checkpoint(tmp_path / "f") == content_of(stepped(arrays, 1))
        old.close()
        new.close()
        assert_whole(faults)


class TestPruning:
    @pytest.mark.parametrize("has_lease", [False, True])
    @pytest.mark.parametrize("is_behind", [False, True])
    def test_what_was_dropped_stays_for_those_who_are_fetching_it(
        self,
        clock: ClockStore,
        faults: FaultStore,
        tmp_path: Path,
        is_behind: bool,
        has_lease: bool,
    ) -> None:
        """At every moment of a fetch everything that it uses is dropped, and it misses nothing."""
        policy = Policy(
            merge_levels=(2,), anchor_every=2, keep_versions=1, keep_age_s=0, grace_s=100
        )
        arrays = first_arrays()
        steps = itertools.count(1)
        own = Publisher(open_stream(clock, policy=policy), tmp_path / "own", maintain=False)
        work = Maintainer(open_stream(clock), tmp_path / "work")

        def go_on(count: int, *, is_tidied: bool) -> None:
            nonlocal arrays
            for _ in range(count):
                arrays = stepped(arrays, next(steps))
                own.publish(arrays, step=1)
                clock.now_s += 1
                if is_tidied:
                    work.run_once()

        go_on(3, is_tidied=True)
        dropped = 0
        for at in range(1, 16):
            sink = tmp_path / f"sink-{at}"
            if is_behind:
                with Follower(open_stream(clock), sink, lease=False) as follower:
                    follower.catch_up()
                go_on(1, is_tidied=False)
            clock.now_s += 4000
            refused = Refusals()
            left = [at]

            def hook(when: str, operation: str, key: str, left: list[int] = left) -> None:
                if when == "before":
                    left[0] -= 1
                    if left[0] == 0:
                        go_on(2, is_tidied=True)

            faults.hook = hook
            before = set(objects(clock))
            with Follower(open_stream(faults), sink, observer=refused, lease=has_lease) as follower:
                # What a joiner wants may be dropped before it knows where that lies: then it looks
                # for the newest version once more, by itself.
                follower.catch_up()
                assert not (is_behind and refused.events), refused.events
                faults.hook = lambda when, operation, key: None
                assert follower.catch_up() == own.head
            assert read_checkpoint(sink) == content_of(arrays)
            clock.now_s += 4000
            work.run_once()
            dropped += len(before - set(objects(clock)))
        assert dropped > 15
        own.close()
        work.close()
        report = fsck(open_stream(clock), deep=True)
        assert report.is_whole, report.problems

    @pytest.mark.parametrize("operation", ["get", "list"])
    @pytest.mark.parametrize("counts", [[4], [3, 5], [5, 2]], ids=str)
    def test_one_short_answer_removes_nothing_that_is_needed(
        self, tmp_path: Path, operation: str, counts: list[int]
    ) -> None:
        """Every read of a round in turn gives half of what is there, for once."""
        store = DictStore()
        policy = Policy(merge_levels=(2, 4), keep_versions=2, keep_age_s=0, grace_s=0)
        arrays = first_arrays()
        for number, count in enumerate(counts):
            with Publisher(
                open_stream(store, policy=policy),
                tmp_path / "own",
                maintain=False,
                new_lineage=number > 0,
            ) as own:
                for step in range(count):
                    arrays = stepped(arrays, step)
                    own.publish(arrays, step=step)
                    if step == count - 2:
                        with Maintainer(open_stream(store), tmp_path / "work") as work:
                            work.run_once()
        for at in range(1, 100):
            hurt = ShortOnce(store.objects, operation, at)
            with suppress(ThinwireError), Maintainer(open_stream(hurt), tmp_path / f"{at}") as work:
                work.run_once()
            if not hurt.is_done:
                break
            # What is old by now was written in that round.
            mended = DictStore(hurt.objects)
            with Maintainer(open_stream(mended), tmp_path / f"{at}") as work:
                work.run_once()
            shutil.rmtree(tmp_path / f"{at}", ignore_errors=True)
            for objects_then in (hurt.objects, mended.objects):
                with Follower(
                    open_stream(DictStore(objects_then)), tmp_path / "f", lease=False
                ) as follower:
                    assert follower.catch_up().version == sum(counts), f"after {at}"
                assert read_checkpoint(tmp_path / "f") == content_of(arrays)
                shutil.rmtree(tmp_path / "f")
            # Weights are rebuilt, too, where that takes no longer than all the rest.
            report = fsck(open_stream(DictStore(mended.objects)), deep=len(counts) == 1)
            assert report.is_whole, f"after {at}: {report.problems}"
        assert at > 5


class ShortOnce(DictStore):
    """One answer, the ``at``-th, is short."""

    def __init__(self, objects: Mapping[str, bytes], operation: str, at: int) -> None:
        super().__init__(objects)
        self._operation = operation
        self._left = at

    @property
    def is_done(self) -> bool:
        return self._left <= 0

    def _is_due(self, operation: str) -> bool:
        if operation == self._operation:
            self._left -= 1
            return self._left == 0
        return False

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        data = super().get(key, limit_bytes=limit_bytes)
        return data[: len(data) // 2] if self._is_due("get") else data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        data = super().get_range(key, start, stop)
        if self._is_due("get"):
            raise Truncated(f"{key}: a short answer")
        return data

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        entries = [*super().list(prefix, after=after)]
        yield from entries[1::2] if self._is_due("list") else entries


class Refusals:
    def __init__(self) -> None:
        self.events: list[Refused] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Refused):
            self.events.append(event)


class Retrying(StoreWrapper):
    """Retries a write at once, as ``RetryingStore`` does after a while, until the faults pass."""

    def __init__(self, faults: FaultStore) -> None:
        super().__init__(faults)
        self._faults = faults
        self.mends_after = 0

    def put_if_absent(self, key: str, data: bytes) -> None:
        while True:
            try:
                return super().put_if_absent(key, data)
            except Unavailable:
                self.mends_after -= 1
                if self.mends_after <= 0:
                    self._faults.set_rates(NO_FAULTS)


def race(actions: list[Callable[[], Version]]) -> list[Version | ThinwireError]:
    """Run all at once, each in its own thread."""
    barrier = threading.Barrier(len(actions))
    results: dict[int, Version | ThinwireError] = {}

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = actions[number]()
        except ThinwireError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(actions))]


def once_at(operation: str, act: Callable[[], object]) -> Callable[[str, str, str], None]:
    """A hook that acts once, before the first such operation."""
    left = [act]

    def hook(when: str, found: str, key: str) -> None:
        if when == "before" and found == operation and left:
            left.pop()()

    return hook


def nth_fails(
    faults: FaultStore, operation: str, count: int, *, is_lost: bool
) -> Callable[[str, str, str], None]:
    """A hook that makes the n-th such operation, and all after it, fail."""
    left = [count]

    def hook(when: str, found: str, key: str) -> None:
        if when == "before" and found == operation:
            left[0] -= 1
            if left[0] == 0:
                faults.set_rates({operation: Rates(fail_after=is_lost, fail_before=not is_lost)})

    return hook


def tidy(clock: ClockStore, tmp_path: Path) -> None:
    with Maintainer(stream_of(clock), tmp_path / "work") as maintainer:
        for _ in range(2):
            clock.now_s += 20
            maintainer.run_once()


def damage(folder: Path, harm: str) -> None:
    weights = folder / "model.safetensors"
    if harm == "bit":
        data = bytearray(weights.read_bytes())
        data[-5] ^= 16
        weights.write_bytes(data)
    elif harm == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif harm == "removed":
        weights.unlink()
    elif harm == "mark":
        (folder / ".thinwire-mark").write_bytes(b"{}")
    else:
        name = "config.json" if harm == "config" else ".gitattributes"
        (folder / name).write_bytes(b"{}")
