"""A host's copy: what it notes is exactly what differs, whatever happened on the way."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from thinwire.checkpoint import staging, update
from thinwire.engines.engine import label_of
from thinwire.engines.host import FOLDER_NAME, HostCopy, places_path
from thinwire.engines.places import read_places
from thinwire.errors import InvalidArgument, Unavailable
from thinwire.follow import Follower, open_stream
from thinwire.maintain import Maintainer
from thinwire.publish import Publisher
from thinwire.stream.version import Version

Arrays = dict[str, np.ndarray[Any, Any]]
Words = dict[str, np.ndarray[Any, Any]]


def words_in(folder: Path) -> Words:
    """Every tensor's words, read by the format's description alone."""
    found: Words = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                size = {"BF16": 2, "F32": 4, "U8": 1}[entry["dtype"]]
                found[name] = np.frombuffer(data[start + low : start + high], f"u{size}")
    return found


def first_model(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(0, 1, (30, 20)).astype(ml_dtypes.bfloat16),
        "b": rng.normal(0, 1, 500).astype(np.float32),
        "big": rng.normal(0, 1, 1 << 20).astype(ml_dtypes.bfloat16),
        "c": rng.integers(0, 255, 77).astype(np.uint8),
        "empty": np.empty((0, 3), np.float32),
    }


def stepped(arrays: Arrays, seed: int, share: float = 0.01, only: Any = None) -> Arrays:
    rng = np.random.default_rng(seed)
    new = {}
    for name, array in arrays.items():
        copy = array.copy().reshape(-1)
        words = copy.view(f"u{copy.itemsize}")
        if only is None or name in only:
            chosen = rng.random(words.size) < share
            words[chosen] ^= rng.integers(1, 4, int(chosen.sum())).astype(words.dtype)
        new[name] = copy.reshape(array.shape)
    return new


class Stand:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = (folder / "store").as_uri()
        (folder / "store").mkdir()
        self.publisher = Publisher(self.url, folder / "trainer", maintain=False)
        self.model = first_model()
        self.publisher.publish(self.model)
        self.start()
        self.at = self.follower.catch_up()
        self.serve()

    def start(self) -> None:
        self.host = HostCopy(self.folder / "copy")
        self.follower = Follower(open_stream(self.url), self.host, lease=False)

    def close(self) -> None:
        self.follower.close()
        self.publisher.close()

    def serve(self) -> None:
        """An engine holds what the copy holds."""
        self.host.served(self.at)
        self.held = {name: words.copy() for name, words in words_in(self.host.folder).items()}
        self.label = label_of(self.at)

    def publish(self, share: float = 0.01, only: Any = None) -> None:
        self.model = stepped(self.model, int(self.at.version) * 1000 + len(self.model), share, only)
        self.publisher.publish(self.model)

    def publish_files(self, model: Arrays) -> None:
        """As a checkpoint folder: only that may change the layout."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        save_file(model, folder / "model.safetensors")
        self.publisher.publish(folder)

    def catch_up(self) -> Version:
        self.at = self.follower.catch_up()
        return self.at

    def told(self) -> dict[str, Any] | None:
        """What the ranks are told; None: that anything may differ."""
        found = self.host.update_to(self.at)
        assert found.version == self.at
        assert found.folder == self.host.folder
        if not found.base:
            assert not places_path(found.folder, found.token).exists()
            return None
        assert found.base == self.label
        places: dict[str, Any] = {}
        count = 0
        for name, first, at in read_places(places_path(found.folder, found.token)):
            if at is None:
                places[name] = None
            elif places.get(name, ()) is not None:
                places[name] = np.union1d(
                    places.get(name, np.empty(0, np.int64)), at.astype(np.int64) + first
                )
                count += at.size
        assert found.changed_count >= count
        return places

    def differences(self) -> dict[str, list[int]]:
        now = words_in(self.host.folder)
        assert now.keys() == self.held.keys()
        found = {
            name: np.flatnonzero(words != self.held[name]).tolist() for name, words in now.items()
        }
        return {name: at for name, at in found.items() if at}

    def check_covers(self) -> dict[str, Any] | None:
        """Nothing that differs may be missing from what is told."""
        told = self.told()
        if told is not None:
            for name, at in self.differences().items():
                assert name in told
                if told[name] is not None:
                    assert set(at) <= set(told[name].tolist())
        return told


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with mock.patch.object(os, "fsync", return_value=None):
        found = Stand(tmp_path)
        yield found
        found.close()


def exactly(told: dict[str, Any] | None) -> dict[str, list[int]]:
    assert told is not None
    return {name: at.tolist() for name, at in told.items() if at.size}


def test_what_is_noted_is_the_difference(stand: Stand) -> None:
    for share in (0.001, 0.03):
        stand.publish(share)
        stand.catch_up()
        assert exactly(stand.told()) == stand.differences()
        # Asked for again, it is the same.
        assert exactly(stand.told()) == stand.differences()
        stand.serve()
        assert exactly(stand.told()) == {}
    assert len(list((stand.host.engine_folder / "updates").iterdir())) == 1


