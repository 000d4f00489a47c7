"""Merged deltas, anchors, pruning and collecting, beside others who do the same."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import HistoryPruned, NotFound, ThinwireError, Unavailable
from thinwire.follow import Follower, open_stream
from thinwire.maintain import Maintainer, fsck
from thinwire.maintain.merging import due_merges
from thinwire.stream import keys
from thinwire.stream.encoding import encode
from thinwire.stream.events import Maintained, Refused
from thinwire.stream.records import FORMAT, LEASE_TTL_S, Lease, Policy
from thinwire.stream.signing import SigningKey

from .making import (
    DAY_S,
    Arrays,
    DictStore,
    HookStore,
    Recorder,
    bits,
    held,
    history,
    joined,
    maintained,
    published,
    publisher,
    stepped,
    tiny,
)

GRACE_S = 100
# The oldest two versions may go at once, their objects after a while.
SHORT: dict[str, Any] = {"keep_versions": 2, "keep_age_s": 0, "grace_s": GRACE_S}


def sound(store: DictStore) -> None:
    report = fsck(open_stream(store), deep=True)
    assert report.problems == []


# Merged deltas and anchors


def test_merged_deltas_are_what_the_steps_are(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    """Every step delta gone: the merged ones alone lead to the same bits."""
    merges = [keys.versions_of(key.split("/")[-1][:-5]) for key in whole.find("/merges/")]
    assert sorted(merges) == sorted(due_merges(1, 10, 1, [2, 4], ()))
    for base, version in [(n, n + 1) for n in range(1, 10)]:
        whole.delete(whole.find(f"deltas/{base:012d}-{version:012d}/"))
    whole.delete(whole.find("anchors/000000000010"))
    for target in (3, 5, 7, 9):
        found = joined(whole, tmp_path / str(target), target)
        assert found == bits(versions[target - 1])


def test_nothing_is_made_twice(whole: DictStore, tmp_path: Path) -> None:
    before = dict(whole.objects)
    work = maintained(whole, tmp_path / "work")
    assert (work.merge_count, work.anchor_count, work.dropped_count) == (0, 0, 0)
    assert whole.objects == before
    assert not work.is_other


def test_merged_deltas_of_changing_folders(tmp_path: Path) -> None:
    """Small files and layouts that came and went in between."""
    from .making import small_files, write_folder

    store = DictStore()
    arrays = history(5, tiny())
    steps: list[dict[str, Any]] = [
        {"model": arrays[0], "config_json": b"0"},
        {"model": arrays[1], "config_json": b"1", "gone_txt": b"1"},
        {"model": arrays[2] | {"more": arrays[2]["w"]}, "config_json": b"1"},
        {"a": arrays[3], "config_json": b"1", "new_txt": b"3"},
        {"a": arrays[4], "config_json": b"0", "new_txt": b"4"},
    ]
    folders = [write_folder(tmp_path / str(n), **files) for n, files in enumerate(steps)]
    published(store, tmp_path / "baseline", folders, merge_levels=[2, 4])
    assert maintained(store, tmp_path / "work").merge_count == 3
    sound(store)
    for target in (3, 5):
        joined(store, tmp_path / f"joined-{target}", target)
        assert held(tmp_path / f"joined-{target}") == held(folders[target - 1])
        assert small_files(tmp_path / f"joined-{target}") == small_files(folders[target - 1])


def test_merging_goes_on_from_run_to_run(tmp_path: Path) -> None:
    """With its copies, and without them after a crash."""
    store = DictStore()
    versions = history(13, tiny())
    stream = open_stream(store, policy=Policy(merge_levels=[2, 4]))
    with publisher(stream, tmp_path / "baseline") as trainer:
        for number, arrays in enumerate(versions, 1):
            trainer.publish(arrays)
            if number % 3 == 0:
                maintained(store, tmp_path / "work")
            if number == 6:
                shutil.rmtree(tmp_path / "work")
    maintained(store, tmp_path / "work")
    assert len(store.find("/merges/")) == 6 + 3
    sound(store)


def test_damaged_copies_of_a_maintainer_are_mended(tmp_path: Path) -> None:
    store = DictStore()
    versions = history(9, tiny())
    stream = open_stream(store, policy=Policy(merge_levels=[2], anchor_every=4))
    with publisher(stream, tmp_path / "baseline") as trainer:
        for arrays in versions[:5]:
            trainer.publish(arrays)
        maintained(store, tmp_path / "work")
        for path in (tmp_path / "work").rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
        for arrays in versions[5:]:
            trainer.publish(arrays)
    for _ in range(3):
        maintained(store, tmp_path / "work")
    assert len(store.find("/merges/")) == 4
    assert len(store.find("/anchors/00000000000")) >= 3
    sound(store)


def test_anchors_every_so_often(tmp_path: Path) -> None:
    store = DictStore()
    stream = open_stream(store, policy=Policy(anchor_every=3, merge_levels=[]))
    made = []
    with publisher(stream, tmp_path / "baseline") as trainer:
        for number, arrays in enumerate(history(9, tiny()), 1):
            trainer.publish(arrays)
            made += [number] * maintained(store, tmp_path / "work").anchor_count
    assert made == [4, 7]
    sound(store)


def test_anchors_by_the_adaptive_rule(tmp_path: Path) -> None:
    """When the way from the last one costs more than an anchor does."""
    store = DictStore()
    stream = open_stream(store, policy=Policy(merge_levels=[]))
    arrays = tiny()
    made = []
    with publisher(stream, tmp_path / "baseline") as trainer:
        for number in range(1, 12):
            version = trainer.publish(arrays)
            arrays = stepped(arrays, number, share=0.9)
            if number == 2:
                step_bytes = version.payload_bytes
            made += [number] * maintained(store, tmp_path / "work").anchor_count
    # The first version is 800 bytes raw; each step delta costs so much more than a share of it.
    due = 1 + 800 // step_bytes + 1
    assert made[0] == pytest.approx(due, abs=1)
    assert len(made) >= 2
    sound(store)


def test_signed_streams(tmp_path: Path) -> None:
    """What a maintainer makes is signed too, and without a key it makes nothing."""
    key = SigningKey.generate()
    store = DictStore()
    policy = Policy(merge_levels=[2], anchor_every=2)
    with publisher(
        open_stream(store, signing_key=key, policy=policy), tmp_path / "baseline"
    ) as trainer:
        for arrays in history(5, tiny()):
            trainer.publish(arrays)
    with pytest.raises(ThinwireError, match="key"):
        maintained(store, tmp_path / "other")
    assert store.find("/merges/") == []
    with Maintainer(open_stream(store, signing_key=key), tmp_path / "work") as maintainer:
        work = maintainer.run_once()
    assert (work.merge_count, work.anchor_count) == (2, 1)
    pinned = open_stream(store, trusted_keys=[key.public])
    assert fsck(pinned, deep=True).problems == []
    with Follower(pinned, tmp_path / "sink") as follower:
        follower.catch_up()


def test_what_is_told(tmp_path: Path) -> None:
    store, recorder = DictStore(), Recorder()
    published(store, tmp_path / "baseline", history(5, tiny()), merge_levels=[2], anchor_every=4)
    maintained(store, tmp_path / "work", observer=recorder)
    told = [(event.kind, event.version) for event in recorder.of(Maintained)]
    assert told == [("merge", 3), ("merge", 5), ("anchor", 5)]
    assert all(event.payload_bytes > 0 for event in recorder.of(Maintained))
    assert recorder.of(Refused) == []


def test_one_thing_that_fails_does_not_keep_others(tmp_path: Path) -> None:
    store, recorder = DictStore(), Recorder()
    published(store, tmp_path / "baseline", history(5, tiny()), merge_levels=[2], anchor_every=4)
    whole = store.copy()
    store.delete(store.find("deltas/000000000001-000000000002/"))
    work = maintained(store, tmp_path / "work", observer=recorder)
    assert work.failed_count >= 1
    assert {event.code for event in recorder.of(Refused)} == {"not-found"}
    for key in whole.find("deltas/000000000001-000000000002/"):
        store.objects[key] = whole.objects[key]
    maintained(store, tmp_path / "work")
    assert len(store.find("/merges/")) == 2
    sound(store)


def test_a_store_that_fails_for_now(tmp_path: Path) -> None:
    """Raised, so that it is tried again later; what was made before stays."""
    store = DictStore()
    published(store, tmp_path / "baseline", history(5, tiny()), merge_levels=[2, 4])
    count = itertools.count()

    def fail(operation: str, key: str) -> None:
        if operation == "put_file" and next(count) == 1:
            raise Unavailable("no answer")

    with pytest.raises(Unavailable):
        maintained(HookStore(store, fail), tmp_path / "work")
    assert len(store.find("/merges/")) == 1
    maintained(store, tmp_path / "work")
    assert len(store.find("/merges/")) == 3
    sound(store)


def test_no_stream_and_no_version(tmp_path: Path) -> None:
    store = DictStore()
    with pytest.raises(NotFound):
        maintained(store, tmp_path / "work")
    with publisher(store, tmp_path / "baseline"):
        work = maintained(store, tmp_path / "work")
        assert (work.merge_count, work.anchor_count) == (0, 0)


# Pruning and collecting


def test_what_is_old_goes_by_and_by(tmp_path: Path) -> None:
    """First the references, then, after the grace, the objects; the newest stay reachable."""
    store, recorder = DictStore(), Recorder()
    versions = history(9, tiny())
    published(store, tmp_path / "baseline", versions, **SHORT, merge_levels=[2, 4], anchor_every=4)
    store.now_s += 2 * GRACE_S
    maintained(store, tmp_path / "work", observer=recorder)
    assert joined(store, tmp_path / "8", 8) == bits(versions[7]), "the head's anchor is no help"
    with publisher(store, tmp_path / "baseline") as trainer:
        for seed in range(2):
            versions.append(stepped(versions[-1], seed))
            trainer.publish(versions[-1])
    data = store.find(".tw") + store.find(".safetensors")
    second = maintained(store, tmp_path / "work", observer=recorder)
    assert second.dropped_count > 0
    assert second.removed.object_count == 0
    assert set(data) <= set(store.find()), "objects are not removed yet"
    store.now_s += GRACE_S + 1
    third = maintained(store, tmp_path / "work", observer=recorder)
    assert third.removed.object_count > 0
    assert store.find("deltas/000000000001-000000000002/") == []
    assert store.find("anchors/000000000001-") == []
    assert len(store.find("manifests")) == 11, "manifests stay: places once taken stay taken"
    for target in (10, 11):
        assert joined(store, tmp_path / str(target), target) == bits(versions[target - 1])
    with pytest.raises((HistoryPruned, NotFound)):
        joined(store, tmp_path / "old", 3)
    sound(store)
    kinds = [event.kind for event in recorder.of(Maintained)]
    assert kinds.index("prune") < kinds.index("collect")


@pytest.mark.parametrize("keep", [{"keep_versions": 7}, {"keep_age_s": 1000}])
def test_promised_versions_stay_for_joiners_and_for_holders(
    keep: dict[str, int], tmp_path: Path
) -> None:
    store = DictStore()
    versions = history(12, tiny())
    policy = Policy(**(SHORT | keep), merge_levels=[2, 4], anchor_every=3)
    holder = Follower(open_stream(store), tmp_path / "holder", lease=False)
    stream = open_stream(store, policy=policy)
    with publisher(stream, tmp_path / "baseline") as trainer, holder:
        for number, arrays in enumerate(versions, 1):
            store.now_s += 150
            trainer.publish(arrays)
            if number == 6:
                holder.catch_up()
            maintained(store, tmp_path / "work")
        for target in range(6, 13):
            assert joined(store, tmp_path / str(target), target) == bits(versions[target - 1])
        holder.catch_up()
    assert held(tmp_path / "holder") == bits(versions[11])
    assert store.find("deltas/000000000001-000000000002/") == []
    sound(store)


def test_a_lease_keeps_a_version(tmp_path: Path) -> None:
    """As long as it lives."""
    store = DictStore()
    versions = history(9, tiny())
    stream = open_stream(store, policy=Policy(**SHORT, merge_levels=[], anchor_every=2))
    lease = Lease(FORMAT, "ab" * 16, "0" * 32, 3, LEASE_TTL_S)
    with publisher(stream, tmp_path / "baseline") as trainer:
        for arrays in versions:
            trainer.publish(arrays)
            maintained(store, tmp_path / "work")
            store.now_s += GRACE_S + 1
            store.put(keys.lease("ab" * 16, 3), encode(lease))
            store.put(f"{keys.LEASES}nonsense.json", b"nonsense")
    for target in range(3, 10):
        assert joined(store, tmp_path / str(target), target) == bits(versions[target - 1])
    store.now_s += LEASE_TTL_S + 1
    for _ in range(2):
        maintained(store, tmp_path / "work")
        store.now_s += GRACE_S + 1
    with pytest.raises(ThinwireError):
        joined(store, tmp_path / "gone", 3)
    assert joined(store, tmp_path / "kept", 9) == bits(versions[8])
    store.now_s += 2 * DAY_S
    maintained(store, tmp_path / "work")
    assert store.find("leases/0") == store.find("leases/nonsense") == [], "of the dead"
    sound(store)


def test_orphans_go_after_the_grace_and_nothing_else_ever(tmp_path: Path) -> None:
    store = DictStore()
    versions = history(5)
    published(store, tmp_path / "baseline", versions, merge_levels=[2], anchor_every=4)
    maintained(store, tmp_path / "work")
    lineage = open_stream(store).record().lineage
    wanted = {key for key in store.find() if not key.startswith("leases/")}
    orphans = [
        keys.shard(lineage, 1, 2, "ab" * 16, 0, "cd" * 32),
        keys.shard(lineage, 1, 3, "ab" * 16, 0, "cd" * 32),
        keys.shard(lineage, 4, 5, "ab" * 16, 0, "cd" * 32),
        keys.shard(lineage, 3, 3, "ab" * 16, 0, "cd" * 32),
        keys.anchor_file(lineage, 1, "ab" * 16, "model.safetensors"),
        keys.anchor_file(lineage, 5, "ab" * 16, "model.safetensors"),
        keys.anchor_file(lineage, 4, "ab" * 16, "config.json"),
    ]
    for key in orphans:
        store.put(key, b"left over")
    # Whose place is free may yet be committed, however long that takes.
    pending = [
        keys.shard(lineage, 5, 6, "ab" * 16, 0, "cd" * 32),
        keys.shard(lineage, 5, 9, "ab" * 16, 0, "cd" * 32),
    ]
    for key in pending:
        store.put(key, b"about to be committed")
    strange = [f"{lineage}/deltas/notes/x.txt", f"{lineage}/anchors/README", f"{lineage}/x/y", "z"]
    for key in strange:
        store.put(key, b"of someone else")
    store.now_s += 3599
    assert maintained(store, tmp_path / "work").removed.object_count == 0
    assert set(orphans) <= set(store.find())
    store.now_s += 2
    removed = maintained(store, tmp_path / "work").removed
    assert removed == (len(orphans), len(orphans) * len(b"left over"))
    left = {key for key in store.find() if not key.startswith("leases/")}
    assert left == wanted | set(strange) | set(pending)
    sound(store)


def test_an_upload_under_way_protects_its_folder(tmp_path: Path) -> None:
    """One young object in a folder: someone is at it, so nothing there is touched."""
    store = DictStore()
    published(store, tmp_path / "baseline", history(3, tiny()))
    lineage = open_stream(store).record().lineage
    old = keys.shard(lineage, 3, 4, "ab" * 16, 0, "cd" * 32)
    store.put(old, b"first shard, of a slow upload")
    store.now_s += DAY_S
    store.put(keys.shard(lineage, 3, 4, "ab" * 16, 1, "cd" * 32), b"second shard")
    maintained(store, tmp_path / "work")
    assert old in store.find()


def test_the_machines_own_clock_plays_no_part(tmp_path: Path) -> None:
    """Ages are by the store's clock alone, whether it is ahead or far behind."""
    for now_s in (1000.0, 9e9):
        store = DictStore()
        store.now_s = now_s
        folder = tmp_path / str(now_s)
        published(store, folder / "baseline", history(5, tiny()), **SHORT, merge_levels=[])
        lineage = open_stream(store).record().lineage
        orphan = keys.shard(lineage, 4, 5, "ab" * 16, 0, "cd" * 32)
        store.put(orphan, b"x")
        maintained(store, folder / "work")
        assert orphan in store.find()
        store.now_s += GRACE_S + 1
        maintained(store, folder / "work")
        assert orphan not in store.find()


