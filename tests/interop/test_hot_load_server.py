"""The test server itself: it refuses what the services' pages do not allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from thinwire.testing.hot_load_fleet import Fleet, Snapshot
from thinwire.testing.hot_load_server import (
    DEPLOYMENT,
    DEPLOYMENT_ID,
    MODEL,
    Fault,
    HotLoadServer,
    serving,
)

FIREWORKS = "/hot_load/v1/models/hot_load"
COREWEAVE = "/v1alpha1/inference/hotLoads"
KEY = {"authorization": "Bearer a-key-of-tests"}
NAMES = {"fireworks-model": MODEL, "fireworks-deployment": DEPLOYMENT}
DELTA = {
    "previous_snapshot_identity": "v1",
    "compression_format": "arc_v2",
    "checksum_format": "alder32",
}
CAMEL_DELTA = {
    "previousSnapshotIdentity": "v1",
    "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
    "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
}
CREATE = {
    "deploymentId": DEPLOYMENT_ID,
    "identity": "v2",
    "type": "SNAPSHOT_TYPE_FULL",
    "hotLoadId": "33333333-3333-4333-8333-333333333333",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[HotLoadServer, httpx.Client]]:
    server = HotLoadServer()
    with (
        serving(server) as endpoint,
        httpx.Client(base_url=endpoint, trust_env=False, verify=False, headers=KEY) as http,
    ):
        yield server, http


@pytest.fixture
def server(shared: tuple[HotLoadServer, httpx.Client]) -> HotLoadServer:
    """A server whose replicas serve v1."""
    vars(shared[0]).update(vars(HotLoadServer()))
    shared[0].fleet.start(Snapshot("v1"))
    shared[0].fleet.step()
    shared[0].fleet.step()
    return shared[0]


@pytest.fixture
def http(shared: tuple[HotLoadServer, httpx.Client]) -> httpx.Client:
    return shared[1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"identity": "v2"}, None),
        ({"identity": "v2", "incremental_snapshot_metadata": DELTA}, None),
        ({"identity": "v2", "reset_prompt_cache": "new_session"}, None),
        ({"identity": "v2", "validation": {"extra_fields_ignore": ["a"]}}, None),
        ({"identity": "x" * 128}, None),
        ({}, "identity: Field required"),
        ([], "no table"),
        ({"identity": 7}, "no text"),
        ({"identity": ""}, "empty"),
        ({"identity": "a/b"}, "no path segment"),
        ({"identity": ".."}, "no path segment"),
        ({"identity": "x" * 129}, "too long"),
        ({"identity": "v1"}, "was used before"),
        ({"identity": "v2", "more": 1}, "Extra inputs are not permitted"),
        ({"identity": "v2", "reset_prompt_cache": True}, "all, none or new_session"),
        ({"identity": "v2", "validation": {"extra_fields_ignore": "a"}}, "a list of names"),
        ({"identity": "v2", "incremental_snapshot_metadata": {}}, "Field required"),
        *(
            ({"identity": "v2", "incremental_snapshot_metadata": {**DELTA, **change}}, said)
            for change, said in [
                ({"previous_snapshot_identity": "v0"}, "'v1' is served"),
                ({"previous_snapshot_identity": None}, "'v1' is served"),
                ({"compression_format": "zstd"}, "compression_format: one of"),
                ({"checksum_format": "adler32"}, "checksum_format: one of"),
                ({"more": 1}, "Extra inputs"),
            ]
        ),
    ],
)
def test_signals_of_fireworks(
    server: HotLoadServer, http: httpx.Client, body: Any, said: str | None
) -> None:
    answer = http.post(FIREWORKS, json=body, headers=NAMES)
    assert answer.status_code == (200 if said is None else 400)
    assert said is None or said in answer.json()["message"]
    assert (len(server.fleet.ledger) == 2) is (said is None)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (NAMES, 200),
        ({}, 400),
        ({"fireworks-model": MODEL}, 400),
        ({**NAMES, "fireworks-model": "accounts/acme/models/other"}, 404),
        ({**NAMES, "fireworks-deployment": "d"}, 404),
        ({**NAMES, "authorization": "Bearer other"}, 401),
        ({**NAMES, "authorization": ""}, 401),
        ({**NAMES, "authorization": "a-key-of-tests"}, 401),
    ],
)
def test_headers_of_fireworks(
    server: HotLoadServer, http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    assert http.get(FIREWORKS, headers=headers).status_code == status
    assert http.post(FIREWORKS, json={"identity": "v2"}, headers=headers).status_code == status
    hint = {"identity": "v2", "filename": "f"}
    assert http.post(f"{FIREWORKS}/hint", json=hint, headers=headers).status_code == status


def test_bodies_that_are_none(server: HotLoadServer, http: httpx.Client) -> None:
    kind = {**NAMES, "content-type": "application/json"}
    assert http.post(FIREWORKS, content=b"{", headers=kind).status_code == 400
    assert http.post(FIREWORKS, content=b"{}", headers=NAMES).status_code == 400
    assert http.post(FIREWORKS, content=b" " * (2 << 20), headers=kind).status_code == 413


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"type": "SNAPSHOT_TYPE_INCREMENTAL", "incrementalSnapshotMetadata": CAMEL_DELTA}, 200),
        ({"promptCachePolicy": "PROMPT_CACHE_POLICY_PRESERVE"}, 200),
        ({"promptCachePolicy": "all"}, 400),
        ({"deploymentId": "another"}, 404),
        ({"identity": "a/b"}, 400),
        ({"hotLoadId": "not-a-uuid"}, 400),
        ({"type": 1}, 400),
        ({"type": "SNAPSHOT_TYPE_UNSPECIFIED"}, 400),
        ({"type": "SNAPSHOT_TYPE_INCREMENTAL"}, 400),
        ({"incrementalSnapshotMetadata": CAMEL_DELTA}, 400),
        ({"incremental_snapshot_metadata": CAMEL_DELTA}, 400),
        *(
            (
                {
                    "type": "SNAPSHOT_TYPE_INCREMENTAL",
                    "incrementalSnapshotMetadata": {**CAMEL_DELTA, **wrong},
                },
                400,
            )
            for wrong in (
                {"previousSnapshotIdentity": "v0"},
                {"compressionFormat": "arc_v2"},
                {"checksumFormat": "alder32"},
                {"more": 1},
            )
        ),
    ],
)
def test_requests_of_coreweave(
    server: HotLoadServer, http: httpx.Client, change: dict[str, Any], status: int
) -> None:
    answer = http.post(COREWEAVE, json={**CREATE, **change})
    assert answer.status_code == status
    assert (len(server.fleet.ledger) == 2) is (status == 200)
    assert http.post(COREWEAVE, json=CREATE, headers={"authorization": ""}).status_code == 401


def test_one_at_a_time(server: HotLoadServer, http: httpx.Client) -> None:
    assert http.post(COREWEAVE, json=CREATE).status_code == 200
    path = f"{COREWEAVE}/{CREATE['hotLoadId']}"
    assert http.post(COREWEAVE, json=CREATE).json()["code"] == "already_exists"
    another = {**CREATE, "hotLoadId": "4" * 8 + CREATE["hotLoadId"][8:]}
    states = []
    for _ in range(4):
        states.append(http.get(path).json()["hotLoad"]["status"]["state"][len("HOT_LOAD_STATE_") :])
        if len(states) < 2:
            refused = http.post(COREWEAVE, json=another)
            assert refused.json()["code"] == "failed_precondition"
    assert states == ["IN_PROGRESS", "COMPLETED", "COMPLETED", "COMPLETED"]
    assert http.post(COREWEAVE, json=another).status_code == 200
    assert http.get(f"{COREWEAVE}/none").status_code == 404
    assert http.get(f"{COREWEAVE}/none/replicas").status_code == 404
    assert http.get(f"{path}/replicas", params={"pageToken": "x"}).status_code == 400


def test_replicas_advance_with_each_question(server: HotLoadServer, http: httpx.Client) -> None:
    def ask() -> tuple[Any, ...]:
        one = http.get(FIREWORKS, headers=NAMES).json()["replicas"][0]
        state = one["loading_state"]
        return one["readiness"], one["current_snapshot_identity"], state["stage"]

    assert ask() == (True, "v1", "idle")
    server.fleet.start(Snapshot("v2"))
    assert ask() == (False, "v1", "loading")
    assert ask() == (True, "v2", "idle")


def test_a_load_is_all_or_nothing() -> None:
    def load(snapshot: Snapshot, held: list[str] | None) -> list[str]:
        if snapshot.identity == "bad":
            raise ValueError("a bad file")
        return [*(held or [] if snapshot.base else []), snapshot.identity]

    fleet = Fleet(["a"], load)
    for snapshot in (Snapshot("v1"), Snapshot("v2", "v1"), Snapshot("bad", "v2")):
        fleet.start(snapshot)
        assert fleet.is_loading()
        fleet.step(), fleet.step()
        assert not fleet.is_loading()
    one = fleet.replicas["a"]
    assert (one.held, one.identity, one.target) == (["v1", "v2"], "v2", "bad")
    assert (one.stage, one.error) == ("error", "ValueError: a bad file")
    # One that starts anew loads the whole chain.
    fleet.start(Snapshot("v3", "v2"))
    fleet.add("b")
    fleet.step(), fleet.step()
    assert fleet.replicas["b"].held == ["v1", "v2", "v3"]
    assert fleet.current() == "v3"


def test_faults(server: HotLoadServer, http: httpx.Client) -> None:
    server.faults = [Fault(method="POST", status=418, body=b"tea", kind="text/plain")]
    assert http.get(FIREWORKS, headers=NAMES).status_code == 200
    answer = http.post(FIREWORKS, json={"identity": "v2"}, headers=NAMES)
    assert (answer.status_code, answer.text) == (418, "tea")
    assert "v2" not in server.fleet.ledger
    server.faults = [Fault(is_late=True, is_cut=True)]
    with pytest.raises(httpx.RemoteProtocolError):
        http.post(FIREWORKS, json={"identity": "v2"}, headers=NAMES)
    assert "v2" in server.fleet.ledger
    assert server.calls[-1].body == {"identity": "v2"}
