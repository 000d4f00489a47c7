"""The recipes of docs/operations.md, sections 11 and 12, marked (t) do what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from thinwire.cli.app import app
from thinwire.follow import open_stream
from thinwire.stream import keys

UNREADABLE, WRONG_STREAM = 5, 6


class Run:
    """A trainer that writes checkpoint folders, and replicas, all by the command line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root / "bucket")
        self.weights = np.arange(70_000, dtype=np.float32)

    def thinwire(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def train(self) -> Path:
        """The next checkpoint."""
        self.weights = self.weights.copy()
        self.weights[::1000] += 1
        folder = self.root / "checkpoint"
        folder.mkdir(exist_ok=True)
        save_file({"w": self.weights}, folder / "model.safetensors")
        return folder

    def publish(self, checkpoint: Path, *more: object, state: str = "state", url: str = "") -> int:
        done = self.thinwire(
            "publish", checkpoint, url or self.url, "--state", self.root / state, "--json", *more
        )
        assert done.exit_code == 0, done.output
        return int(json.loads(done.stdout)["version"])

    def follow(self, name: str, *more: object, url: str = "") -> Result:
        return self.thinwire("follow", url or self.url, self.root / name, "--once", *more)

    def held(self, name: str) -> bytes:
        return bytes(load_file(self.root / name / "model.safetensors")["w"].tobytes())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_an_older_model_is_published_again_as_the_next_version(run: Run) -> None:
    run.publish(run.train(), "--step", 1)
    good = run.weights.tobytes()
    for step in (2, 3):
        run.publish(run.train(), "--step", step)
    assert run.follow("replica").exit_code == 0
    done = run.thinwire("follow", run.url, run.root / "good", "--version", 1)
    assert done.exit_code == 0, done.output
    assert run.publish(run.root / "good", "--step", 1) == 4
    # Nobody has to allow anything: it is a version like any other.
    assert run.follow("replica").exit_code == 0
    assert run.held("replica") == good
    assert run.thinwire("fsck", run.url, "--deep").exit_code == 0


def test_one_replica_alone_looks_at_an_older_version(run: Run) -> None:
    run.publish(run.train())
    older = run.weights.tobytes()
    run.publish(run.train())
    assert run.follow("replica").exit_code == 0
    back = ("follow", run.url, run.root / "replica", "--version", 1)
    assert run.thinwire(*back).exit_code == WRONG_STREAM
    assert run.thinwire(*back, "--reset").exit_code == 0
    assert run.held("replica") == older
    assert run.follow("replica").exit_code == 0
    assert run.held("replica") == run.weights.tobytes()


def test_an_older_model_begins_a_new_lineage(run: Run) -> None:
    run.publish(run.train())
    good = run.weights.tobytes()
    run.publish(run.train())
    assert run.follow("replica").exit_code == 0
    assert run.thinwire("follow", run.url, run.root / "good", "--version", 1).exit_code == 0
    assert run.publish(run.root / "good", "--new-lineage") == 3
    refused = run.follow("replica")
    assert refused.exit_code == WRONG_STREAM
    assert run.held("replica") == run.weights.tobytes()
    assert run.follow("replica", "--accept-new-lineages").exit_code == 0
    assert run.held("replica") == good


def test_a_lost_bucket_is_made_again_from_a_replica(run: Run) -> None:
    run.publish(run.train())
    run.publish(run.train())
    assert run.follow("replica").exit_code == 0
    shutil.rmtree(run.url)
    shutil.rmtree(run.root / "state")
    new = str(run.root / "new")
    assert run.publish(run.root / "replica", url=new) == 1
    # It is another stream: a folder of the old one does not go along.
    assert run.follow("replica", url=new).exit_code == WRONG_STREAM
    assert run.follow("joined", url=new).exit_code == 0
    assert run.held("joined") == run.weights.tobytes()
    assert run.follow("replica", "--reset", url=new).exit_code == WRONG_STREAM
    shutil.rmtree(run.root / "replica")
    assert run.follow("replica", url=new).exit_code == 0
    # The trainer goes on from there.
    assert run.publish(run.train(), url=new) == 2
    assert run.follow("joined", url=new).exit_code == 0
    assert run.held("joined") == run.weights.tobytes()


def test_a_copy_of_the_bucket_that_lags_is_gone_on_with_in_a_new_lineage(run: Run) -> None:
    """Replication copies in any order: a manifest may be there, and its shard not yet."""
    for _ in range(4):
        run.publish(run.train(), "--no-maintain")
    assert run.follow("behind", "--version", 2).exit_code == 0
    assert run.follow("ahead").exit_code == 0
    copy = run.root / "copy"
    shutil.copytree(run.url, copy)
    lineage = open_stream(run.url).record().lineage
    (copy / keys.manifest(lineage, 4)).unlink()
    shutil.rmtree(next(copy.glob(f"{lineage}/deltas/000000000002-*3")))
    run.url = str(copy)
    found = run.thinwire("fsck", run.url)
    assert found.exit_code == WRONG_STREAM
    assert "000000000003" in found.stdout
    # Nobody takes what is not whole, or goes back.
    assert run.follow("behind").exit_code in (UNREADABLE, WRONG_STREAM)
    assert run.follow("ahead").exit_code == WRONG_STREAM
    shutil.rmtree(run.root / "state")
    assert run.publish(run.train(), "--new-lineage", state="state") == 4
    assert run.follow("behind", "--accept-new-lineages").exit_code == 0
    assert run.follow("ahead", "--accept-new-lineages").exit_code == WRONG_STREAM
    assert run.follow("ahead", "--accept-new-lineages", "--reset").exit_code == 0
    assert run.held("behind") == run.held("ahead") == run.weights.tobytes()


def test_what_was_deleted_is_put_back(run: Run) -> None:
    for _ in range(3):
        run.publish(run.train(), "--no-maintain")
    lineage = open_stream(run.url).record().lineage
    (lost,) = Path(run.url).glob(f"{lineage}/deltas/000000000001-*2/*.tw")
    data = lost.read_bytes()
    lost.unlink()
    found = run.thinwire("fsck", run.url)
    assert found.exit_code == WRONG_STREAM
    assert lost.name in found.stdout
    lost.write_bytes(data)
    assert run.thinwire("fsck", run.url, "--deep").exit_code == 0
    assert run.follow("replica").exit_code == 0
