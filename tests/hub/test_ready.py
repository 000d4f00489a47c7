"""When a hub does not vouch for replicas, whatever they say."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from thinwire.follow import open_stream
from thinwire.hub import FleetLimits, Hub, HubLimits
from thinwire.store import open_store
from thinwire.testing.faults import NO_FAULTS, FaultStore, Rates

from .making import PATIENT, beat, calling, head_at, training, until
from .test_routes import STREAM, lineage_of, said


def test_a_hub_that_cannot_read_the_bucket_vouches_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.hub.board._BLIND_AFTER_S", 1.0)
    with training(tmp_path) as trainer:
        trainer.publish(step=1)
        store = FaultStore(open_store(trainer.url, retry_s=0), random.Random(0))
        hub = Hub({"policy": open_stream(store)}, poll_s=0.01, limits=PATIENT)
        with calling(hub) as client:
            head_at(client, 1)
            said(client, beat("a", 1, lineage=lineage_of(client)))

            def ready(**query: Any) -> int:
                return client.get(f"{STREAM}/ready", params=query).status_code

            assert ready(max_staleness_steps=0) == 200
            store.set_rates(Rates(fail_before=1.0))
            until(lambda: ready(max_staleness_steps=0) == 503, "doubt")
            assert ready(max_staleness_steps=0, replica="a") == 503
            reason = client.get(f"{STREAM}/ready?max_staleness_steps=0").json()["reason"]
            assert "the stream was last read" in reason
            assert ready() == 200  # how far behind was not asked
            store.set_rates(NO_FAULTS)
            until(lambda: ready(max_staleness_steps=0) == 200, "trust")


def test_another_version_of_the_same_number_is_not_ready(tmp_path: Path) -> None:
    """A stream that was set back and went on: its numbers come again, with other weights."""
    with training(tmp_path) as trainer:
        trainer.publish(step=1)
    with calling(Hub({"policy": trainer.url}, poll_s=0.05, limits=PATIENT)) as client:
        head = head_at(client, 1)["head"]

        def ready(digest: str, version: int = 1) -> Any:
            said(client, beat("a", version, lineage=head["lineage"], digest=digest))
            answer = client.get(f"{STREAM}/ready", params={"max_staleness_steps": 0})
            assert answer.status_code == (200 if answer.json()["is_ready"] else 503)
            (one,) = client.get(f"{STREAM}/replicas").json()["replicas"]
            assert one["state"] == ("ready" if answer.json()["is_ready"] else "unready")
            return answer.json()

        assert ready(head["digest"])["is_ready"]
        assert ready("")["is_ready"]  # an older replica does not say
        refused = ready("0" * 12)
        assert not refused["is_ready"]
        assert f"as a: the stream's version 1 is another one: {head['digest']}" in refused["reason"]


def test_a_stream_that_was_set_back_and_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lineage and number, and other weights: nobody may take one for the other."""
    monkeypatch.setattr("thinwire.hub.watcher._DOUBT_EVERY_S", 0.05)
    copy, stream = tmp_path / "policy-copy", tmp_path / "policy"
    with training(tmp_path) as trainer:
        trainer.publish(step=1)
    shutil.copytree(copy, tmp_path / "copy-1")
    shutil.copytree(stream, tmp_path / "stream-1")
    with training(tmp_path) as trainer:
        trainer.publish(step=2)
    with calling(Hub({"policy": trainer.url}, poll_s=0.02, limits=PATIENT)) as client:
        before = head_at(client, 2)["head"]

        def ready(head: Any) -> int:
            said(client, beat("a", 2, lineage=head["lineage"], digest=head["digest"]))
            return client.get(f"{STREAM}/ready?max_staleness_steps=0").status_code

        assert ready(before) == 200
        for path in (copy, stream):
            shutil.rmtree(path)
        (tmp_path / "copy-1").rename(copy)
        (tmp_path / "stream-1").rename(stream)
        with training(tmp_path) as trainer:
            assert trainer.publish(step=2) == 2
        after = until(
            lambda: (
                (head := client.get(STREAM).json()["head"]) is not None
                and head["version"] == 2
                and head["digest"] != before["digest"]
                and head
            )
        )
        assert after["lineage"] == before["lineage"]
        assert (ready(before), ready(after)) == (503, 200)


def test_a_hub_that_has_just_started_does_not_know_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path) as trainer:
        trainer.publish()
    limits = HubLimits(fleet=FleetLimits(interval_s=60, settle_s=3600.0))
    hub = Hub({"policy": trainer.url}, poll_s=0.05, limits=limits)
    with calling(hub) as client:
        head_at(client, 1)
        said(client, beat("a", 1, lineage=lineage_of(client)))
        answer = client.get(f"{STREAM}/ready")
        assert answer.status_code == 503
        assert "has just started" in answer.json()["reason"]
        assert client.get(f"{STREAM}/ready?replica=a").status_code == 200
        monkeypatch.setattr(hub._boards["policy"], "_settled_s", 0.0)
        assert client.get(f"{STREAM}/ready").status_code == 200
