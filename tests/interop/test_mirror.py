"""A mirror keeps another system's chain at the newest version, whatever interrupts it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.interop.chains import publish, read_tensors, write_versions

from thinwire.errors import (
    AlreadyExists,
    BaseUnusable,
    Corrupt,
    Fenced,
    InvalidArgument,
    NotFound,
    ThinwireError,
    Unavailable,
)
from thinwire.follow import open_stream
from thinwire.interop.formats import format_named
from thinwire.interop.mirror import Mirror
from thinwire.interop.mirror_record import RECORDS, MirroredVersion
from thinwire.interop.mirror_sink import mirror_sink
from thinwire.maintain import Maintainer, set_policy
from thinwire.publish import Publisher
from thinwire.store import Store, open_store
from thinwire.stream.records import Policy
from thinwire.stream.version import Version
from thinwire.testing.faults import FaultStore, Rates

from .test_convert import replayed

Told = list[tuple[Version, MirroredVersion]]

RECORD = RECORDS.rstrip("/")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_versions(tmp_path_factory.mktemp("versions"), 7)


class Lab:
    """A stream of the first versions, and mirrors of it."""

    def __init__(self, root: Path, versions: list[Path]) -> None:
        self.root = root
        self.versions = versions
        self.chain = root / "chain"
        self.count = 0
        self._replays = 0

    def publish(self, count: int = 1) -> None:
        publish(
            self.root / "stream",
            self.root / "state",
            self.versions[self.count : self.count + count],
            first_step=self.count + 1,
        )
        self.count += count

    def mirror(
        self,
        format: str = "slime",
        *,
        store: Store | None = None,
        copy: str = "copy",
        workers: int = 1,
        full_every: int | None = 0,
        keep_full: int = 0,
        accept_new_lineages: bool | None = None,
    ) -> Mirror:
        stream = open_stream(self.root / "stream")
        sink = mirror_sink(
            stream,
            self.root / copy,
            store or open_store(str(self.chain)),
            format_named(format),
            full_every=full_every,
            keep_full=keep_full,
            workers=workers,
        )
        return Mirror(stream, sink, accept_new_lineages=accept_new_lineages)

    def catch_up(self, **options: object) -> Told:
        with self.mirror(**options) as mirror:  # type: ignore[arg-type]
            return list(mirror.catch_up())

    def states(self) -> dict[int, dict[str, bytes]]:
        self._replays += 1
        return replayed(self.chain, None, self.root / f"work-{self._replays}")

    def wanted(self, *numbers: int) -> dict[int, dict[str, bytes]]:
        return {number: read_tensors(self.versions[number - 1]) for number in numbers}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.chain.iterdir() if path.name[0] != ".")

    def files(self) -> dict[str, bytes]:
        """Everything at the destination; who wrote it last does not count."""
        found = {
            str(path.relative_to(self.chain)): path.read_bytes()
            for path in sorted(self.chain.rglob("*"))
            if path.is_file()
        }
        if records := [name for name in found if name.startswith(RECORDS)]:
            # That of the last holder counts.
            record = json.loads([found.pop(name) for name in records][-1])
            found[RECORD] = json.dumps(record | {"holder": ""}).encode()
        return found

    def record(self) -> dict[str, Any]:
        """What the destination says of itself."""
        record: dict[str, Any] = json.loads(max((self.chain / RECORD).iterdir()).read_text())
        return record

    def write_record(self, record: dict[str, Any]) -> None:
        max((self.chain / RECORD).iterdir()).write_text(json.dumps(record))


@pytest.fixture
def lab(tmp_path: Path, versions: list[Path]) -> Lab:
    return Lab(tmp_path, versions)


def shown(told: Told) -> list[tuple[int, int | None]]:
    return [(written.version, written.base) for _, written in told]


@pytest.mark.parametrize("format", ["slime", "fireworks", "trl", "grail"])
def test_begins_with_the_newest_and_goes_on(lab: Lab, format: str) -> None:
    lab.publish(2)
    assert shown(lab.catch_up(format=format)) == [(2, None)]
    assert lab.catch_up(format=format) == []
    lab.publish(3)
    assert shown(lab.catch_up(format=format)) == [(3, 2), (4, 3), (5, 4)]
    assert lab.states() == lab.wanted(2, 3, 4, 5)


def test_plain_checkpoints(lab: Lab) -> None:
    lab.publish(2)
    lab.catch_up(format="hf", keep_full=2)
    lab.publish(2)
    # Version 3 was never the newest that a loader could have found.
    assert shown(lab.catch_up(format="hf", keep_full=2)) == [(4, None)]
    assert lab.names() == ["latest", RECORD, "version_000002", "version_000004"]
    assert read_tensors(lab.chain / "version_000004") == read_tensors(lab.versions[3])


def test_nothing_published_yet(lab: Lab) -> None:
    with pytest.raises(NotFound):
        lab.catch_up()


def test_full_versions_at_their_time_and_old_ones_go(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(full_every=2, keep_full=1)
    told = []
    for _ in range(6):
        lab.publish(1)
        told += lab.catch_up(full_every=2, keep_full=1)
    assert shown(told) == [(2, 1), (3, 2), (4, None), (5, 4), (6, 5), (7, None)]
    assert lab.names() == [RECORD, "weight_v000007"]
    assert lab.states() == lab.wanted(7)


def test_keeps_what_the_oldest_kept_full_version_needs(lab: Lab) -> None:
    lab.publish(1)
    for _ in range(7):
        lab.catch_up(full_every=2, keep_full=2)
        lab.publish(lab.count < 7)
    assert lab.states() == lab.wanted(4, 5, 6, 7)


def test_far_behind_it_goes_to_the_newest(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(full_every=2)
    lab.publish(2)
    assert shown(lab.catch_up(full_every=2)) == [(2, 1), (3, 2)]
    lab.publish(4)
    assert shown(lab.catch_up(full_every=2)) == [(7, None)]
    assert lab.states() == lab.wanted(1, 2, 3, 7)


def test_what_the_format_cannot_carry_travels_in_full(lab: Lab, tmp_path: Path) -> None:
    lab.publish(1)
    lab.catch_up()
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in lab.versions[1].iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    (changed / "config.json").write_text('{"model_type": "other"}')
    publish(tmp_path / "stream", tmp_path / "state", [changed])
    assert shown(lab.catch_up()) == [(2, None)]
    made = lab.chain / "weight_v000002"
    assert (made / "config.json").read_text() == '{"model_type": "other"}'
    assert read_tensors(made) == read_tensors(changed)


def test_new_lineage_begins_with_full_weights(lab: Lab) -> None:
    lab.publish(2)
    lab.catch_up()
    with Publisher(
        lab.root / "stream", lab.root / "state-2", new_lineage=True, maintain=False
    ) as publisher:
        publisher.publish(lab.versions[4], step=1)
        publisher.publish(lab.versions[5], step=2)
    with pytest.raises(ThinwireError) as raised:
        lab.catch_up()
    assert raised.value.code == "lineage-changed"
    told = lab.catch_up(accept_new_lineages=True)
    last = told[-1][1]
    states = lab.states()
    assert states[last.version] == read_tensors(lab.versions[5])
    assert any(written.base is None for _, written in told)


def test_destination_of_another_stream(lab: Lab, tmp_path: Path) -> None:
    lab.publish(1)
    lab.catch_up()
    before = lab.files()
    other = Lab(tmp_path / "other", lab.versions)
    (tmp_path / "other").mkdir()
    other.chain = lab.chain
    other.publish(1)
    with pytest.raises(InvalidArgument, match="copy of another stream"):
        other.catch_up()
    assert lab.files() == before


def test_what_lay_there_before_is_not_replaced(lab: Lab) -> None:
    lab.publish(1)
    theirs = lab.chain / "weight_v000001" / "model.safetensors.index.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    for _ in range(2):
        with pytest.raises(AlreadyExists, match="does not name it"):
            lab.catch_up()
    assert theirs.read_text() == "theirs"


def test_malformed_record(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.write_record({"format": "slime"})
    with pytest.raises(ThinwireError, match="malformed"):
        lab.catch_up()


@pytest.mark.parametrize("format", ["slime", "fireworks", "trl"])
def test_any_number_of_threads_writes_the_same(lab: Lab, format: str) -> None:
    made = []
    for count in (1, 2):
        lab.publish(count)
        for workers in (1, 3):
            lab.chain = lab.root / f"chain-{workers}"
            lab.catch_up(format=format, copy=f"copy-{workers}", workers=workers)
            made.append(lab.files())
    assert made[0] == made[1]
    assert made[2] == made[3] != made[0]


class Died(BaseException):
    """Stands for the death of the process: nothing catches it."""


@pytest.mark.parametrize("is_first", [True, False])
def test_killed_at_every_call_of_the_store(lab: Lab, is_first: bool) -> None:
    """Wherever it dies, the next run ends with the very bytes of one that never did."""
    lab.publish(1)
    if not is_first:
        lab.catch_up()
        lab.publish(1)
    start = _copy_of(lab.chain)
    copy = _copy_of(lab.root / "copy")
    calls: list[str] = []
    counting = FaultStore(
        open_store(str(lab.chain)), random.Random(1), hook=lambda *call: calls.append(call[1])
    )
    lab.catch_up(store=counting)
    wanted = lab.files()
    assert len(calls) > 5
    for death in range(len(calls)):
        _restore(lab.chain, start)
        _restore(lab.root / "copy", copy)
        left = [death]

        def die(*_: str, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Died
            left[0] -= 1

        dying = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=die)
        with pytest.raises(Died):
            lab.catch_up(store=dying)
        lab.catch_up()
        assert lab.files() == wanted, f"died at call {death} ({calls[death]})"
    assert lab.states() == (lab.wanted(1) if is_first else lab.wanted(1, 2))


def _copy_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _restore(folder: Path, files: dict[str, bytes]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
        else:
            path.rmdir()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("seed", range(5))
def test_store_that_fails_now_and_then(lab: Lab, seed: int) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(3)
    flaky = FaultStore(
        open_store(str(lab.chain)),
        random.Random(seed),
        rates=Rates(fail_before=0.1, fail_after=0.1),
    )
    for _ in range(60):
        try:
            lab.catch_up(store=flaky)
        except Unavailable:
            continue
        break
    assert flaky.injected()
    states = lab.states()
    assert states[4] == read_tensors(lab.versions[3])
    assert all(state == read_tensors(lab.versions[n - 1]) for n, state in states.items())


def test_run_tells_passing_failures_and_stops(lab: Lab) -> None:
    told: list[tuple[int, int | None]] = []
    failures: list[ThinwireError] = []
    with lab.mirror() as mirror:

        def on_failure(error: ThinwireError) -> None:
            failures.append(error)
            lab.publish(2)

        for _, written in mirror.run(poll_s=0.01, on_failure=on_failure):
            told.append((written.version, written.base))
            if lab.count < 4:
                lab.publish(1)
            else:
                mirror.stop()
    assert [error.code for error in failures] == ["not-found"]
    assert told == [(2, None), (3, 2), (4, 3)]
    assert lab.states() == lab.wanted(2, 3, 4)


@pytest.mark.parametrize("format", ["slime", "hf", "trl"])
def test_an_older_folder_does_not_set_the_destination_back(lab: Lab, format: str) -> None:
    """A work folder from a backup, or of another machine: nothing is written twice."""
    lab.publish(2)
    lab.catch_up(format=format)
    old = _copy_of(lab.root / "copy")
    for _ in range(2):
        lab.publish(1)
        lab.catch_up(format=format)
    before = lab.files()
    _restore(lab.root / "copy", old)
    assert lab.catch_up(format=format) == []
    assert lab.files() == before
    lab.publish(1)
    told = lab.catch_up(format=format)
    assert told[-1][1].version == 5
    assert read_tensors(lab.root / "copy") == read_tensors(lab.versions[4])


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
    start, copy = _copy_of(lab.chain), _copy_of(lab.root / "copy")
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
        _restore(lab.chain, start)
        _restore(lab.root / "copy", copy)
        _restore(lab.root / "copy-2", copy)
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


@pytest.mark.parametrize("is_own", [True, False])
def test_a_commit_that_is_there_already(lab: Lab, is_own: bool) -> None:
    """Its own, of an attempt whose answer was lost, is good; another one's is not replaced."""
    lab.publish(1)
    lab.catch_up()
    index = lab.chain / "weight_v000001" / "model.safetensors.index.json"
    data = index.read_bytes() if is_own else b"theirs"
    shutil.rmtree(lab.chain)

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