def test_several_versions_without_an_engine(stand: Stand) -> None:
    """What changed, and changed back, may be told: more, but never less."""
    for only in (["a"], ["b", "big"], None):
        stand.publish(only=only)
        stand.catch_up()
        told = stand.check_covers()
        assert told is not None
    changed = sum(len(at) for at in stand.differences().values())
    assert sum(at.size for at in told.values()) < 1.2 * changed + 50


def test_a_merged_delta(stand: Stand) -> None:
    for number in range(6):
        stand.model = stepped(stand.model, number)
        stand.publisher.publish(stand.model)
    with Maintainer(open_stream(stand.url), stand.folder / "maintainer") as maintainer:
        maintainer.run_once()
    stand.catch_up()
    stand.check_covers()


def test_an_installation_may_change_anything(stand: Stand) -> None:
    stand.publish()
    stand.catch_up()
    stand.follower.catch_up(1, reset=True)
    stand.at = stand.follower.catch_up(1, reset=True)
    stand.check_covers()
    stand.serve()
    stand.catch_up()
    assert stand.at.version == 2
    stand.check_covers()


def test_tensors_that_come_and_go_and_change_shape(stand: Stand) -> None:
    models = [
        {**stand.model, "new": np.zeros(9, np.float32)},
        {name: a for name, a in stand.model.items() if name != "a"},
        {**stand.model, "a": stand.model["a"].reshape(20, 30)},
        {**stand.model, "b": np.ones(501, np.float32)},
    ]
    for number, model in enumerate(models):
        stand.publish_files(model)
        stand.catch_up()
        told = stand.told()
        now = words_in(stand.host.folder)
        # Whoever was attached with other tensors refuses; where it is told, nothing is missing.
        if told is not None and now.keys() == stand.held.keys():
            for name, words in now.items():
                if words.size != stand.held[name].size:
                    assert told[name] is None
        stand.serve()
        stand.publish_files(stand.model)
        stand.catch_up()
        stand.told()
        stand.serve()
        stand.model = stepped(stand.model, number)
        stand.publish_files(stand.model)
        stand.catch_up()
        assert exactly(stand.told()) == stand.differences()
        stand.serve()


def test_a_folder_that_is_written_whole(stand: Stand) -> None:
    """A version that came by files: another header, another layout, an attachment."""
    folder = stand.folder / "files"
    shutil.copytree(stand.host.folder, folder, ignore=shutil.ignore_patterns(".*"))
    path = next(folder.glob("*.safetensors"))
    for number, metadata in enumerate(({"step": "1"}, {"step": "22"}, None)):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        if metadata:
            header = {"__metadata__": metadata, **header}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        body = bytearray(data[start:])
        body[100 + number] ^= 1
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
        (folder / "config.json").write_text(f'{{"n": {number}}}')
        stand.publisher.publish(folder)
        stand.catch_up()
        assert stand.differences()
        told = stand.check_covers()
        stand.serve()
        assert told is None or told


def apply_failing(stand: Stand, owner: Any, name: str, is_after: bool) -> None:
    real = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if is_after:
            real(*args, **kwargs)
        raise Unavailable("the disk is gone", hint="")

    with mock.patch.object(owner, name, failing), pytest.raises(Unavailable):
        stand.follower.catch_up()


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("name", ["seal", "sync", "_log_changes"])
def test_an_update_that_fails_half_way(name: str, is_after: bool, stand: Stand) -> None:
    stand.publish()
    apply_failing(stand, update, name, is_after)
    stand.publish()
    stand.catch_up()
    stand.check_covers()
    stand.serve()
    stand.publish()
    stand.catch_up()
    assert exactly(stand.told()) == stand.differences()


def test_an_update_that_was_finished_by_the_recovery(stand: Stand) -> None:
    stand.publish()
    count = 0
    real = update.settle

    def fails(path: Path) -> Any:
        nonlocal count
        count += 1
        # The first is before, the second carries the sealed log out.
        if count == 2:
            raise Unavailable("no room", hint="")
        return real(path)

    with mock.patch.object(update, "settle", fails), pytest.raises(Unavailable):
        stand.follower.catch_up()
    stand.catch_up()
    assert stand.differences()
    stand.check_covers()
    assert staging.settle is real


def test_another_run_knows_nothing(stand: Stand) -> None:
    stand.publish()
    stand.catch_up()
    stand.follower.close()
    stand.start()
    stand.catch_up()
    assert stand.told() is None
    stand.serve()
    stand.publish()
    stand.catch_up()
    assert exactly(stand.told()) == stand.differences()


def test_notes_of_an_earlier_run_are_removed_and_maps_stay(stand: Stand) -> None:
    folder = stand.host.folder / FOLDER_NAME
    for name in ("updates/old.places", "ranks/0.json", "maps/x.map"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    stand.follower.close()
    stand.start()
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert left == ["maps/x.map"]


def test_a_part_of_the_model_is_refused(stand: Stand) -> None:
    mark = mock.Mock(tensors=["a*"])
    with pytest.raises(InvalidArgument, match="whole model"):
        stand.host.apply(mock.Mock(), mark)
