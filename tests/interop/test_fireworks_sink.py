"""A deployment of ours follows a stream through its bucket, bit for bit, and past its failures."""

from __future__ import annotations

import json
import random
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interop.chains import publish, read_tensors, write_versions
from tests.interop.hot_loading import Ticking

from thinwire.errors import Deadline, EngineError, InvalidArgument, ThinwireError
from thinwire.follow import Follower, open_stream
from thinwire.interop.fireworks.hot_load import HotLoad, PromptCache
from thinwire.interop.fireworks.sink import FireworksSink
from thinwire.interop.mirror import Mirror
from thinwire.store import open_store
from thinwire.testing.faults import FaultStore
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

    def served(self) -> str:
        """What every replica serves."""
        current = self.server.fleet.current()
        assert current is not None
        return current

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
        options = {"wait_s": 30.0, "bucket": str(self.bucket), **options}
        return FireworksSink(
            self.root / "copy",
            options.pop("bucket"),
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
    told = []
    for _ in range(4):
        lab.publish(1)
        told += lab.catch_up(full_every=2)
    assert told == [(2, 1), (3, None), (4, 3), (5, None)]
    lab.check_served(5)


def test_every_one_full(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(full_every=1)
    told = []
    for _ in range(2):
        lab.publish(1)
        told += lab.catch_up(full_every=1)
    assert told == [(2, None), (3, None)]
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
    lab.server.faults.append(Fault(method="POST", path="/hot_load", status=400))
    with pytest.raises(EngineError, match="400"):
        lab.catch_up()
    lab.catch_up()
    # The identity that was refused is not announced again.
    names = [body["identity"] for body in lab.signals()]
    assert len(names) == len(set(names)) == 3
    lab.check_served(2)


def test_all_replicas_failed_and_the_process_died(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(1)
    lab.server.fleet.failures.update(a="no", b="no")
    with pytest.raises(EngineError):
        lab.catch_up()
    lab.publish(1)
    lab.catch_up()
    names = [body["identity"] for body in lab.signals()]
    assert len(names) == len(set(names))
    lab.check_served(3)


def test_failed_attempts_do_not_take_what_is_served(lab: Lab) -> None:
    for _ in range(3):
        lab.publish(1)
        lab.catch_up(keep_full=1)
    lab.publish(1)
    stream = open_stream(lab.root / "stream")
    with Mirror(stream, lab.sink(keep_full=1)) as mirror:
        for _ in range(4):
            lab.server.fleet.failures.update(a="no", b="no")
            with pytest.raises(EngineError):
                list(mirror.catch_up())
            served = [s.identity for s in lab.server.fleet.chain(lab.served())]
            assert all((lab.bucket / identity).is_dir() for identity in served)
        # One attempt in full is enough.
        assert len(list(lab.bucket.glob("*-full-*"))) == 1
        list(mirror.catch_up())
    lab.check_served(4)
    assert len(list(lab.bucket.glob("v*"))) == 1


def test_a_version_after_a_failure_is_uploaded_once(lab: Lab) -> None:
    lab.publish(1)
    stream = open_stream(lab.root / "stream")
    with Follower(stream, lab.sink()) as follower:
        follower.catch_up()
        lab.publish(1)
        lab.server.fleet.failures["a"] = "no"
        with pytest.raises(EngineError):
            follower.catch_up()
        lab.publish(1)
        follower.catch_up()
    assert [path.name[:9] for path in sorted(lab.bucket.glob("v*"))] == [
        "v00000001",
        "v00000002",
        "v00000003",
    ]
    lab.check_served(3)


def test_run_goes_on_after_a_deployments_failures(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(1)
    lab.server.fleet.failures["a"] = "out of memory"
    codes = []
    with Mirror(open_stream(lab.root / "stream"), lab.sink()) as mirror:
        for _ in mirror.run(poll_s=0.01, on_failure=lambda error: codes.append(error.code)):
            mirror.stop()
    assert codes == ["engine"]
    lab.check_served(2)


def test_run_ends_where_no_waiting_helps(lab: Lab) -> None:
    lab.publish(1)
    lab.server.faults.append(Fault(method="POST", path="/hot_load", status=403))
    with (
        Mirror(open_stream(lab.root / "stream"), lab.sink()) as mirror,
        pytest.raises(EngineError, match="403"),
    ):
        list(mirror.run(poll_s=0.01))


def test_stop_ends_a_wait_for_replicas(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(1)
    lab.server.fleet.stuck.add("a")
    sink = lab.sink(wait_s=1e9)
    with Mirror(open_stream(lab.root / "stream"), sink) as mirror:
        threading.Timer(0.1, mirror.stop).start()
        assert list(mirror.run(poll_s=0.01)) == []


class Died(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize("seed", range(6))
def test_chaos(lab: Lab, seed: int) -> None:
    """Killed at random calls, with replicas that fail and come anew: it comes through."""
    rng = random.Random(seed)

    def run_once(share: float) -> bool:
        left = [rng.randrange(60) if rng.random() < share else 1 << 30]

        def die(*_: str) -> None:
            if left[0] == 0:
                raise Died
            left[0] -= 1

        store = FaultStore(open_store(str(lab.bucket)), random.Random(seed), hook=die)
        if rng.random() < share:
            lab.server.fleet.failures[rng.choice("ab")] = "out of memory"
        if rng.random() < share / 2:
            lab.server.fleet.failures.update(a="no", b="no")
        if rng.random() < share:
            lab.server.fleet.remove("b")
            lab.server.fleet.add("b")
        try:
            with Mirror(
                open_stream(lab.root / "stream"), lab.sink(bucket=store, full_every=3)
            ) as mirror:
                list(mirror.catch_up())
        except (ThinwireError, Died):
            return False
        return True

    lab.publish(1)
    for _ in range(8):
        run_once(0.5)
        for replica in lab.server.fleet.replicas.values():
            if replica.identity is not None:
                number = int(replica.identity[1:9])
                assert replica.held == read_tensors(lab.versions[number - 1])
        if lab.published < 6 and rng.random() < 0.6:
            lab.publish(1)
    lab.server.fleet.failures.clear()
    assert any(run_once(0) for _ in range(4))
    lab.check_served(lab.published)
    served = [s.identity for s in lab.server.fleet.chain(lab.served())]
    assert all((lab.bucket / identity).is_dir() for identity in served)


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
    with pytest.raises(InvalidArgument, match="full_every is -1"):
        FireworksSink(lab.root / "copy", str(lab.bucket), "x", full_every=-1)
    with pytest.raises(InvalidArgument, match="no compression_format 'thinwire'"):
        FireworksSink(lab.root / "copy", str(lab.bucket), "x", compression_format="thinwire")
