"""Of several mirrors at one destination one goes on, and nothing that it said there is lost."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from tests.interop.mirror_lab import RECORD, Lab, copy_of, restore, shown
from tests.interop.schedules import Yield, explore

from thinwire.checkpoint import Checkpoint
from thinwire.errors import AlreadyExists, Fenced, LimitExceeded, Unavailable, UnsafeStore
from thinwire.interop import held_record, uploading
from thinwire.interop.destination import Destination
from thinwire.interop.formats import format_named
from thinwire.interop.held_record import HeldRecord
from thinwire.interop.mirror_record import MAX_NUMBER, record_key
from thinwire.store import Store, open_store
from thinwire.store.wrappers import StoreWrapper
from thinwire.testing.faults import FaultStore, Rates


def test_a_second_mirror_takes_over_and_the_first_stops(lab: Lab) -> None:
    lab.publish(1)
    with lab.mirror() as first:
        list(first.catch_up())
        lab.publish(1)
        with lab.mirror(copy="copy-2") as second:
            # It begins where the destination is.
            told = list(second.catch_up())
            assert told[-1][1].version == 2
            lab.publish(1)
            with pytest.raises(Fenced, match="another one began to write"):
                list(first.catch_up())
            list(second.catch_up())
    assert lab.states() == lab.wanted(1, 2, 3)


@pytest.mark.parametrize("is_first", [True, False])
def test_two_that_meet_anywhere_do_not_both_write_a_version(lab: Lab, is_first: bool) -> None:
    """Another one begins and ends at each call of the store: whatever it finds, one goes on.

    What was committed, but is not yet named by the record, it removes and writes again: it cannot
    tell it from what a killed one left.
    """
    lab.publish(1)
    if not is_first:
        lab.catch_up()
        lab.publish(1)
    start, copy = copy_of(lab.chain), copy_of(lab.root / "copy")
    calls: list[tuple[str, ...]] = []
    counting = FaultStore(
        open_store(str(lab.chain)), random.Random(1), hook=lambda *call: calls.append(call)
    )
    lab.catch_up(store=counting)
    wanted = lab.files()
    index = f"weight_v{1 if is_first else 2:06d}/model.safetensors.index.json"
    commit = calls.index(("after", "put_if_absent", index))
    made: list[str] = []

    def note(when: str, operation: str, key: str) -> None:
        if (when, operation, key) == ("after", "put_if_absent", index):
            made.append(key)

    stopped_count = 0
    for meeting in range(len(calls)):
        restore(lab.chain, start)
        restore(lab.root / "copy", copy)
        restore(lab.root / "copy-2", copy)
        made.clear()
        left = [meeting]

        def meet(when: str, operation: str, key: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                other = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=note)
                lab.catch_up(store=other, copy="copy-2")
            note(when, operation, key)

        met = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=meet)
        try:
            lab.catch_up(store=met)
        except Fenced:
            stopped_count += 1
        assert len(made) == 1 + (meeting in (commit, commit + 1)), f"met at {calls[meeting]}"
        lab.catch_up()
        assert lab.files() == wanted, f"met at {calls[meeting]}"
    assert stopped_count > 5


def test_two_that_begin_at_once(lab: Lab) -> None:
    """Both have looked before either wrote: one of them is the holder, the other one stops."""
    lab.publish(2)
    with lab.mirror() as first, lab.mirror(copy="copy-2") as second:
        assert first.sink.destination.newest is second.sink.destination.newest is None
        assert shown(list(second.catch_up())) == [(2, None)]
        before = lab.files()
        with pytest.raises(Fenced, match="another one began to write"):
            list(first.catch_up())
        assert lab.files() == before


def test_the_lost_answer_of_a_claim_is_no_other_one(lab: Lab) -> None:
    """The record was made, and the store says that it is not known: the same one goes on."""
    lab.publish(1)
    lost = FaultStore(
        open_store(str(lab.chain)),
        random.Random(1),
        rates={"put_if_absent": Rates(fail_after=1)},
    )
    with lab.mirror(store=lost) as mirror:
        with pytest.raises(Unavailable):
            list(mirror.catch_up())
        lost.set_rates({})
        assert shown(list(mirror.catch_up())) == [(1, None)]
    assert lab.states() == lab.wanted(1)


def test_a_lost_answer_of_any_record_is_as_if_it_had_died(lab: Lab) -> None:
    """The same mirror goes on, from what is there."""
    lab.publish(1)
    lab.catch_up()
    lab.publish(1)
    start, copy = copy_of(lab.chain), copy_of(lab.root / "copy")
    lab.catch_up()
    wanted = lab.files()
    for lost in range(3):
        restore(lab.chain, start)
        restore(lab.root / "copy", copy)
        left = [lost]

        def lose(when: str, operation: str, key: str, left: list[int] = left) -> None:
            if (when, operation) == ("after", "put_if_absent") and key.startswith(RECORD):
                left[0] -= 1
                if left[0] == -1:
                    raise Unavailable("nobody knows")

        flaky = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=lose)
        with lab.mirror(store=flaky) as mirror:
            with pytest.raises(Unavailable):
                list(mirror.catch_up())
            list(mirror.catch_up())
        assert left[0] < 0
        assert lab.files() == wanted, lost


@pytest.mark.parametrize("is_own", [True, False])
def test_a_commit_that_is_there_already(lab: Lab, is_own: bool) -> None:
    """Its own, of an attempt whose answer was lost, is good; another one's is not replaced."""
    lab.publish(1)
    lab.catch_up()
    index = lab.chain / "weight_v000001" / "model.safetensors.index.json"
    data = index.read_bytes() if is_own else b"theirs"
    shutil.rmtree(lab.chain)
    shutil.rmtree(lab.root / "copy")

    def come_late(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("before", "put_if_absent") and key.endswith(index.name):
            index.write_bytes(data)

    met = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=come_late)
    if is_own:
        lab.catch_up(store=met)
    else:
        with pytest.raises(AlreadyExists):
            lab.catch_up(store=met)
        assert index.read_bytes() == data
        # The holder writes it again: what lies there is under the name that its record has.
        lab.catch_up()
    assert lab.states() == lab.wanted(1)