def test_full_weights_are_proved_before_they_travel(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    path = next((lab.root / "copy").glob("model-00001*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    lab.chain = lab.root / "another"
    with pytest.raises(BaseUnusable, match="does not hold version 1"):
        lab.catch_up()
    assert not list(lab.chain.glob("weight_v*"))


def test_a_replaced_stream_is_noticed(lab: Lab, tmp_path: Path) -> None:
    lab.publish(2)
    lab.catch_up()
    before = lab.files()
    shutil.rmtree(lab.root / "stream")
    shutil.rmtree(lab.root / "state")
    publish(lab.root / "stream", lab.root / "state", lab.versions[3:5])
    with pytest.raises(ThinwireError) as raised:
        lab.catch_up()
    assert raised.value.code in ("lineage-changed", "invalid-argument")
    assert lab.files() == before


def test_behind_what_the_stream_keeps(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(4)
    stream = open_stream(lab.root / "stream")
    head = stream.tip().head
    assert head is not None
    # An anchor at the newest version, and the deltas before it gone.
    set_policy(stream, Policy(anchor_every=4))
    Maintainer(stream, lab.root / "maintain").run_once()
    anchored = stream.listed_anchors(head.lineage)
    for path in (lab.root / "stream").rglob("*.tw"):
        path.unlink()
    if not anchored:
        pytest.fail("the maintainer made no anchor")
    assert shown(lab.catch_up()) == [(max(anchored), None)]


def test_a_caller_that_died_is_told_again(lab: Lab) -> None:
    lab.publish(1)
    with lab.mirror() as mirror:
        for _, written in mirror.catch_up():
            assert written.version == 1
            break  # killed before it had done what it does then
    assert shown(lab.catch_up()) == [(1, None)]
    assert lab.catch_up() == []


@pytest.mark.parametrize(
    "change",
    [
        {"writing": "datasets"},
        {"writing": "../up"},
        {"versions": [["datasets/precious.bin"]]},
        {"versions": [["weight_v000001/../../x"]]},
    ],
)
def test_a_record_may_name_only_its_own(lab: Lab, change: dict[str, Any]) -> None:
    lab.publish(1)
    lab.catch_up()
    precious = lab.chain / "datasets" / "precious.bin"
    precious.parent.mkdir()
    precious.write_bytes(b"theirs")
    record = lab.record()
    if "versions" in change:
        record["versions"][0]["keys"] = change["versions"][0]
    else:
        record |= change
    lab.write_record(record)
    lab.publish(1)
    with pytest.raises(Corrupt, match="malformed"):
        lab.catch_up()
    assert precious.read_bytes() == b"theirs"


def test_a_folder_of_somebody_elses_is_left_alone(lab: Lab) -> None:
    lab.publish(1)
    theirs = lab.chain / "weight_v000001" / "model-00002-of-00002.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    for _ in range(2):
        with pytest.raises(AlreadyExists):
            lab.catch_up()
    assert theirs.read_text() == "theirs"


def test_destinations_that_cannot_be(lab: Lab) -> None:
    lab.publish(1)
    for place in ("stream", "copy", "copy/inside"):
        lab.chain = lab.root / place
        with pytest.raises(InvalidArgument, match="stream itself, or lies in the work folder"):
            lab.catch_up()


def test_what_is_deleted_is_named_until_it_is_gone(lab: Lab) -> None:
    """Killed while old versions are deleted, the next run deletes the rest."""
    lab.publish(1)
    lab.catch_up(full_every=1, keep_full=1)
    lab.publish(1)
    lab.catch_up(full_every=1, keep_full=1)
    lab.publish(1)
    start, copy = _copy_of(lab.chain), _copy_of(lab.root / "copy")
    calls: list[str] = []
    counting = FaultStore(
        open_store(str(lab.chain)), random.Random(1), hook=lambda *call: calls.append(call[1])
    )
    lab.catch_up(store=counting, full_every=1, keep_full=1)
    assert "delete" in calls
    wanted = lab.names()
    for death in range(len(calls)):
        _restore(lab.chain, start)
        _restore(lab.root / "copy", copy)
        left = [death]

        def die(*_: str, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Died
            left[0] -= 1

        dying = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=die)
        with pytest.raises(Died):
            lab.catch_up(store=dying, full_every=1, keep_full=1)
        lab.catch_up(full_every=1, keep_full=1)
        assert set(lab.names()) >= set(wanted)
        record = lab.record()
        there = {name for name in lab.names() if name != RECORD}
        assert {row["name"] for row in record["versions"]} == there, calls[death]
