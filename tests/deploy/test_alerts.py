"""deploy/prometheus: rules parse, fire when they should, and ask for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from thinwire import Publisher
from thinwire.observe.prometheus import PrometheusObserver
from thinwire.relay.metrics import metrics_text
from thinwire.relay.relay import Folders, StreamRelay
from thinwire.relay.sending import Budget
from thinwire.store import open_store

from .hubs import FOLLOW, READ, hub_at, until

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the alerts were NOT tested")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
METRIC = re.compile(r"\bthinwire_[a-z0-9_]+")


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus): the alerts were NOT tried")
    return subprocess.run(
        [program, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scrape_configuration_is_valid() -> None:
    done = promtool("check", "config", "--syntax-only", "scrape.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_fire_when_they_should() -> None:
    done = promtool("test", "rules", "alerts_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_and_a_row_in_the_runbook() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if "exp_alerts" in case
    }
    assert set(names) == fired
    runbook = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in runbook] == []


def test_each_alert_says_what_and_how_bad() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}


def families(text: str) -> set[str]:
    """The names that an expression may use for what is exported."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    names = {name for name, _ in found}
    names |= {f"{name}_bucket" for name, kind in found if kind == "histogram"}
    return {name for name in names if name.startswith("thinwire_")}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a trainer, a follower, a hub and a relay really show to Prometheus."""
    root = tmp_path_factory.mktemp("exported")
    url = str(root / "bucket")
    with Publisher(url, root / "state", maintain=False) as publisher:
        head = publisher.publish({"w": np.zeros(100, np.float32)}, step=1)
    beat = {
        "replica": "r",
        "region": "eu",
        "is_ready": True,
        "lineage": head.lineage,
        "version": head.version,
    }
    registry = CollectorRegistry()
    PrometheusObserver(registry)
    names = families(generate_latest(registry).decode())
    relay = StreamRelay("policy", open_store(url), Folders.at(root / "cache", 1 << 24))
    names |= families(metrics_text([relay], Budget()))
    with (
        hub_at(url) as hub,
        hub_at(str(root / "none")) as blind,
        httpx.Client(trust_env=False) as client,
    ):
        told = client.post(
            f"{hub}/v1/streams/policy/heartbeats",
            content=json.dumps(beat),
            headers={"authorization": f"Bearer {FOLLOW}", "content-type": "application/json"},
        )
        assert told.status_code == 200
        client.headers["authorization"] = f"Bearer {READ}"

        def shown(of: str) -> set[str]:
            return families(client.get(f"{of}/metrics").text)

        until(lambda: "thinwire_hub_staleness_steps" in shown(hub), "the hub has looked")
        until(lambda: "thinwire_hub_look_failures_total" in shown(blind), "a look has failed")
        return names | shown(hub) | shown(blind)


def test_what_alerts_ask_for_is_exported(exported: set[str]) -> None:
    asked = {name for rule in rules() for name in METRIC.findall(rule["expr"])}
    assert asked
    assert asked - exported == set()


def test_what_the_runbook_lists_is_exported(exported: set[str]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = set(METRIC.findall(text))
    assert len(listed) > 30
    assert listed - exported == set()