def test_ended_lineages_go_in_time(tmp_path: Path) -> None:
    store = DictStore()
    # Their end is dated by the publisher's clock.
    store.now_s = 1.7e9
    versions = history(4, tiny())
    policy = {"keep_versions": 2, "keep_age_s": 1000, "grace_s": GRACE_S, "merge_levels": [2]}
    published(store, tmp_path / "baseline", versions, **policy)
    old = open_stream(store).record().lineage
    maintained(store, tmp_path / "work")
    other = history(4, tiny(seed=9))
    with publisher(store, tmp_path / "baseline", new_lineage=True) as trainer:
        for arrays in other:
            trainer.publish(arrays)
    maintained(store, tmp_path / "work")
    assert len(store.find(f"{old}/deltas/")) == 4
    import time

    store.now_s = time.time() + 5000
    for _ in range(3):
        maintained(store, tmp_path / "work")
        store.now_s += GRACE_S + 1
    assert store.find(f"{old}/deltas/") == store.find(f"{old}/anchors/") == []
    assert store.find(f"{old}/merges/") == []
    assert len(store.find(f"{old}/manifests/")) == 5
    sound(store)
    assert joined(store, tmp_path / "sink") == bits(other[3])
    with pytest.raises(ThinwireError):
        joined(store, tmp_path / "old", 3)


