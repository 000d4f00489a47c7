"""Folders that were damaged or left half-way, and objects that cannot be used."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from thinwire.errors import NotFound, ThinwireError
from thinwire.follow import CheckpointSink, Follower, open_stream
from thinwire.store.file_store import FileStore
from thinwire.stream.events import Refused

from .making import (
    Arrays,
    DictStore,
    LoggingStore,
    Recorder,
    bits,
    held,
    history,
    joined,
    publisher,
    write_safetensors,
)


def damage(folder: Path, at: int = -1) -> None:
    """One bit of the weights is another one."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def break_object(store: DictStore, part: str) -> None:
    """Every object with ``part`` in its key differs in its last byte."""
    for key in store.find(part):
        data, modified_s = store.objects[key]
        store.objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), modified_s)


def test_a_damaged_folder_is_fetched_again(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    """The delta does not fit what is there: the follower takes the way from an anchor."""
    recorder = Recorder()
    with Follower(open_stream(whole), tmp_path / "sink", observer=recorder) as follower:
        follower.catch_up(3)
        damage(tmp_path / "sink")
        assert follower.catch_up(4).version == 4
    assert held(tmp_path / "sink") == bits(versions[3])
    assert [event.code for event in recorder.of(Refused)] == ["base-mismatch"]


def test_so_is_one_in_the_steady_state(tmp_path: Path) -> None:
    store, recorder = DictStore(), Recorder()
    arrays = history(3)
    with (
        publisher(store, tmp_path / "baseline") as trainer,
        Follower(open_stream(store), tmp_path / "sink", observer=recorder) as follower,
    ):
        trainer.publish(arrays[0])
        follower.catch_up()
        damage(tmp_path / "sink")
        trainer.publish(arrays[1])
        assert follower.catch_up().version == 2
        assert held(tmp_path / "sink") == bits(arrays[1])
        trainer.publish(arrays[2])
        follower.catch_up()
    assert held(tmp_path / "sink") == bits(arrays[2])
    assert [event.code for event in recorder.of(Refused)] == ["base-mismatch"]


def test_prove(whole: DictStore, versions: list[Arrays], tmp_path: Path) -> None:
    recorder = Recorder()
    with Follower(open_stream(whole), tmp_path / "sink", observer=recorder) as follower:
        assert follower.prove(), "nothing is held, so nothing is wrong"
        follower.catch_up(6)
        assert follower.prove()
        damage(tmp_path / "sink")
        assert not follower.prove()
        assert held(tmp_path / "sink") == bits(versions[5])
        assert follower.prove()
    assert [event.code for event in recorder.of(Refused)] == ["base-mismatch"]


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "other tensors", "no safetensors"])
def test_prove_finds_every_damage(
    how: str, whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    path = tmp_path / "sink" / "model.safetensors"
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        follower.catch_up(6)
        data = path.read_bytes()
        if how == "gone":
            path.unlink()
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "cut":
            path.write_bytes(data[:-1])
        elif how == "other tensors":
            write_safetensors(path, {"norm": versions[5]["norm"]})
        else:
            path.write_bytes(b"x" * len(data))
        assert not follower.prove()
        assert held(tmp_path / "sink") == bits(versions[5])


def test_prove_never_calls_wrong_weights_right(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    """Where the version cannot be fetched either, that is an error."""
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        follower.catch_up(3)
        damage(tmp_path / "sink")
        healthy = whole.copy()
        break_object(whole, "anchors/000000000001-")
        with pytest.raises(ThinwireError):
            follower.prove()
        for key in whole.find("anchors/000000000001-"):
            whole.objects[key] = healthy.objects[key]
        assert not follower.prove()
        assert held(tmp_path / "sink") == bits(versions[2])


def test_a_damaged_folder_and_no_other_way(whole: DictStore, tmp_path: Path) -> None:
    with Follower(open_stream(whole), tmp_path / "sink") as follower:
        follower.catch_up(3)
        damage(tmp_path / "sink")
        break_object(whole, "anchors/")
        with pytest.raises(ThinwireError):
            follower.catch_up(4)
        version = follower.version()
        assert version is None or version.version == 3


@pytest.mark.parametrize(
    ("broken", "target"),
    [
        ("deltas/000000000001-000000000003/", 3),
        ("deltas/000000000001-000000000005/", 5),
        ("anchors/000000000010-", 10),
        ("anchors/000000000010.json", 10),
        ("catalog.json", 9),
        ("merges/000000000001-000000000005.json", 9),
        ("head.json", 10),
    ],
)
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_way_around_what_cannot_be_used(
    broken: str,
    target: int,
    is_gone: bool,
    whole: DictStore,
    versions: list[Arrays],
    tmp_path: Path,
) -> None:
    """Merged deltas, later anchors and hints can all be done without."""
    assert whole.find(broken)
    if is_gone:
        whole.delete(whole.find(broken))
    else:
        break_object(whole, broken)
    assert joined(whole, tmp_path / "sink", target) == bits(versions[target - 1])


def test_a_step_delta_that_is_gone_is_bridged(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    whole.delete(whole.find("deltas/000000000006-000000000007/"))
    recorder = Recorder()
    with Follower(open_stream(whole), tmp_path / "sink", observer=recorder) as follower:
        follower.catch_up(6)
        assert follower.catch_up().version == 10
    assert held(tmp_path / "sink") == bits(versions[9])


def test_a_restart_finishes_what_a_kill_left(
    whole: DictStore, versions: list[Arrays], tmp_path: Path
) -> None:
    """Killed between fetching and applying: the folder is as it was, and nothing is left over."""
    store = FileStore(tmp_path / "store")
    for key, (data, _) in whole.objects.items():
        store.put(key, data)
    folder = tmp_path / "sink"
    joined(store, folder, 3)

    class Deadly(CheckpointSink):
        def apply(self, *arguments: object, **options: object) -> None:
            (self.scratch() / "half").write_bytes(b"fetched")
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            Follower(open_stream(store), Deadly(folder), lease=False).catch_up(4)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (folder / ".thinwire-fetched" / "half").exists()
    with Follower(open_stream(store), folder, lease=False) as follower:
        version = follower.version()
        assert version is not None
        assert version.version == 3
        assert held(folder) == bits(versions[2])
        assert follower.catch_up(4).version == 4
    assert held(folder) == bits(versions[3])
    assert not (folder / ".thinwire-fetched").exists()


def test_nothing_is_fetched_for_what_is_held(whole: DictStore, tmp_path: Path) -> None:
    joined(whole, tmp_path / "sink")
    store = LoggingStore(whole)
    joined(store, tmp_path / "sink")
    joined(store, tmp_path / "sink", 10)
    assert store.data_keys() == []


def test_every_anchor_gone(whole: DictStore, tmp_path: Path) -> None:
    whole.delete(whole.find("/anchors/"))
    with (
        Follower(open_stream(whole), tmp_path / "sink") as follower,
        pytest.raises(NotFound),
    ):
        follower.catch_up()
    assert held(tmp_path / "sink") == {}
