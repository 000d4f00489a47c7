"""CoreWeave's hot-load API where things go wrong: the network, the service, the arguments."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from thinwire.errors import (
    Deadline,
    EngineError,
    EngineUnreachable,
    InvalidArgument,
)
from thinwire.interop.coreweave import CoreWeaveHotLoad, hot_load_id
from thinwire.testing.hot_load_server import DEPLOYMENT_ID, Fault, HotLoadServer, serving

from .hot_loading import Bucket, Ticking, json_with, loaded, renew, some_weights


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


def posts(server: HotLoadServer) -> int:
    return sum(call.method == "POST" for call in server.calls)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(is_late=True, is_cut=True, method="POST"),
        Fault(is_late=True, status=503, method="POST"),
        Fault(is_cut=True, method="POST"),
        Fault(status=429, method="POST"),
        Fault(status=500, method="POST"),
    ],
)
def test_a_lost_answer(endpoint: str, server: HotLoadServer, bucket: Bucket, fault: Fault) -> None:
    bucket.put("v1", some_weights(1))
    hot_load = client(endpoint, server)
    server.faults = [fault]
    assert hot_load.signal("v1").identity == "v1"
    assert posts(server) == 2
    hot_load.wait("v1", 60)
    assert loaded(server) == some_weights(1).tobytes()


def test_a_lost_answer_and_then_a_refusal(endpoint: str, server: HotLoadServer) -> None:
    # Its own hot-load is the one that is unfinished.
    busy = Fault(status=400, body=b'{"code": "failed_precondition"}', method="POST")
    server.faults = [Fault(is_late=True, is_cut=True, method="POST"), busy]
    assert client(endpoint, server).signal("v1").identity == "v1"


def test_all_that_are_listed_are_not_all(endpoint: str, server: HotLoadServer) -> None:
    hot_load = client(endpoint, server)
    hot_load.signal("v1")
    one = {"replicas": [{"state": "READY", "currentSnapshotIdentity": "v1"}]}
    answers = [{"hotLoad": {"spec": SPEC, "status": {"state": "HOT_LOAD_STATE_IN_PROGRESS"}}}, one]
    server.faults = [Fault(status=200, body=json.dumps(answer).encode()) for answer in answers]
    with pytest.raises(Deadline, match="1 of 1 replicas serve it"):
        hot_load.wait("v1", 0)


@pytest.mark.parametrize(
    ("status", "hint"), [(400, "128"), (401, "key"), (403, "key"), (404, "deployment"), (409, "")]
)
def test_refusals(endpoint: str, server: HotLoadServer, status: int, hint: str) -> None:
    hot_load = client(endpoint, server)
    for call in (
        lambda: hot_load.signal("v1"),
        lambda: hot_load.status("v1"),
        lambda: hot_load.replicas("v1"),
        lambda: hot_load.wait("v1", 60),
    ):
        server.faults = [Fault(status=status)]
        with pytest.raises(EngineError, match=str(status)) as failure:
            call()
        assert failure.value.context["status"] == status
        assert hint in failure.value.hint
    assert posts(server) == 1


def test_waiting_outlasts_trouble(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    bucket.put("v1", some_weights(1))
    hot_load = client(endpoint, server)
    hot_load.signal("v1")
    server.faults = [Fault(status=503), Fault(is_cut=True), Fault(status=429), Fault(status=500)]
    hot_load.wait("v1", 60)
    server.faults = [Fault(status=500)] * 100
    with pytest.raises(Deadline, match=r"never answered; the last question failed: .*500"):
        hot_load.wait("v1", 10)


def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        hot_load = client(f"http://127.0.0.1:{held.getsockname()[1]}")
        with pytest.raises(EngineUnreachable):
            hot_load.signal("v1")
        with pytest.raises(Deadline, match="never answered"):
            hot_load.wait("v1", 3)


SPEC = {"id": hot_load_id(DEPLOYMENT_ID, "v1"), "identity": "v1", "deploymentId": DEPLOYMENT_ID}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "documents"),
        ([], "documents"),
        ({}, "hotLoad"),
        ({"hotLoad": None}, "documents"),
        ({"hotLoad": {"spec": {}}}, "id"),
        ({"hotLoad": {"spec": {**SPEC, "id": 7}}}, "id"),
        ({"hotLoad": {"spec": SPEC, "status": []}}, "status"),
        ({"hotLoad": {"spec": SPEC, "status": {"state": 3}}}, "state"),
        ({"hotLoad": {"spec": SPEC, "status": {"conditions": [7]}}}, "conditions"),
        ({"hotLoad": {"spec": {**SPEC, "snapshotChain": {}}}}, "snapshotChain"),
        ({"hotLoad": {"spec": {**SPEC, "id": "another"}}}, "is of"),
        ({"hotLoad": {"spec": {**SPEC, "identity": "v2"}}}, "is of"),
        ({"hotLoad": {"spec": {**SPEC, "deploymentId": "another"}}}, "is of"),
    ],
)
def test_answers_that_are_none(
    endpoint: str, server: HotLoadServer, answer: Any, said: str
) -> None:
    server.faults = [Fault(status=200, body=json.dumps(answer).encode())]
    with pytest.raises(EngineError, match=said) as failure:
        client(endpoint, server).signal("v1")
    assert str(failure.value).isprintable()
    assert len(str(failure.value)) < 1000
    assert posts(server) == 1


OPERATION_KEYS = (
    "spec",
    "status",
    "id",
    "identity",
    "deploymentId",
    "type",
    "incrementalSnapshotMetadata",
    "snapshotChain",
    "state",
    "conditions",
    "message",
)


@given(json_with(*OPERATION_KEYS))
@settings(max_examples=80, deadline=None)
def test_any_json_is_described_or_refused(shared: tuple[HotLoadServer, str], said: Any) -> None:
    server, endpoint = shared
    spec = {**SPEC, **said} if isinstance(said, dict) else SPEC
    for answer in ({"hotLoad": said}, {"hotLoad": {"spec": spec, "status": said}}):
        server.faults = [Fault(status=200, body=json.dumps(answer).encode())]
        try:
            text = client(endpoint, server).status("v1").state
        except EngineError as error:
            text = str(error)
        assert text.isprintable()


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"replicas": null}', b'{"replicas": [], "more": 1}'],
)
def test_no_replicas(endpoint: str, server: HotLoadServer, body: bytes) -> None:
    server.faults = [Fault(status=200, body=body)]
    assert client(endpoint, server).replicas("v1") == ()


@pytest.mark.parametrize(
    "body", [b"[]", b'{"replicas": 7}', b'{"replicas": [{"state": 7}]}', b'{"nextPageToken": 1}']
)
def test_replicas_that_are_none(endpoint: str, server: HotLoadServer, body: bytes) -> None:
    server.faults = [Fault(status=200, body=body)]
    with pytest.raises(EngineError, match="documents"):
        client(endpoint, server).replicas("v1")


def test_arguments_that_are_none(endpoint: str, server: HotLoadServer) -> None:
    hot_load = client(endpoint, server)
    for call in (
        lambda: hot_load.signal("a/b"),
        lambda: hot_load.signal("v2", ""),
        lambda: hot_load.signal("v2", "v2"),
        lambda: hot_load.status(".."),
        lambda: hot_load.wait("v1", 1, replica_count=0),
        lambda: CoreWeaveHotLoad("my-deployment", key="k"),
        lambda: client("http://api.coreweave.com"),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert not server.calls
    assert "https://api.coreweave.com" in repr(CoreWeaveHotLoad(DEPLOYMENT_ID, key="k"))
