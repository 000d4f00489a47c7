"""The whole of it on a real S3 server; and on one that ignores conditions, which is refused."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from safetensors.numpy import load_file

from servers import S3Server
from thinwire import Follower, Maintainer, Policy, Publisher, fsck, open_stream
from thinwire.errors import CommitConflict, Fenced, ThinwireError, UnsafeStore


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = np.random.default_rng(0).normal(0, 0.02, 300_000).astype(np.float16)
    base.view(np.uint16)[rng.random(base.size) < 0.01 * seed] += np.uint16(seed)
    return {"w": base, "b": np.arange(100, dtype=np.float32) + seed}


def test_a_stream_lives_on_s3(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{s3.url}/run"
    stream = open_stream(url, policy=Policy(merge_levels=[2, 4]))
    with (
        Publisher(stream, tmp_path / "base", maintain=False) as publisher,
        Follower(url, tmp_path / "f", cache_dir=tmp_path / "cache") as follower,
    ):
        for number in range(1, 7):
            publisher.publish(weights(number), step=number)
            assert follower.catch_up().version == number
            assert load_file(tmp_path / "f" / "model.safetensors")["w"].tobytes() == (
                weights(number)["w"].tobytes()
            )
    with Maintainer(url, tmp_path / "work") as maintainer:
        assert maintainer.run_once().merge_count == 3
    with Follower(url, tmp_path / "late") as late:
        assert late.catch_up().step == 6
    with Follower(url, tmp_path / "part", tensors=["b"]) as part:
        part.catch_up()
        held = load_file(tmp_path / "part" / "model.safetensors")
        assert held["b"].tobytes() == weights(6)["b"].tobytes()
    assert fsck(open_stream(url), deep=True).is_whole


def test_two_publishers_on_s3(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{s3.url}/race"
    with Publisher(url, tmp_path / "a", maintain=False) as first:
        first.publish(weights(1))
        with Publisher(url, tmp_path / "b", maintain=False) as second:
            outcomes: list[object] = []

            def publish(publisher: Publisher, seed: int) -> None:
                try:
                    outcomes.append(publisher.publish(weights(seed)).version)
                except ThinwireError as error:
                    outcomes.append(type(error))

            threads = [
                Thread(target=publish, args=(publisher, seed))
                for publisher, seed in ((first, 2), (second, 3))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert set(outcomes) == {2, CommitConflict}
            assert first.head is not None
            loser = second if first.head.version == 2 else first
            with pytest.raises(Fenced):
                loser.publish(weights(4))
    assert fsck(open_stream(url), deep=True).is_whole


def test_a_store_that_ignores_conditions_is_refused(
    careless: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in careless.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsafeStore, match="put-if-absent"):
        Publisher(f"{careless.url}/run", tmp_path / "a", maintain=False)
    single = open_stream(f"{careless.url}/run", single_writer=True)
    with Publisher(single, tmp_path / "a", maintain=False) as publisher:
        assert publisher.publish(weights(1)).version == 1
