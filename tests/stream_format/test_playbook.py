"""The recipes of docs/operations.md that are marked with (t) do what they say."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import Corrupt, LineageChanged, NotFound, SignatureInvalid
from thinwire.follow import Follower, Stream, open_stream
from thinwire.maintain import Maintainer, fsck, set_policy
from thinwire.publish import Publisher
from thinwire.stream import keys
from thinwire.stream.records import Policy
from thinwire.stream.signing import SigningKey


class Run:
    """A trainer with one small tensor, and whoever else is needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bucket = root / "bucket"
        self.weights = np.arange(70_000, dtype=np.float32)

    def stream(self, key: SigningKey | None = None, trusted: Iterable[str] = ()) -> Stream:
        return open_stream(str(self.bucket), signing_key=key, trusted_keys=list(trusted))

    def publish(self, stream: Stream | None = None, *, new_lineage: bool = False) -> int:
        with Publisher(
            stream or self.stream(), self.root / "p", maintain=False, new_lineage=new_lineage
        ) as publisher:
            self.weights = self.weights.copy()
            self.weights[::1000] += 1
            return publisher.publish({"w": self.weights}).version

    def follow(self, name: str, stream: Stream | None = None) -> int:
        with Follower(stream or self.stream(), self.root / name, lease=False) as follower:
            return follower.catch_up().version

    def holds_the_newest(self, name: str) -> bool:
        with Follower(self.stream(), self.root / name, lease=False) as follower:
            held = follower.sink.checkpoint().tensors["w"].data
        return bytes(held) == self.weights.tobytes()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_rotating_keys(run: Run) -> None:
    old, new = SigningKey.generate(), SigningKey.generate()
    both = [old.public, new.public]
    run.publish(run.stream(old))
    run.publish(run.stream(new, both))
    assert run.follow("known", run.stream(trusted=both)) == 2
    assert run.follow("fresh", run.stream(trusted=both)) == 2
    set_policy(run.stream(new, both), Policy())
    assert run.stream(trusted=[new.public]).record().signer == new.public
    # The first version is the old key's.
    with pytest.raises(SignatureInvalid):
        run.follow("later", run.stream(trusted=[new.public]))
    assert run.follow("known", run.stream(trusted=[new.public])) == 2
    assert run.publish(run.stream(new, both), new_lineage=True) == 3
    assert run.follow("later", run.stream(trusted=[new.public])) == 3
    for trusted, is_enough in ((both, True), ([new.public], False)):
        with Maintainer(run.stream(new, trusted), run.root / "work") as maintainer:
            if is_enough:
                maintainer.run_once()
            else:
                with pytest.raises(SignatureInvalid):
                    maintainer.run_once()


def test_moving_to_another_bucket(run: Run) -> None:
    run.publish()
    assert run.follow("sink") == 1
    shutil.copytree(run.bucket, run.root / "new")
    old, run.bucket = run.bucket, run.root / "new"
    assert fsck(run.stream()).is_whole
    assert run.publish() == 2
    assert run.follow("sink") == 2
    assert run.holds_the_newest("sink")
    run.bucket = old
    with pytest.raises(LineageChanged):
        run.follow("sink")
    with pytest.raises(LineageChanged):
        run.publish()


def test_a_bucket_that_was_set_back(run: Run) -> None:
    run.publish()
    shutil.copytree(run.bucket, run.root / "backup")
    run.publish()
    run.publish()
    assert run.follow("sink") == 3
    shutil.rmtree(run.bucket)
    (run.root / "backup").rename(run.bucket)
    with pytest.raises(LineageChanged):
        run.follow("sink")
    with pytest.raises(LineageChanged):
        run.publish()
    shutil.rmtree(run.root / "p")
    assert run.publish() == 2
    with pytest.raises(LineageChanged):
        run.follow("sink")
    with Follower(run.stream(), run.root / "sink", lease=False) as follower:
        assert follower.catch_up(reset=True).version == 2
    assert run.holds_the_newest("sink")


def test_garbage_in_the_place_of_the_next_version(run: Run) -> None:
    run.publish()
    run.follow("sink")
    record = run.stream().record()
    place = run.bucket / keys.manifest(record.lineage, 2)
    place.write_bytes(b"garbage")
    with pytest.raises(Corrupt):
        run.publish()
    with pytest.raises(Corrupt):
        run.follow("sink")
    place.unlink()
    assert run.publish() == 2
    assert run.follow("sink") == 2
    assert run.holds_the_newest("sink")


def test_a_damaged_folder_is_mended(run: Run) -> None:
    run.publish()
    run.follow("sink")
    path = run.root / "sink" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with Follower(run.stream(), run.root / "sink", lease=False) as follower:
        assert not follower.prove()
        assert follower.prove()
    assert path.read_bytes() == data


def test_a_lost_shard_is_walked_around_by_an_anchor(run: Run) -> None:
    for _ in range(3):
        run.publish()
    record = run.stream().record()
    folder = next(run.bucket.glob(f"{record.lineage}/deltas/000000000001-*2"))
    shutil.rmtree(folder)
    assert not fsck(run.stream()).is_whole
    with pytest.raises(NotFound):
        run.follow("sink")
    work = run.root / "work"
    shutil.copytree(run.root / "p", work / record.lineage / "head")
    set_policy(run.stream(), Policy(anchor_every=1))
    with Maintainer(run.stream(), work) as maintainer:
        assert maintainer.run_once().anchor_count == 1
    assert run.follow("sink") == 3
    assert run.holds_the_newest("sink")
