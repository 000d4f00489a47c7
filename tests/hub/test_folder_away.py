"""A hub whose stream's folder goes away: moved, or with an empty one in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.follow import open_stream
from thinwire.hub import Hub

from .making import PATIENT, calling, head_at, training, until

STREAM = "/v1/streams/policy"


@pytest.mark.parametrize("is_empty", [False, True], ids=["moved", "an empty one"])
def test_it_is_a_fault_until_it_is_back(is_empty: bool, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    with training(tmp_path) as trainer:
        trainer.publish()
        hub = Hub({"policy": open_stream(trainer.url, retry_s=0)}, poll_s=0.01, limits=PATIENT)
        with calling(hub) as client:
            head_at(client, 1)

            def fault() -> Any:
                return client.get(STREAM).json()["fault"]

            assert fault() is None
            folder.rename(tmp_path / "away")
            if is_empty:
                folder.mkdir()
            assert until(fault, "a fault")["code"] == "unavailable"
            # What it knows stays known.
            assert client.get(STREAM).json()["head"]["version"] == 1
            if is_empty:
                folder.rmdir()
            (tmp_path / "away").rename(folder)
            trainer.publish()
            head_at(client, 2)
            assert fault() is None


def test_a_stream_that_is_yet_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    stream = open_stream(tmp_path / "policy", retry_s=0)
    with calling(Hub({"policy": stream}, poll_s=0.01, limits=PATIENT)) as client:
        assert until(lambda: client.get(STREAM).json()["fault"])["code"] == "not-found"
        with training(tmp_path) as trainer:
            trainer.publish()
            head_at(client, 1)