# Beside others


def test_one_maintainer_at_a_time(tmp_path: Path) -> None:
    store = DictStore()
    published(store, tmp_path / "baseline", history(5, tiny()), merge_levels=[2])
    stream = open_stream(store)
    with (
        Maintainer(stream, tmp_path / "one") as one,
        Maintainer(stream, tmp_path / "two") as two,
        Maintainer(stream, tmp_path / "three", is_background=True) as background,
    ):
        assert background.run_once().merge_count == 2
        whole = dict(store.objects)
        assert not one.run_once().is_other, "takes over from a publisher's own"
        assert two.run_once().is_other
        assert background.run_once().is_other
        assert not one.run_once().is_other
        store.now_s += 901
        assert not two.run_once().is_other, "the lease ran out"
        assert one.run_once().is_other
    assert {key for key in store.find() if "leases" in key} == set()
    assert {key for key in whole if "/merges/" in key} == set(store.find("/merges/"))
    with Maintainer(stream, tmp_path / "three", is_background=True) as background:
        assert not background.run_once().is_other, "the lease was given back"


def test_a_restarted_maintainer_goes_on_at_once(tmp_path: Path) -> None:
    store = DictStore()
    published(store, tmp_path / "baseline", history(2, tiny()))
    killed = Maintainer(open_stream(store), tmp_path / "work")
    killed.run_once()
    for trails in killed._trails.values():
        trails.close()
    assert not maintained(store, tmp_path / "work").is_other


