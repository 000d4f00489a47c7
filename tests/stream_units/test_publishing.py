"""Opening, going on, and never writing what nobody could read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.errors import (
    BaseMismatch,
    BaseUnusable,
    CommitConflict,
    Fenced,
    InvalidArgument,
    LimitExceeded,
    ThinwireError,
    Unavailable,
    UnsafeStore,
)
from thinwire.follow import Follower, open_stream
from thinwire.maintain import fsck
from thinwire.store import StoreWrapper
from thinwire.stream.encoding import MAX_SHARDS
from thinwire.stream.records import Policy

from .making import (
    DictStore,
    bits,
    held,
    history,
    joined,
    published,
    publisher,
    stepped,
    tiny,
    write_folder,
)


def test_the_first_open_makes_the_stream(tmp_path: Path) -> None:
    store = DictStore()
    policy = Policy(anchor_every=7)
    stream = open_stream(store, model="org/name", policy=policy)
    with publisher(stream, tmp_path / "baseline") as trainer:
        assert trainer.head is None
    record = open_stream(store).record()
    assert (record.model, record.policy) == ("org/name", policy)
    with publisher(store, tmp_path / "other"):
        assert open_stream(store).record() == record


def test_a_store_that_lets_two_win_is_refused(tmp_path: Path) -> None:
    class Careless(StoreWrapper):
        def put_if_absent(self, key: str, data: bytes) -> None:
            self._store.put(key, data)

    store = DictStore()
    with pytest.raises(UnsafeStore):
        publisher(Careless(store), tmp_path / "baseline")
    assert store.find("manifests") == []


def test_a_folder_of_a_follower_will_do(tmp_path: Path) -> None:
    """Restarting a trainer from what a rollout machine holds."""
    store = DictStore()
    versions = history(3, tiny())
    published(store, tmp_path / "baseline", versions[:2])
    joined(store, tmp_path / "sink")
    with publisher(store, tmp_path / "sink") as trainer:
        assert trainer.head is not None
        assert trainer.publish(versions[2]).version == 3
    assert held(tmp_path / "sink") == bits(versions[2])


def test_a_folder_with_a_part_of_the_model_will_not(tmp_path: Path) -> None:
    store = DictStore()
    published(store, tmp_path / "baseline", history(2))
    joined(store, tmp_path / "sink", tensors=["layers.0.*"])
    with pytest.raises(InvalidArgument):
        publisher(store, tmp_path / "sink")


def test_an_empty_or_late_folder_is_brought_to_the_head(tmp_path: Path) -> None:
    store = DictStore()
    versions = history(4, tiny())
    published(store, tmp_path / "baseline", versions[:3])
    joined(store, tmp_path / "late", 1)
    for name in ("empty", "late"):
        with publisher(store, tmp_path / name) as trainer:
            assert held(tmp_path / name) == bits(versions[2])
            assert trainer.head is not None
            assert trainer.head.version == 3
    with publisher(store, tmp_path / "late") as trainer:
        trainer.publish(versions[3])
    assert joined(store, tmp_path / "sink") == bits(versions[3])


def test_a_damaged_baseline_is_mended_on_opening_and_seen_while_open(tmp_path: Path) -> None:
    store = DictStore()
    versions = history(3)
    published(store, tmp_path / "baseline", versions[:1])
    path = tmp_path / "baseline" / "model.safetensors"

    def damage() -> None:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    damage()
    with publisher(store, tmp_path / "baseline") as trainer:
        assert held(tmp_path / "baseline") == bits(versions[0])
        trainer.publish(versions[1])
        damage()
        before = store.find()
        with pytest.raises(BaseMismatch):
            trainer.publish(versions[2])
        assert store.find() == before
    with publisher(store, tmp_path / "baseline") as trainer:
        assert trainer.publish(versions[2]).version == 3
    assert joined(store, tmp_path / "sink") == bits(versions[2])


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_store_that_is_away_is_no_place_for_another_stream(
    is_empty: bool, tmp_path: Path
) -> None:
    """Nothing where a stream was: a store that is not mounted, or another URL."""
    url = tmp_path / "store"
    with publisher(open_stream(url), tmp_path / "baseline") as trainer:
        trainer.publish(tiny(1))
    (tmp_path / "store").rename(tmp_path / "away")
    if is_empty:
        url.mkdir()
    with pytest.raises(Unavailable, match=r"baseline.* belongs to a stream") as raised:
        publisher(open_stream(url), tmp_path / "baseline")
    assert "mounted" in raised.value.hint
    assert not any(tmp_path.glob("store/*"))
    if is_empty:
        url.rmdir()
    assert not url.exists()
    (tmp_path / "away").rename(url)
    with publisher(url, tmp_path / "baseline") as trainer:
        assert trainer.publish(tiny(2)).version == 2


def test_a_copy_of_the_model_is_no_place_for_a_stream(tmp_path: Path) -> None:
    """The URL and the folder swapped."""
    with publisher(tmp_path / "store", tmp_path / "baseline") as trainer:
        trainer.publish(tiny(1))
    before = sorted(path.name for path in (tmp_path / "baseline").iterdir())
    for folder in ("store", "empty"):
        with pytest.raises(InvalidArgument):
            publisher(tmp_path / "baseline", tmp_path / folder)
    assert sorted(path.name for path in (tmp_path / "baseline").iterdir()) == before


def test_a_step_that_goes_back_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DictStore()
    with publisher(store, tmp_path / "baseline") as trainer:
        trainer.publish(tiny(1), step=42)
        trainer.publish(tiny(2), step=42)
        assert not caplog.records
        trainer.publish(tiny(3), step=1)
        assert "step 1 is published after step 42" in caplog.text
    caplog.clear()
    with publisher(store, tmp_path / "baseline", new_lineage=True) as trainer:
        trainer.publish(tiny(1), step=0)
        assert not caplog.records


def test_one_publisher_per_folder(tmp_path: Path) -> None:
    store = DictStore()
    with publisher(store, tmp_path / "baseline"), pytest.raises(BaseUnusable):
        publisher(store, tmp_path / "baseline")
    publisher(store, tmp_path / "baseline").close()


def test_the_loser_changes_nothing(tmp_path: Path) -> None:
    """Two publishers: the second to commit loses, and stays out."""
    store = DictStore()
    versions = history(3, tiny())
    with (
        publisher(store, tmp_path / "one") as one,
        publisher(store, tmp_path / "two") as two,
    ):
        one.publish(versions[0])
        with pytest.raises(CommitConflict):
            two.publish(versions[1])
        before = dict(store.objects)
        with pytest.raises(Fenced):
            two.publish(versions[1])
        assert store.objects == before
        assert one.publish(versions[2]).version == 2
    assert fsck(open_stream(store), deep=True).is_whole
    assert joined(store, tmp_path / "sink") == bits(versions[2])


def test_a_new_lineage(tmp_path: Path) -> None:
    """From older weights; the old publisher is fenced, followers go along if they may."""
    store = DictStore()
    versions = history(3, tiny())
    with publisher(store, tmp_path / "one") as one:
        first = one.publish(versions[0])
        one.publish(versions[1])
        with publisher(store, tmp_path / "two", new_lineage=True) as two:
            begun = two.publish(versions[0])
            with pytest.raises(ThinwireError) as caught:
                one.publish(versions[2])
            assert isinstance(caught.value, Fenced | CommitConflict)
            assert begun.lineage != first.lineage
            assert (begun.version, begun.weights) == (3, first.weights)
            assert two.publish(versions[2]).version == 4
    assert joined(store, tmp_path / "sink") == bits(versions[2])
    with Follower(open_stream(store), tmp_path / "sink") as follower:
        assert follower.catch_up(2, reset=True).lineage == first.lineage
    assert held(tmp_path / "sink") == bits(versions[1])
    assert fsck(open_stream(store), deep=True).is_whole


def long_path(folder: Path) -> Path:
    for letter in "abcdef":
        folder /= letter * 200
    return write_folder(folder, model=tiny())


Act = Callable[[DictStore, Path], Any]


def with_model(model: str) -> Act:
    def act(store: DictStore, folder: Path) -> None:
        with publisher(open_stream(store, model=model), folder / "baseline") as trainer:
            trainer.publish(tiny())

    return act


def by_reference(make: Callable[[Path], Path]) -> Act:
    def act(store: DictStore, folder: Path) -> None:
        with publisher(store, folder / "baseline") as trainer:
            trainer.publish_reference(str(make(folder)))

    return act


def in_many_shards(store: DictStore, folder: Path) -> None:
    arrays = {str(n): np.full(4, n, np.float16) for n in range(MAX_SHARDS + 1)}
    with publisher(store, folder / "baseline", shard_raw_bytes=1) as trainer:
        trainer.publish(arrays)
        trainer.publish(stepped(arrays, 1))


@pytest.mark.parametrize(
    "act",
    [
        with_model("x" * 2000),
        by_reference(long_path),
        by_reference(lambda folder: write_folder(folder / "a\x1fb", model=tiny())),
        in_many_shards,
    ],
)
def test_what_nobody_could_read_is_not_written(act: Act, tmp_path: Path) -> None:
    """Refused before the commit, or split so that it can be read: the stream goes on."""
    store = DictStore()
    try:
        act(store, tmp_path)
    except (InvalidArgument, LimitExceeded):
        pass
    else:
        # What was committed can be read.
        publisher(store, tmp_path / "baseline").close()
    with publisher(store, tmp_path / "baseline") as trainer:
        head = trainer.head
        assert head is None or head.version >= 1
    if store.find("/manifests/"):
        assert fsck(open_stream(store)).is_whole
