"""What Prometheus reads: few series, whatever the size of the fleet."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from thinwire.hub import Hub

from .making import PATIENT, beat, calling, head_at, training, until

STREAM = "/v1/streams/policy"


def test_metrics(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        for number in range(1, 4):
            trainer.publish(step=10 * number)
        urls = {"policy": trainer.url, "none": str(tmp_path / "none")}
        hub = Hub(urls, poll_s=0.05, limits=PATIENT)
        with calling(hub) as client:
            lineage = head_at(client, 3)["head"]["lineage"]
            until(lambda: client.get("/v1/streams/none").json()["fault"])
            until(lambda: len(client.get(f"{STREAM}/versions").json()["versions"]) == 3)
            for number in range(100):
                region = ("eu", "us")[number % 2]
                version = 3 if number % 10 else 2
                said = beat(f"r{number}", version, lineage=lineage, region=region)
                client.post(
                    f"{STREAM}/heartbeats",
                    content=msgspec.json.encode(said),
                    headers={"content-type": "application/json"},
                )
            client.get("/v1/streams/policy/nothing")
            client.request("BREW", STREAM)
            answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    values: dict[tuple[str, ...], float] = {}
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = sample.labels
            values[(sample.name, *(labels[name] for name in sorted(labels)))] = sample.value
            counts[family.name] += 1
    assert values["thinwire_hub_head_version", "policy"] == 3
    assert values["thinwire_hub_head_step", "policy"] == 30
    assert 0 <= values["thinwire_hub_head_age_seconds", "policy"] < 60
    assert 0 <= values["thinwire_hub_looked_age_seconds", "policy"] < 60
    assert ("thinwire_hub_looked_age_seconds", "none") not in values
    assert values["thinwire_hub_fault", "none"] == 1
    assert values["thinwire_hub_look_failures_total", "not-found", "none"] >= 1
    assert values["thinwire_hub_replicas", "eu", "ready", "policy"] == 50
    assert values["thinwire_hub_staleness_steps", "0.5", "eu", "policy"] == 0
    # All those that are behind are in "eu": a fifth of it.
    assert values["thinwire_hub_staleness_steps", "0.95", "eu", "policy"] == 10
    assert values["thinwire_hub_staleness_steps", "1", "us", "policy"] == 0
    assert values["thinwire_hub_staleness_seconds_max", "eu", "policy"] > 0
    route = "/v1/streams/{stream}/heartbeats"
    assert values["thinwire_hub_requests_total", "POST", route, "200"] == 100
    assert values["thinwire_hub_requests_total", "other", "other", "404"] == 1
    assert values["thinwire_hub_requests_total", "other", "/v1/streams/{stream}", "405"] == 1
    assert max(counts.values()) <= 20
    assert "r17" not in answer.text
