"""A deployment of ours follows a stream through its bucket, bit for bit, and past its failures."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interop.chains import publish, read_tensors, write_versions
from tests.interop.hot_loading import Ticking

from thinwire.errors import Deadline, EngineError, InvalidArgument
from thinwire.follow import Follower, open_stream
from thinwire.interop.fireworks.hot_load import HotLoad, PromptCache
from thinwire.interop.fireworks.sink import FireworksSink
from thinwire.interop.mirror import Mirror
from thinwire.testing.hot_load_fleet import Fleet, Snapshot
from thinwire.testing.hot_load_server import Fault, HotLoadServer, serving

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Held = dict[str, bytes]


class Bucket:
    """The deployment's bucket; a replica loads its snapshots by hand, without thinwire."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, snapshot: Snapshot, held: Held | None) -> Held:
        folder = self.folder / snapshot.identity
        if not (folder / "config.json").is_file():
            raise ValueError("no config.json")
        if snapshot.base is None:
            return read_tensors(folder)
        assert held is not None
        new = {}
        for path in sorted(folder.glob("*.safetensors")):
            data = path.read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            checksums = header["__metadata__"]
            for name, payload in read_tensors(path).items():
                new[name] = self._tensor(snapshot, held[name], payload)
                if str(zlib.adler32(new[name])) != checksums[name]:
                    raise ValueError(f"{name}: wrong checksum")
        if new.keys() != held.keys():
            raise ValueError("other tensors")
        return new

    def _tensor(self, snapshot: Snapshot, old: bytes, payload: bytes) -> bytes:
        if not old:
            return old
        assert snapshot.compression_format == "arc_v2"
        xor = np.frombuffer(zstd.decompress(payload), np.uint8)
        return (np.frombuffer(old, np.uint8) ^ xor).tobytes()


class Lab:
    """A stream, a deployment with two replicas, and the sink between them."""

    def __init__(self, root: Path, versions: list[Path], endpoint: str, server: HotLoadServer):
        self.root = root
        self.versions = versions
        self.endpoint = endpoint
        self.server = server
        self.bucket = root / "bucket"
        self.published = 0

    def publish(self, count: int = 1) -> None:
        publish(
            self.root / "stream",
            self.root / "state",
            self.versions[self.published : self.published + count],
        )
        self.published += count

    def sink(self, **options: Any) -> FireworksSink:
        hot_load = HotLoad(
            "acme",
            "m",
            "d",
            key=self.server.key,
            endpoint=self.endpoint,
            clock=Ticking().clock(),
        )
        stream = open_stream(self.root / "stream")
        options = {"wait_s": 30.0, **options}
        return FireworksSink(
            self.root / "copy",
            str(self.bucket),
            stream.record().stream,
            hot_load=hot_load,
            **options,
        )

    def catch_up(self, **options: Any) -> list[tuple[int, int | None]]:
        stream = open_stream(self.root / "stream")
        with Mirror(stream, self.sink(**options)) as mirror:
            return [(row.version, row.base) for _, row in mirror.catch_up()]

    def check_served(self, number: int) -> None:
        """Every replica holds the bits of a version and nothing else."""
        wanted = read_tensors(self.versions[number - 1])
        for replica in self.server.fleet.replicas.values():
            assert replica.held == wanted, replica.name
            assert replica.identity is not None
            assert replica.identity.startswith(f"v{number:08d}-")

    def signals(self) -> list[dict[str, Any]]:
        posted = [c.body for c in self.server.calls if c.method == "POST"]
        return [body for body in posted if body and "filename" not in body]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_versions(tmp_path_factory.mktemp("versions"), 6)


@pytest.fixture
def lab(tmp_path: Path, versions: list[Path]) -> Iterator[Lab]:
    server = HotLoadServer(Fleet(["a", "b"], Bucket(tmp_path / "bucket").load))
    with serving(server) as endpoint:
        yield Lab(tmp_path, versions, endpoint, server)


@pytest.mark.claim("hot-load", "write", "a deployment of ours that loads its bucket by hand")
def test_full_then_incremental(lab: Lab) -> None:
    lab.publish(2)
    assert lab.catch_up() == [(2, None)]
    lab.check_served(2)
    lab.publish(2)
    assert lab.catch_up() == [(3, 2), (4, 3)]
    lab.check_served(4)
    bodies = lab.signals()
    bases = [body.get("incremental_snapshot_metadata") for body in bodies]
    assert bases[0] is None
    assert bases[1] == {
        "previous_snapshot_identity": bodies[0]["identity"],
        "compression_format": "arc_v2",
        "checksum_format": "alder32",
    }
    # Every file of every snapshot was announced for prefetching.
    named = {(path.parent.name, path.name) for path in lab.bucket.glob("v*/*")}
    assert set(lab.server.hints) == named


