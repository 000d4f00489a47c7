"""A publisher that runs while something else is in its stream's place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.errors import LineageChanged, NotFound, Unavailable
from thinwire.follow import Follower, open_stream

from .making import DictStore, StoreWrapper, bits, held, history, publisher, tiny

VERSIONS = history(4, tiny())


def mark(place: Path) -> None:
    (place / ".keep").write_text("not mounted")


def find_lost(place: Path) -> None:
    (place / "lost+found").mkdir()


def put_another_stream(place: Path) -> None:
    with publisher(open_stream(place), place.with_name("others")) as other:
        other.publish(VERSIONS[3])


def objects(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if ".thinwire" not in str(path))


@pytest.mark.parametrize(
    ("fill", "error"),
    [(mark, Unavailable), (find_lost, Unavailable), (put_another_stream, LineageChanged)],
)
@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_published_there(
    fill: Callable[[Path], None], error: type[Exception], count: int, tmp_path: Path
) -> None:
    place, mounted = tmp_path / "store", tmp_path / "mounted"
    with publisher(open_stream(place), tmp_path / "baseline") as trainer:
        for arrays in VERSIONS[:count]:
            trainer.publish(arrays)
        place.rename(mounted)
        place.mkdir()
        fill(place)
        before = objects(place)
        with pytest.raises(error):
            trainer.publish(VERSIONS[count])
        assert objects(place) == before
        shutil.rmtree(place)
        mounted.rename(place)
        assert trainer.publish(VERSIONS[count + 1]).version == count + 1
    with Follower(open_stream(place), tmp_path / "sink") as follower:
        follower.catch_up()
        assert held(tmp_path / "sink") == bits(VERSIONS[count + 1])


class LeavingStore(StoreWrapper):
    """Is emptied once the first delta is uploaded."""

    def __init__(self, inner: DictStore) -> None:
        super().__init__(inner)
        self._objects = inner.objects
        self.kept: dict[str, tuple[bytes, float]] = {}

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._leave(key)

    def put_file(self, key: str, path: Path) -> None:
        super().put_file(key, path)
        self._leave(key)

    def _leave(self, key: str) -> None:
        if "/deltas/" in key and not self.kept:
            self.kept = dict(self._objects)
            self._objects.clear()


def test_it_goes_while_a_version_is_uploaded(tmp_path: Path) -> None:
    inner = DictStore()
    store = LeavingStore(inner)
    with publisher(open_stream(store), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        with pytest.raises(Unavailable, match="there was a stream"):
            trainer.publish(VERSIONS[1])
        assert inner.objects == {}
        inner.objects.update(store.kept)
        assert trainer.publish(VERSIONS[2]).version == 2
    with Follower(open_stream(inner), tmp_path / "sink") as follower:
        follower.catch_up()
        assert held(tmp_path / "sink") == bits(VERSIONS[2])


class ElsewhereStore(StoreWrapper):
    """Data goes to another place, as if this one was away for a moment."""

    elsewhere: DictStore | None = None

    def put(self, key: str, data: bytes) -> None:
        store = self.elsewhere if self.elsewhere is not None and "/deltas/" in key else self._store
        store.put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())


def test_it_was_away_while_a_version_was_uploaded(tmp_path: Path) -> None:
    store = ElsewhereStore(DictStore())
    with publisher(open_stream(store), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        store.elsewhere = DictStore()
        with pytest.raises(NotFound, match="was uploaded, and is not in"):
            trainer.publish(VERSIONS[1])
        store.elsewhere = None
        assert trainer.publish(VERSIONS[2]).version == 2
    with Follower(open_stream(store), tmp_path / "sink") as follower:
        follower.catch_up()
        assert held(tmp_path / "sink") == bits(VERSIONS[2])


def test_a_stream_that_was_set_back(tmp_path: Path) -> None:
    """As a backup that was restored: the version before is there, the last one is not."""
    store = DictStore()
    with publisher(open_stream(store), tmp_path / "baseline") as trainer:
        trainer.publish(VERSIONS[0])
        backup = dict(store.objects)
        trainer.publish(VERSIONS[1])
        store.objects.clear()
        store.objects.update(backup)
        with pytest.raises(LineageChanged, match="set back"):
            trainer.publish(VERSIONS[2])
        assert store.objects == backup
