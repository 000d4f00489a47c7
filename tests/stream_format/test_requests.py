"""The requests that docs/stream.md and docs/operations.md count."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.follow import Follower, open_stream
from thinwire.maintain import Maintainer
from thinwire.publish import Publisher
from thinwire.store import CountingStore, open_store
from thinwire.stream.records import Policy

from . import making


def write(root: Path, arrays: making.Arrays) -> Path:
    files = {"model.safetensors": making.safetensors(arrays)}
    return making.write(root / "checkpoint", files)


def counted(store: CountingStore) -> dict[str, int]:
    found = dict(store.counts().requests)
    store.reset()
    return found


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(open_store(str(tmp_path / "bucket"), retry_s=0))


def test_requests(store: CountingStore, tmp_path: Path) -> None:
    arrays = making.first_arrays()
    stream = open_stream(store, policy=Policy(merge_levels=(2, 4)))
    publisher = Publisher(stream, tmp_path / "publisher", maintain=False)
    publisher.publish(write(tmp_path, arrays))
    counted(store)

    follower = Follower(open_stream(store), tmp_path / "sink", lease=False)
    follower.catch_up()
    assert counted(store) == {"get": 6}, "joining at version 1"
    looks = follower.follow(poll_s=0.01)
    next(looks)
    counted(store)
    for version in range(2, 6):
        arrays = making.stepped(arrays, version)
        publisher.publish(write(tmp_path, arrays))
        puts = {"put_file": 1, "put_if_absent": 1, "put": 1}
        assert counted(store) == puts | {"get": 2, "get_range": 1}, "a step delta"
        assert next(looks).version == version
        assert counted(store) == {"get": 3}, "a version while up to date"
    follower.catch_up()
    assert counted(store) == {"get": 1}, "a look that finds nothing"

    with Maintainer(stream, tmp_path / "work") as maintainer:
        maintainer.run_once()
        counted(store)
        maintainer.run_once()
        idle = counted(store)
    assert idle == {"get": 10, "put": 1, "list": 8}, "a round with nothing to do"
    joiner = Follower(open_stream(store), tmp_path / "late", lease=False)
    counted(store)
    joiner.catch_up()
    assert counted(store) == {"get": 10}, "joining at version 5 by anchor 1 and a merged delta"
    for opened in (publisher, follower, joiner):
        opened.close()
