"""When a hub does not vouch for replicas, whatever they say."""

from __future__ import annotations

import random
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


def test_a_hub_that_has_just_started_does_not_know_the_fleet(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.publish()
    limits = HubLimits(fleet=FleetLimits(interval_s=60, settle_s=3.0))
    with calling(Hub({"policy": trainer.url}, poll_s=0.05, limits=limits)) as client:
        head_at(client, 1)
        said(client, beat("a", 1, lineage=lineage_of(client)))
        answer = client.get(f"{STREAM}/ready")
        assert answer.status_code == 503
        assert "has just started" in answer.json()["reason"]
        assert client.get(f"{STREAM}/ready?replica=a").status_code == 200
        until(lambda: client.get(f"{STREAM}/ready").status_code == 200, "200")