def test_two_that_work_at_once_do_no_harm(tmp_path: Path) -> None:
    """The lease is advice: whoever ignores it still wins or loses each place as a whole."""
    store = DictStore()
    versions = history(9, tiny())
    published(store, tmp_path / "baseline", versions, **SHORT, merge_levels=[2, 4], anchor_every=4)
    rivals = [Maintainer(open_stream(store), tmp_path / str(n)) for n in range(2)]
    rivals[1]._charge = rivals[0]._charge
    done = False

    def race(operation: str, key: str) -> None:
        nonlocal done
        if operation == "put_if_absent" and not done:
            done = True
            rivals[1].run_once()

    slow = Maintainer(open_stream(HookStore(store, race)), tmp_path / "slow")
    slow.run_once()
    for one in (*rivals, slow):
        one.close()
    assert done
    sound(store)
    store.now_s += GRACE_S + 1
    maintained(store, tmp_path / "work")
    sound(store)
    assert joined(store, tmp_path / "sink") == bits(versions[8])


def test_watching(tmp_path: Path) -> None:
    """Until it is told to stop; failures that may pass are told."""
    store, recorder = DictStore(), Recorder()
    failures = [Unavailable("no answer"), Unavailable("no answer")]

    def fail(operation: str, key: str) -> None:
        if failures:
            raise failures.pop()

    stream = open_stream(HookStore(store, fail))
    with Maintainer(stream, tmp_path / "work", observer=recorder) as maintainer:
        thread = threading.Thread(target=maintainer.watch, args=(0.01,))
        thread.start()
        recorder.wait_for(Refused, 3)
        published(store, tmp_path / "baseline", history(3, tiny()), merge_levels=[2])
        recorder.wait_for(Maintained)
        maintainer.stop()
        thread.join(60)
        assert not thread.is_alive()
    assert [event.code for event in recorder.of(Refused)][:3] == [
        "unavailable",
        "unavailable",
        "not-found",
    ]