def test_config_and_tokenizer_travel(lab: Lab) -> None:
    lab.publish(2)
    lab.catch_up()
    lab.publish(1)
    lab.catch_up()
    for folder in lab.bucket.glob("v*"):
        assert (folder / "config.json").read_text() == '{"model_type": "llama"}'


def test_full_ones_come_round(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(full_every=2)
    lab.publish(4)
    assert lab.catch_up(full_every=2) == [(2, 1), (3, None), (4, 3), (5, None)]
    lab.check_served(5)


def test_every_one_full(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(full_every=1)
    lab.publish(2)
    assert lab.catch_up(full_every=1) == [(2, None), (3, None)]
    lab.check_served(3)


def test_prompt_cache_is_the_callers_choice(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(reset_prompt_cache=PromptCache.NEW_SESSION)
    assert lab.signals()[-1]["reset_prompt_cache"] == "new_session"


def test_after_a_failed_load_comes_a_full_one(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(2)
    lab.server.fleet.failures["b"] = "out of memory"
    stream = open_stream(lab.root / "stream")
    with Mirror(stream, lab.sink()) as mirror:
        with pytest.raises(EngineError, match="out of memory"):
            list(mirror.catch_up())
        assert lab.signals()[-1].get("incremental_snapshot_metadata")
        list(mirror.catch_up())
    fulls = [body for body in lab.signals() if "incremental_snapshot_metadata" not in body]
    assert "-full-1" in fulls[-1]["identity"]
    lab.check_served(3)


def test_restarted_after_a_failure_it_sends_a_full_one(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(1)
    lab.server.fleet.failures["a"] = "lost its disk"
    with pytest.raises(EngineError):
        lab.catch_up()
    # One replica is behind now: there is no one snapshot to go on from.
    lab.catch_up()
    lab.check_served(2)
    lab.publish(1)
    lab.catch_up()
    lab.check_served(3)


def test_slow_replicas_are_waited_for_again(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(1)
    lab.server.fleet.stuck.add("a")
    stream = open_stream(lab.root / "stream")
    with Mirror(stream, lab.sink()) as mirror:
        with pytest.raises(Deadline, match="a: "):
            list(mirror.catch_up())
        count = len(lab.signals())
        lab.server.fleet.stuck.clear()
        list(mirror.catch_up())
        assert len(lab.signals()) == count
    lab.check_served(2)


def test_refused_signal(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(1)
    lab.server.faults.append(Fault(method="POST", status=400))
    lab.server.faults.append(Fault(method="POST", status=400))
    lab.server.faults.append(Fault(method="POST", status=400))
    lab.server.faults.append(Fault(method="POST", status=400))
    for _ in range(4):
        try:
            lab.catch_up()
        except EngineError:
            continue
        break
    lab.check_served(2)


def test_deployment_that_lost_everything(lab: Lab) -> None:
    lab.publish(3)
    lab.catch_up()
    lab.publish(1)
    lab.catch_up()
    for name in list(lab.server.fleet.replicas):
        lab.server.fleet.remove(name)
    lab.server.fleet.ledger.clear()
    lab.server.fleet.add("c")
    lab.publish(1)
    lab.catch_up()
    lab.check_served(5)


def test_a_plain_follower_will_do(lab: Lab) -> None:
    lab.publish(2)
    sink = lab.sink()
    with Follower(lab.root / "stream", sink) as follower:
        follower.catch_up()
        lab.check_served(2)
        lab.publish(1)
        follower.catch_up()
    lab.check_served(3)


def test_bucket_alone(lab: Lab) -> None:
    lab.publish(1)
    stream = open_stream(lab.root / "stream")
    sink = FireworksSink(lab.root / "copy", str(lab.bucket), stream.record().stream)
    with Mirror(stream, sink) as mirror:
        list(mirror.catch_up())
    assert not lab.server.calls
    assert len(list(lab.bucket.glob("v*"))) == 1


def test_nonsense_is_refused(lab: Lab) -> None:
    with pytest.raises(InvalidArgument, match="full_every is 0"):
        FireworksSink(lab.root / "copy", str(lab.bucket), "x", full_every=0)
