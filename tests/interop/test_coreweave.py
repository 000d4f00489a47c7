"""CoreWeave's hot-load API, called on a server of ours that really loads snapshots."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import (
    Deadline,
    EngineError,
    LimitExceeded,
)
from thinwire.interop import coreweave
from thinwire.interop.coreweave import (
    MAX_CHAIN_DELTAS,
    CoreWeaveHotLoad,
    PromptCachePolicy,
    hot_load_id,
    request_body,
)
from thinwire.interop.hot_load_calls import MAX_REPLICAS
from thinwire.testing import hot_load_server
from thinwire.testing.hot_load_fleet import Fleet
from thinwire.testing.hot_load_server import DEPLOYMENT_ID, Fault, HotLoadServer, serving

from .hot_loading import Bucket, Ticking, loaded, renew, some_weights


def client(endpoint: str, server: HotLoadServer | None = None, **options: Any) -> CoreWeaveHotLoad:
    options.setdefault("key", server.key if server else "any")
    options.setdefault("clock", Ticking().clock())
    return CoreWeaveHotLoad(DEPLOYMENT_ID, endpoint=endpoint, **options)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[HotLoadServer, str]]:
    """One server for all tests: to stop one takes a moment."""
    server = HotLoadServer()
    with serving(server) as endpoint:
        yield server, endpoint


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


@pytest.fixture
def server(shared: tuple[HotLoadServer, str], bucket: Bucket) -> HotLoadServer:
    """That one, as new."""
    return renew(shared[0], bucket)


@pytest.fixture
def endpoint(shared: tuple[HotLoadServer, str]) -> str:
    return shared[1]


@pytest.mark.claim("coreweave", "write", "a server of ours with its fields")
def test_a_chain_arrives_bit_for_bit(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    hot_load, weights = client(endpoint, server), [some_weights(seed) for seed in range(3)]
    for number, new in enumerate(weights):
        base = f"v{number - 1}" if number else None
        bucket.put(f"v{number}", new, weights[number - 1] if number else None)
        operation = hot_load.signal(f"v{number}", base)
        assert (operation.identity, operation.base) == (f"v{number}", base)
        assert operation.state == "HOT_LOAD_STATE_PENDING"
        hot_load.wait(f"v{number}", 60)
        for name in "abc":
            assert loaded(server, name) == new.tobytes()
    status = hot_load.status("v2")
    assert status.state == "HOT_LOAD_STATE_COMPLETED"
    assert status.chain == ("v0", "v1", "v2")
    assert [one.serves("v2") for one in hot_load.replicas("v2")] == [True] * 3
    assert [one.name for one in hot_load.replicas("v2")] == ["z/a", "z/b", "z/c"]
    assert DEPLOYMENT_ID in repr(hot_load)
    hot_load.close()


@pytest.mark.claim("coreweave", "write", "its documented fields")
def test_the_fields_are_camel_case(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    hot_load = client(endpoint, server)
    bucket.put("v1", some_weights(1))
    hot_load.signal("v1", prompt_cache_policy=PromptCachePolicy.RESET_ALL)
    hot_load.wait("v1", 60)
    hot_load.signal("v2", "v1")
    first, second = (call.body for call in server.calls if call.method == "POST")
    assert first == {
        "deploymentId": DEPLOYMENT_ID,
        "identity": "v1",
        "type": "SNAPSHOT_TYPE_FULL",
        "hotLoadId": hot_load_id(DEPLOYMENT_ID, "v1"),
        "promptCachePolicy": "PROMPT_CACHE_POLICY_RESET_ALL",
    }
    assert second == {
        "deploymentId": DEPLOYMENT_ID,
        "identity": "v2",
        "type": "SNAPSHOT_TYPE_INCREMENTAL",
        "hotLoadId": hot_load_id(DEPLOYMENT_ID, "v2"),
        "incrementalSnapshotMetadata": {
            "previousSnapshotIdentity": "v1",
            "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
            "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
        },
    }
    assert second == request_body(DEPLOYMENT_ID, "v2", "v1")


def test_ids_are_uuids_and_stay() -> None:
    ids = {hot_load_id(DEPLOYMENT_ID, f"v{number}") for number in range(100)}
    assert len(ids) == 100
    assert all(str(uuid.UUID(one)) == one for one in ids)
    assert hot_load_id(DEPLOYMENT_ID, "v1") == "a657dba8-ed3b-54b8-b82f-632854dd6080"


def test_one_at_a_time(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    hot_load = client(endpoint, server)
    bucket.put("v1", some_weights(1))
    hot_load.signal("v1")
    with pytest.raises(EngineError, match="unfinished") as failure:
        hot_load.signal("v2")
    assert "one hot-load at a time" in failure.value.hint
    assert failure.value.context["status"] == 400
    # The same once more finds what runs.
    assert hot_load.signal("v1").state == "HOT_LOAD_STATE_IN_PROGRESS"
    hot_load.wait("v1", 60)
    assert hot_load.signal("v1").state == "HOT_LOAD_STATE_COMPLETED"


def test_an_identity_is_for_one_snapshot(
    endpoint: str, server: HotLoadServer, bucket: Bucket
) -> None:
    hot_load = client(endpoint, server)
    for identity in ("v1", "v2"):
        bucket.put(identity, some_weights(1))
        hot_load.signal(identity)
        hot_load.wait(identity, 60)
    with pytest.raises(EngineError, match=r"is of .*not") as failure:
        hot_load.signal("v2", "v1")
    assert "new identity" in failure.value.hint


def test_a_chain_has_an_end(
    endpoint: str, server: HotLoadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hot_load_server.MAX_CHAIN_DELTAS == MAX_CHAIN_DELTAS == 128
    monkeypatch.setattr(hot_load_server, "MAX_CHAIN_DELTAS", 5)
    server.fleet = Fleet(["a"])
    hot_load = client(endpoint, server)
    for number in range(6):
        hot_load.signal(f"v{number}", f"v{number - 1}" if number else None)
        hot_load.wait(f"v{number}", 60)
    with pytest.raises(EngineError, match="more than 5 deltas") as failure:
        hot_load.signal(f"v{number + 1}", f"v{number}")
    assert "at most 128" in failure.value.hint
    # A full one begins another chain.
    hot_load.signal("full")
    hot_load.wait("full", 60)
    hot_load.signal("next", "full")


def test_a_failed_load(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    hot_load, weights = client(endpoint, server), [some_weights(seed) for seed in range(3)]
    bucket.put("v0", weights[0])
    hot_load.signal("v0")
    hot_load.wait("v0", 60)
    bucket.put("v1", weights[1], weights[0])
    server.fleet.failures["b"] = "out of memory"
    hot_load.signal("v1", "v0")
    with pytest.raises(EngineError, match=r"ended in HOT_LOAD_STATE_FAILED: .*memory") as failure:
        hot_load.wait("v1", 60)
    assert "full snapshot under a new identity" in failure.value.hint
    with pytest.raises(EngineError, match="FAILED"):
        hot_load.signal("v1", "v0")
    assert hot_load.status("v1").problems
    assert loaded(server, "b") == weights[0].tobytes()
    bucket.put("v1-full", weights[1])
    hot_load.signal("v1-full")
    hot_load.wait("v1-full", 60)
    assert loaded(server, "b") == weights[1].tobytes()


def test_the_deadline_names_who_is_behind(
    endpoint: str, server: HotLoadServer, bucket: Bucket
) -> None:
    ticking = Ticking()
    hot_load = client(endpoint, server, clock=ticking.clock(), poll_s=4.0)
    bucket.put("v1", some_weights(1))
    server.fleet.stuck.add("b")
    hot_load.signal("v1")
    with pytest.raises(Deadline, match="2 of 3 replicas serve it; z/b: 'UPDATING'") as failure:
        hot_load.wait("v1", 10)
    assert failure.value.context["behind"] == [("z/b", "", "UPDATING")]
    assert failure.value.context["state"] == "HOT_LOAD_STATE_IN_PROGRESS"
    assert ticking.slept == [4.0, 4.0, 2.0]
    hot_load.wait("v1", 10, replica_count=2)
    server.fleet.stuck.clear()
    hot_load.wait("v1", 10)
    # One that comes back holds nothing yet.
    server.fleet.add("d")
    with pytest.raises(Deadline, match="z/d"):
        hot_load.wait("v1", 0)
    hot_load.wait("v1", 10)
    for name in "abcd":
        server.fleet.remove(name)
    with pytest.raises(Deadline, match="0 of 0"):
        hot_load.wait("v1", 10)


def test_replicas_come_in_pages(endpoint: str, server: HotLoadServer) -> None:
    names = [f"r{number:03}" for number in range(100)]
    server = renew(server, Bucket(Path()), page_replicas=7)
    server.fleet = Fleet(names)
    hot_load = client(endpoint, server)
    hot_load.signal("v1")
    hot_load.wait("v1", 60, replica_count=100)
    assert [one.name for one in hot_load.replicas("v1")] == [f"z/{name}" for name in names]


def test_pages_without_end(
    endpoint: str, server: HotLoadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot_load = client(endpoint, server)
    page = json.dumps({"replicas": [{"state": "READY"}] * 5000, "nextPageToken": "again"})
    server.faults = [Fault(status=200, body=page.encode())] * 10
    with pytest.raises(LimitExceeded, match=str(MAX_REPLICAS)):
        hot_load.replicas("v1")
    monkeypatch.setattr(coreweave, "_MAX_PAGES", 30)
    server.faults = [Fault(status=200, body=b'{"nextPageToken": "again"}')] * 60
    with pytest.raises(LimitExceeded, match="30 pages"):
        hot_load.replicas("v1")


@pytest.mark.parametrize(
    ("state", "is_ready"),
    [
        ("READY", True),
        ("HOT_LOAD_REPLICA_STATE_READY", True),
        ("NOT_READY", False),
        ("REPLICA_STATE_NOT_READY", False),
        ("", False),
        ("a state nobody knows", False),
    ],
)
def test_states_of_replicas(
    endpoint: str, server: HotLoadServer, state: str, is_ready: bool
) -> None:
    body = {"replicas": [{"state": state, "currentSnapshotIdentity": "v1"}]}
    server.faults = [Fault(status=200, body=json.dumps(body).encode())]
    (replica,) = client(endpoint, server).replicas("v1")
    assert replica.name == "replica 0"
    assert replica.serves("v1") is is_ready
    assert not replica.serves("v2")