def test_beside_a_live_publisher_and_a_follower(tmp_path: Path) -> None:
    """A maintainer that never rests, and short retention."""
    store, recorder = DictStore(), Recorder()
    versions = history(40, tiny())
    policy = Policy(keep_versions=3, keep_age_s=0, grace_s=5, merge_levels=[2, 4], anchor_every=6)
    stream = open_stream(store, policy=policy)
    with (
        publisher(stream, tmp_path / "baseline") as trainer,
        Follower(open_stream(store), tmp_path / "sink") as follower,
        Maintainer(open_stream(store), tmp_path / "work", observer=recorder) as maintainer,
    ):
        trainer.publish(versions[0])
        thread = threading.Thread(target=maintainer.watch, args=(0.001,))
        thread.start()
        for number, arrays in enumerate(versions[1:], 2):
            trainer.publish(arrays)
            store.now_s += 1
            if number % 3 == 0:
                assert follower.catch_up().version == number
                assert held(tmp_path / "sink") == bits(arrays)
        recorder.wait_for(Maintained)
        maintainer.stop()
        thread.join(60)
        follower.catch_up()
    assert held(tmp_path / "sink") == bits(versions[39])
    for _ in range(3):
        maintained(store, tmp_path / "work")
        store.now_s += 10
    sound(store)
    for target in (38, 39, 40):
        assert joined(store, tmp_path / str(target), target) == bits(versions[target - 1])


