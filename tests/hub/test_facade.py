"""Fireworks' routes: our own client of theirs works against the hub, unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from thinwire.errors import Deadline, EngineError
from thinwire.hub import Hub
from thinwire.interop.fireworks.hot_load import HotLoad, PromptCache
from thinwire.web import Role

from .making import PATIENT, TOKENS, Trainer, head_at, known_tokens, listening, training, until

STREAM = "/v1/streams/policy"
ROUTE = "/hot_load/v1/models/hot_load"
HEADERS = {
    "fireworks-model": "accounts/acme/models/m",
    "fireworks-deployment": "accounts/acme/deployments/policy",
}


class Scene:
    """A trainer, a hub with tokens, a client of each kind."""

    def __init__(self, trainer: Trainer, url: str) -> None:
        self.trainer = trainer
        self.hot_load = HotLoad(
            "acme", "m", "policy", key=TOKENS[Role.PUBLISH], endpoint=url, poll_s=0.02
        )
        self.http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {TOKENS[Role.FOLLOW]}"}
        )

    def says(self, replica: str, version: int, **more: Any) -> None:
        lineage = self.http.get(STREAM).json()["head"]["lineage"] if version else ""
        said = {"replica": replica, "version": version, "lineage": lineage, **more}
        assert self.http.post(f"{STREAM}/heartbeats", json=said).status_code == 200


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with training(tmp_path) as trainer:
        hub = Hub({"policy": trainer.url}, tokens=known_tokens(), poll_s=3600, limits=PATIENT)
        with listening(hub) as url:
            made = Scene(trainer, url)
            with made.http:
                yield made
            made.hot_load.close()


def test_a_trainer_signals_and_waits(scene: Scene) -> None:
    scene.trainer.publish(identity="run-a")
    scene.hot_load.signal("run-a")
    head_at(scene.http, 1)
    scene.says("eu", 0)
    scene.says("us", 0)
    with pytest.raises(Deadline, match=r"0 of 2 replicas serve it.*loading 'run-a'"):
        scene.hot_load.wait("run-a", 0.2)
    for replica in ("eu", "us"):
        scene.says(replica, 1, is_ready=True)
    scene.hot_load.wait("run-a", 10, replica_count=2)
    # The next is signalled before it is in the bucket, and found without another word.
    scene.hot_load.signal("run-b", "run-a", compression_format="arc_v2")
    one, _ = scene.hot_load.status()
    assert (one.identity, one.target, one.stage) == ("run-a", "run-b", "pending")
    scene.trainer.publish(identity="run-b")
    head_at(scene.http, 2)
    waiting = threading.Thread(target=scene.hot_load.wait, args=("run-b", 30))
    waiting.start()
    scene.says("eu", 1, is_ready=True, phase="fetch", target=2)
    one, _ = scene.hot_load.status()
    assert (one.name, one.is_ready, one.identity) == ("eu", True, "run-a")
    assert (one.stage, one.target) == ("downloading", "run-b")
    for replica in ("eu", "us"):
        scene.says(replica, 2, is_ready=True)
    waiting.join(30)
    assert not waiting.is_alive()
    assert [one.identity for one in scene.hot_load.status()] == ["run-b", "run-b"]


@pytest.mark.parametrize("identity", ["version_000002", "version-2", "step_000070"])
def test_an_identity_may_be_a_versions_number_or_step(scene: Scene, identity: str) -> None:
    scene.trainer.publish(60)
    scene.trainer.publish(70)
    scene.hot_load.signal(identity)
    head_at(scene.http, 2)
    scene.says("eu", 2, is_ready=True)
    scene.hot_load.wait(identity, 10)
    scene.says("eu", 1, is_ready=True)
    (one,) = scene.hot_load.status()
    assert (one.identity, one.target) == ("version_000000000001", identity)


@pytest.mark.parametrize("identity", ["step_000001", "run-1", "conversion_1", "version_3"])
def test_what_names_no_version(scene: Scene, identity: str) -> None:
    """A step is no version, and a name that happens to end in a number is neither."""
    scene.trainer.publish(60)
    scene.trainer.publish(70)
    scene.hot_load.signal(identity)
    head_at(scene.http, 2)
    scene.says("eu", 1, is_ready=True)
    (one,) = scene.hot_load.status()
    assert (one.identity, one.target) == ("version_000000000001", identity)


def test_an_error_is_shown_and_is_no_end(scene: Scene) -> None:
    scene.trainer.publish(identity="x")
    scene.hot_load.signal("x")
    head_at(scene.http, 1)
    scene.says("eu", 0, fault={"code": "unavailable", "message": "no space", "at_ms": 1})
    with pytest.raises(Deadline, match="no space"):
        scene.hot_load.wait("x", 0.2)
    scene.says("eu", 1, is_ready=True)
    scene.hot_load.wait("x", 10)


def test_a_hint_makes_the_hub_look_often(scene: Scene) -> None:
    scene.trainer.publish()
    assert scene.hot_load.hint("run-a", "model.safetensors")
    head_at(scene.http, 1)
    assert scene.hot_load.hint("run-b", "model.safetensors")
    scene.trainer.publish()
    head_at(scene.http, 2)


def test_prompt_caches_are_the_replicas(scene: Scene) -> None:
    scene.trainer.publish(identity="x")
    with pytest.raises(EngineError, match="reset_prompt_cache"):
        scene.hot_load.signal("x", reset_prompt_cache=PromptCache.ALL)
    done = scene.hot_load.signal("x", reset_prompt_cache=PromptCache.ALL, may_drop_reset=True)
    assert done.is_reset_dropped


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"fireworks-model": "m"}, {"identity": "x"}, 400),
        (
            {**HEADERS, "fireworks-deployment": "accounts/acme/deployments/no"},
            {"identity": "x"},
            404,
        ),
        ({**HEADERS, "fireworks-model": ""}, {"identity": "x"}, 422),
        (HEADERS, {}, 422),
        (HEADERS, {"identity": ""}, 422),
        (HEADERS, {"identity": "x" * 129}, 422),
        (HEADERS, {"identity": "x", "incremental_snapshot_metadata": []}, 422),
    ],
)
def test_what_is_refused(scene: Scene, headers: Any, body: Any, status: int) -> None:
    token = {"authorization": f"Bearer {TOKENS[Role.PUBLISH]}"}
    answer = scene.http.post(ROUTE, json=body, headers={**headers, **token})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_only_a_publisher_signals(scene: Scene) -> None:
    answer = scene.http.post(ROUTE, json={"identity": "x"}, headers=HEADERS)
    assert answer.status_code == 403
    assert scene.http.get(ROUTE, headers=HEADERS).status_code == 200


def test_relays_and_those_who_left_are_none_of_the_deployments(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.publish(identity="x")
        hub = Hub({"policy": trainer.url}, poll_s=0.05, limits=PATIENT)
        with listening(hub) as url, httpx.Client(base_url=url) as client:
            head_at(client, 1)
            client.post(f"{STREAM}/heartbeats", json={"replica": "relay", "kind": "relay"})
            client.post(f"{STREAM}/heartbeats", json={"replica": "a"})
            shown = client.get(ROUTE, headers=HEADERS).json()["replicas"]
            assert [one["replica_id"] for one in shown] == ["a"]
            assert shown[0] == {
                "replica_id": "a",
                "readiness": False,
                "current_snapshot_identity": None,
                "loading_state": {"stage": "idle"},
                "loaded_adapters": [],
            }
            until(lambda: client.delete(f"{STREAM}/replicas/a").status_code == 204)
            assert client.get(ROUTE, headers=HEADERS).json() == {"replicas": []}


def test_what_a_restarted_hub_calls_versions(tmp_path: Path) -> None:
    """Names in metadata are in the bucket; those of signals are gone until they are signalled."""
    shown = []
    with training(tmp_path) as trainer:
        trainer.publish(step=7)
        trainer.publish(step=8, identity="run-b")
        for _ in range(2):
            hub = Hub({"policy": trainer.url}, poll_s=0.05, limits=PATIENT)
            with listening(hub) as url, httpx.Client(base_url=url, headers=HEADERS) as client:
                lineage = head_at(client, 2)["head"]["lineage"]
                until(lambda: len(client.get(f"{STREAM}/versions").json()["versions"]) == 2)
                for name, version in (("a", 1), ("b", 2), ("c", 1)):
                    said = {"replica": name, "version": version, "is_ready": True}
                    said["lineage"] = lineage if name != "c" else "e" * 32
                    client.post(f"{STREAM}/heartbeats", json=said)
                for _ in range(2):
                    found = client.get(ROUTE).json()["replicas"]
                    shown.append([one["current_snapshot_identity"] for one in found])
                    client.post(ROUTE, json={"identity": "step_7"})
                # Ready with what the stream does not have is not ready here.
                assert [one["readiness"] for one in found] == [True, True, False]
    unnamed, named = ["version_000000000001", "run-b", None], ["step_7", "run-b", None]
    assert shown == [unnamed, named] * 2