@pytest.mark.parametrize("format", ["slime", "fireworks", "trl", "hf"])
def test_a_holder_that_goes_on_while_another_one_begins(lab: Lab, format: str) -> None:
    """One that writes for long, between any two calls of one that begins: nothing is lost."""
    lab.publish(1)
    with lab.mirror(format) as first:
        list(first.catch_up())
        lab.publish(1)
        written: list[tuple[int, int | None]] = []

        def go_on(when: str, operation: str, key: str) -> None:
            if (when, operation) == ("before", "put_if_absent") and not written:
                lab.publish(1)
                written.extend(shown(list(first.catch_up())))

        met = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=go_on)
        with pytest.raises(Fenced):
            lab.catch_up(format=format, store=met, copy="copy-2")
        assert written[-1][0] == 3
        lab.publish(1)
        list(first.catch_up())
    assert [row["version"] for row in lab.record()["versions"]] == [1, *dict(written), 4]
    assert lab.catch_up(format=format, copy="copy-2") == []


def test_every_order_of_two_that_write_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was told that its words are in the record finds them there, also where numbers are
    free again because old records went."""
    monkeypatch.setattr(held_record, "_KEPT", 1)
    format, numbers = format_named("slime"), count()
    fenced_count = 0

    def begin() -> tuple[list[Callable[[Yield], list[str]]], Callable[[list[list[str]]], None]]:
        store = open_store(f"memory://records-{next(numbers)}")
        holder = HeldRecord(store, format, "stream")
        holder.save()

        def go_on(turn: Yield) -> list[str]:
            holder._store = _yielding(store, turn)
            return _say(holder, ["a1", "a2", "a3"])

        def start(turn: Yield) -> list[str]:
            try:
                return _say(HeldRecord(_yielding(store, turn), format, "stream"), ["b1"])
            except Fenced:
                return []

        def check(said: list[list[str]]) -> None:
            nonlocal fenced_count
            fenced_count += said != [["a1", "a2", "a3"], ["b1"]]
            # Of two at least one goes on to its end.
            assert said[0] == ["a1", "a2", "a3"] or said[1] == ["b1"]
            found = HeldRecord(store, format, "stream").record.announced
            # What was written just before another one went on from it may be there too.
            assert set(found) >= {*said[0], *said[1]}

        return [go_on, start], check

    assert explore(begin) > 500
    assert fenced_count > 100


def _say(held: HeldRecord, words: list[str]) -> list[str]:
    """Add words to a record, one by one; those that were taken."""
    said: list[str] = []
    for word in words:
        try:
            held.save(announced=[*held.record.announced, word])
        except Fenced:
            break
        said.append(word)
    return said


def _yielding(store: Store, turn: Yield) -> Store:
    def hook(when: str, operation: str, key: str) -> None:
        if when == "before":
            turn()

    return FaultStore(store, random.Random(1), hook=hook)


def test_orders_of_two_that_write_versions(
    mirrored_versions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every order with at most two changes from one to the other before it ends."""
    monkeypatch.setattr(uploading, "_UPLOADS", 1)
    # As few calls as a version can have.
    small = tmp_path / "small"
    small.mkdir()
    shutil.copy(next(mirrored_versions[0].glob("*.safetensors")), small / "model.safetensors")
    checkpoint = Checkpoint.open(small)
    format, numbers = format_named("hf"), count()
    lock = threading.Lock()

    def opened(store: Store) -> Destination:
        with lock:
            work = tmp_path / str(next(numbers))
        return Destination(store, format, "stream", keep_full=0, work_dir=work)

    def begin() -> tuple[list[Callable[[Yield], list[int]]], Callable[[list[list[int]]], None]]:
        store = open_store(f"memory://versions-{next(numbers)}")
        holder = opened(store)
        holder.write_full(checkpoint, version=1, source="1")

        def write(held: Destination, last: int) -> list[int]:
            written = []
            while (version := held.newest.version + 1 if held.newest else 1) <= last:
                try:
                    held.write_full(checkpoint, version=version, source=str(version))
                except Fenced:
                    break
                written.append(version)
            return written

        def go_on(turn: Yield) -> list[int]:
            holder.store = holder._held._store = _yielding(store, turn)
            return write(holder, 2)

        def start(turn: Yield) -> list[int]:
            try:
                return write(opened(_yielding(store, turn)), 2)
            except Fenced:
                return []

        def check(written: list[list[int]]) -> None:
            again = opened(store)
            rows = {row.version: row for row in again.record.versions}
            assert rows.keys() >= {1, *written[0], *written[1]}
            assert 2 in rows
            again.check_pointer()
            assert write(again, 4)[-1] == 4
            named = {key for row in again.record.versions for key in row.keys}
            there = {entry.key for entry in store.list("")}
            assert {key for key in there if not key.startswith("thinwire-mirror/")} == named
            assert store.get("latest", limit_bytes=100) == b"version_000004\n"

        return [go_on, start], check

    assert explore(begin, max_changes=2) > 150


def test_a_store_that_lets_two_win_is_refused(lab: Lab) -> None:
    class Careless(StoreWrapper):
        def put_if_absent(self, key: str, data: bytes) -> None:
            self._store.put(key, data)

    lab.publish(1)
    for _ in range(2):
        with pytest.raises(UnsafeStore):
            lab.catch_up(store=Careless(open_store(str(lab.chain))))
        assert lab.names() == [RECORD]
    assert shown(lab.catch_up()) == [(1, None)]


def test_no_number_after_the_last(tmp_path: Path) -> None:
    """Whoever wrote that: no record is made that nobody would find."""
    store = open_store(str(tmp_path))
    held = HeldRecord(store, format_named("slime"), "stream")
    held.save()
    store.put(record_key(MAX_NUMBER), store.get(record_key(1), limit_bytes=1000))
    with pytest.raises(LimitExceeded):
        HeldRecord(store, format_named("slime"), "stream").hold()