def test_a_publishers_own_maintenance(tmp_path: Path) -> None:
    """By default nobody needs to run anything else."""
    store, recorder = DictStore(), Recorder()
    versions = history(6, tiny())
    stream = open_stream(store, policy=Policy(merge_levels=[2], anchor_every=4))
    with publisher(stream, tmp_path / "baseline", maintain=True, observer=recorder) as trainer:
        for arrays in versions:
            trainer.publish(arrays)
        recorder.wait_for(Maintained, 2)
    while not any(event.kind == "anchor" for event in recorder.of(Maintained)):
        with publisher(stream, tmp_path / "baseline", maintain=True, observer=recorder) as trainer:
            trainer.publish(versions[-1])
            recorder.wait_for(Maintained, len(recorder.of(Maintained)) + 1)
    sound(store)


def test_a_publish_never_waits_for_maintenance(tmp_path: Path) -> None:
    """The thread stands still at its next piece of work while a publish runs, and ends at once."""
    store = DictStore()
    versions = history(9, tiny())
    stream = open_stream(store, policy=Policy(merge_levels=[2], anchor_every=4))
    entered = threading.Event()
    go_on = threading.Event()

    def block(operation: str, key: str) -> None:
        if "/merges/" in key and operation == "put_if_absent":
            entered.set()
            assert go_on.wait(60)

    opened = open_stream(HookStore(store, block), policy=stream.policy)
    with publisher(opened, tmp_path / "baseline", maintain=True) as trainer:
        for arrays in versions[:4]:
            trainer.publish(arrays)
        assert entered.wait(60)
        # Its hands are tied, and the trainer goes on.
        for arrays in versions[4:]:
            trainer.publish(arrays)
        go_on.set()
    assert joined(store, tmp_path / "sink") == bits(versions[8])
    maintained(store, tmp_path / "work")
    sound(store)


def test_failing_maintenance_never_reaches_the_publisher(tmp_path: Path) -> None:
    store, recorder = DictStore(), Recorder()

    def fail(operation: str, key: str) -> None:
        if "/merges/" in key or key.startswith("leases/"):
            raise Unavailable("no answer")

    stream = open_stream(HookStore(store, fail), policy=Policy(merge_levels=[2]))
    with publisher(stream, tmp_path / "baseline", maintain=True, observer=recorder) as trainer:
        for arrays in history(4, tiny()):
            trainer.publish(arrays)
        refused = recorder.wait_for(Refused)
    assert (refused.code, refused.reason[:11]) == ("unavailable", "maintenance")


def test_head_hint_that_cannot_be_written_is_harmless(tmp_path: Path) -> None:
    store, recorder = DictStore(), Recorder()

    def fail(operation: str, key: str) -> None:
        if key == keys.HEAD and operation == "put":
            raise Unavailable("no answer")

    stream = open_stream(HookStore(store, fail))
    versions = history(3, tiny())
    with publisher(stream, tmp_path / "baseline", observer=recorder) as trainer:
        for arrays in versions:
            trainer.publish(arrays)
    assert [event.code for event in recorder.of(Refused)] == ["unavailable"] * 3
    assert keys.HEAD not in store.find()
    assert joined(store, tmp_path / "sink") == bits(versions[2])
    with publisher(store, tmp_path / "baseline") as trainer:
        assert trainer.head is not None
        assert trainer.head.version == 3
    sound(store)
