"""A mirror keeps another system's chain at the newest version, whatever interrupts it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.interop.chains import publish, read_tensors
from tests.interop.mirror_lab import RECORD, Died, Lab, copy_of, restore, shown

from thinwire.errors import (
    AlreadyExists,
    BaseUnusable,
    Corrupt,
    InvalidArgument,
    NotFound,
    ThinwireError,
    Unavailable,
)
from thinwire.follow import open_stream
from thinwire.maintain import Maintainer, set_policy
from thinwire.publish import Publisher
from thinwire.store import open_store
from thinwire.stream.records import Policy
from thinwire.testing.faults import FaultStore, Rates


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


@pytest.mark.parametrize("is_first", [True, False])
def test_killed_at_every_call_of_the_store(lab: Lab, is_first: bool) -> None:
    """Wherever it dies, the next run ends with the very bytes of one that never did."""
    lab.publish(1)
    if not is_first:
        lab.catch_up()
        lab.publish(1)
    start = copy_of(lab.chain)
    copy = copy_of(lab.root / "copy")
    calls: list[str] = []
    counting = FaultStore(
        open_store(str(lab.chain)), random.Random(1), hook=lambda *call: calls.append(call[1])
    )
    lab.catch_up(store=counting)
    wanted = lab.files()
    assert len(calls) > 5
    for death in range(len(calls)):
        restore(lab.chain, start)
        restore(lab.root / "copy", copy)
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
    old = copy_of(lab.root / "copy")
    for _ in range(2):
        lab.publish(1)
        lab.catch_up(format=format)
    before = lab.files()
    restore(lab.root / "copy", old)
    assert lab.catch_up(format=format) == []
    assert lab.files() == before
    lab.publish(1)
    told = lab.catch_up(format=format)
    assert told[-1][1].version == 5
    assert read_tensors(lab.root / "copy") == read_tensors(lab.versions[4])


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
    start, copy = copy_of(lab.chain), copy_of(lab.root / "copy")
    calls: list[str] = []
    counting = FaultStore(
        open_store(str(lab.chain)), random.Random(1), hook=lambda *call: calls.append(call[1])
    )
    lab.catch_up(store=counting, full_every=1, keep_full=1)
    assert "delete" in calls
    wanted = lab.names()
    for death in range(len(calls)):
        restore(lab.chain, start)
        restore(lab.root / "copy", copy)
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
