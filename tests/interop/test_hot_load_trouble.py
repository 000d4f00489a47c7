"""Fireworks' hot-load API where things go wrong: the network, the service, the arguments."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import (
    Deadline,
    EngineError,
    EngineUnreachable,
    InvalidArgument,
    LimitExceeded,
    ThinwireError,
)
from thinwire.interop.fireworks.hot_load import HotLoad
from thinwire.interop.hot_load_calls import MAX_ANSWER_BYTES
from thinwire.testing.hot_load_server import Fault, HotLoadServer, serving

from .hot_loading import Bucket, Ticking, json_with, loaded, renew, some_weights


def client(endpoint: str, server: HotLoadServer | None = None, **options: Any) -> HotLoad:
    options.setdefault("key", server.key if server else "any")
    options.setdefault("clock", Ticking().clock())
    return HotLoad("acme", "m", "d", endpoint=endpoint, **options)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[HotLoadServer, str]]:
    """One server for all tests: to stop one takes a moment."""
    server = HotLoadServer()
    with serving(server) as endpoint:
        yield server, endpoint


@pytest.fixture
def server(shared: tuple[HotLoadServer, str], bucket: Bucket) -> HotLoadServer:
    """That one, as new."""
    return renew(shared[0], bucket)


@pytest.fixture
def endpoint(shared: tuple[HotLoadServer, str]) -> str:
    return shared[1]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_status_is_asked_again(endpoint: str, server: HotLoadServer, status: int) -> None:
    ticking = Ticking()
    hot_load = client(endpoint, server, clock=ticking.clock())
    server.faults = [Fault(status=status)] * 3
    assert len(hot_load.status()) == 3
    assert ticking.slept == [0.5, 1.0, 2.0]
    server.faults = [Fault(status=status)] * 4
    with pytest.raises(EngineError, match=str(status)):
        hot_load.status()


@pytest.mark.parametrize(
    ("status", "hint"),
    [(400, "full one"), (401, "key"), (403, "key"), (404, "deployment"), (409, "full"), (425, "")],
)
def test_refusals_are_not_asked_again(
    endpoint: str, server: HotLoadServer, status: int, hint: str
) -> None:
    hot_load = client(endpoint, server)
    for call in (
        hot_load.status,
        lambda: hot_load.signal("v1"),
        lambda: hot_load.wait("v1", 60),
    ):
        server.calls.clear()
        server.faults = [Fault(status=status, body=b'{"message": "n\\u00f6"}')]
        with pytest.raises(EngineError, match=str(status)) as failure:
            call()
        assert failure.value.context["status"] == status
        assert hint in failure.value.hint
        assert len(server.calls) == 1


def test_waiting_outlasts_trouble(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    bucket.put("v1", some_weights(1))
    hot_load = client(endpoint, server)
    hot_load.signal("v1")
    server.faults = [Fault(status=503), Fault(is_cut=True), Fault(status=429), Fault(status=500)]
    hot_load.wait("v1", 60)
    server.faults = [Fault(status=503)] * 100
    with pytest.raises(Deadline, match=r"never answered; the last question failed: .*503"):
        hot_load.wait("v2", 20)
    server.faults = [Fault(status=503)]
    with pytest.raises(Deadline, match="0 of 3 replicas") as failure:
        hot_load.wait("v2", 20)
    assert "failed" not in str(failure.value)


def test_a_signal_that_was_refused_for_now_is_sent_again(
    endpoint: str, server: HotLoadServer
) -> None:
    ticking = Ticking()
    server.faults = [Fault(status=429)] * 3
    client(endpoint, server, clock=ticking.clock()).signal("v1")
    assert [call.method for call in server.calls] == ["POST"] * 4
    assert ticking.slept == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(is_late=True, is_cut=True, method="POST"),
        Fault(is_late=True, status=502, method="POST"),
        Fault(is_late=True, status=200, body=b'{"a": ', method="POST"),
    ],
)
def test_a_lost_answer_is_found_in_the_status(
    endpoint: str, server: HotLoadServer, bucket: Bucket, fault: Fault
) -> None:
    bucket.put("v1", some_weights(1))
    hot_load = client(endpoint, server)
    server.faults = [fault, Fault(status=503, method="GET")]
    assert hot_load.signal("v1") == ("v1", False)
    hot_load.wait("v1", 60)
    # An identity is never signalled twice.
    assert [call.method for call in server.calls].count("POST") == 1
    assert loaded(server) == some_weights(1).tobytes()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(is_cut=True, method="POST"), EngineUnreachable),
        (Fault(status=500, method="POST"), EngineError),
    ],
)
def test_a_signal_that_never_arrived(
    endpoint: str, server: HotLoadServer, fault: Fault, kind: type[ThinwireError]
) -> None:
    ticking = Ticking()
    server.faults = [fault]
    with pytest.raises(kind):
        client(endpoint, server, clock=ticking.clock()).signal("v1")
    assert [call.method for call in server.calls].count("POST") == 1
    assert not server.fleet.ledger
    assert ticking.now_s == 15.0


def test_a_slow_answer() -> None:
    server = HotLoadServer()
    with serving(server) as endpoint:
        hot_load = client(endpoint, server, call_timeout_s=0.3)
        server.faults = [Fault(delay_s=0.8, method="POST")]
        with pytest.raises(Deadline):
            hot_load.signal("v1")
        server.faults = [Fault(delay_s=0.8)]
        assert len(hot_load.status()) == 2
        assert [call.method for call in server.calls].count("POST") == 1


def test_nobody_there() -> None:
    ticking = Ticking()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        hot_load = client(
            f"http://127.0.0.1:{held.getsockname()[1]}", clock=ticking.clock(), key="k"
        )
        for call in (hot_load.status, lambda: hot_load.signal("v1")):
            with pytest.raises(EngineUnreachable) as failure:
                call()
            assert failure.value.context["sent"] is False
        with pytest.raises(Deadline, match="never answered"):
            hot_load.wait("v1", 3)


def many(count: int) -> bytes:
    return json.dumps({"replicas": [{}] * count}).encode()


ADAPTERS = {"loaded_adapters": [{"identity": "x", "status": "loaded"}] * (1 << 14)}


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"", EngineError, "otherwise than Fireworks documents"),
        (b"null", EngineError, "otherwise"),
        (b"[]", EngineError, "otherwise"),
        (b"{}", EngineError, "replicas"),
        (b'{"replicas": null}', EngineError, "otherwise"),
        (b'{"replicas": {"a": 1}}', EngineError, "otherwise"),
        (b'{"replicas": [1]}', EngineError, "otherwise"),
        (b'{"replicas": [{"readiness": "yes"}]}', EngineError, "readiness"),
        (b'{"replicas": [{"readiness": 1}]}', EngineError, "readiness"),
        (b'{"replicas": [{"current_snapshot_identity": 7}]}', EngineError, "identity"),
        (b'{"replicas": [{"loading_state": []}]}', EngineError, "loading_state"),
        (b'{"replicas": [{"loading_state": {"stage": {}}}]}', EngineError, "stage"),
        (b'{"replicas": [{"loaded_adapters": [[]]}]}', EngineError, "loaded_adapters"),
        (b'{"replicas": [', EngineError, "not JSON"),
        (b"[" * 100_000, EngineError, "not JSON"),
        (b'{"replicas": ' + b"9" * 100_000 + b"}", EngineError, "not JSON"),
        (b"x" * (MAX_ANSWER_BYTES + 1), EngineError, f"more than {MAX_ANSWER_BYTES}"),
        (many((1 << 14) + 1), LimitExceeded, "16385 replicas"),
        (json.dumps({"replicas": [ADAPTERS] * 2}).encode(), LimitExceeded, "32768 adapters"),
    ],
)
def test_answers_that_are_none(
    endpoint: str, server: HotLoadServer, body: bytes, kind: type[ThinwireError], said: str
) -> None:
    hot_load = client(endpoint, server)
    for call in (hot_load.status, lambda: hot_load.wait("v1", 60)):
        server.faults = [Fault(status=200, body=body)]
        with pytest.raises(kind, match=said) as failure:
            call()
        assert len(str(failure.value)) < 1000
        assert str(failure.value).isprintable()
        assert not server.faults


REPLICA_KEYS = (
    "readiness",
    "current_snapshot_identity",
    "loading_state",
    "stage",
    "target_snapshot_identity",
    "error",
    "loaded_adapters",
    "identity",
    "status",
    "replica_id",
)


@given(st.lists(json_with(*REPLICA_KEYS), max_size=3))
@settings(max_examples=80, deadline=None)
def test_any_json_is_described_or_refused(
    shared: tuple[HotLoadServer, str], replicas: list[Any]
) -> None:
    server, endpoint = shared
    server.faults = [Fault(status=200, body=json.dumps({"replicas": replicas}).encode())]
    try:
        described = client(endpoint, server).status()
    except EngineError as error:
        texts = [str(error)]
    else:
        assert len(described) == len(replicas)
        texts = [f"{one} {one.serves('v1')} {one.has_failed('v1')}" for one in described]
    assert all(text.isprintable() for text in texts)


def test_answers_with_less_and_more(endpoint: str, server: HotLoadServer) -> None:
    hot_load = client(endpoint, server)
    body = {
        "replicas": [
            {},
            {"readiness": None, "loading_state": None, "loaded_adapters": None, "new": [1]},
            {"replica_id": 7, "loading_state": {"stage": None, "error": {"why": "\x1b[31m" * 999}}},
            {"readiness": True, "loaded_adapters": [{"identity": "v1", "status": "loaded"}, {}]},
            {"readiness": True, "loaded_adapters": [{"identity": "v1", "status": "loading"}]},
            {"readiness": False, "current_snapshot_identity": "v1"},
            {"current_snapshot_identity": "v1"},
            {"readiness": True, "current_snapshot_identity": "v1"},
        ],
        "more": {},
    }
    server.faults = [Fault(status=200, body=json.dumps(body).encode())]
    replicas = hot_load.status()
    assert [place for place, one in enumerate(replicas) if one.serves("v1")] == [3, 7]
    assert [place for place, one in enumerate(replicas) if one.mentions("v1")] == [3, 4, 5, 6, 7]
    assert [one.name for one in replicas][1:3] == ["replica 1", "7"]
    assert len(str(replicas[2])) < 300
    assert str(replicas[2]).isprintable()


def test_an_error_without_a_target_is_waited_out(endpoint: str, server: HotLoadServer) -> None:
    body = {"replicas": [{"readiness": True, "loading_state": {"stage": "error"}}]}
    server.faults = [Fault(status=200, body=json.dumps(body).encode())] * 20
    with pytest.raises(Deadline, match="stage 'error'"):
        client(endpoint, server).wait("v1", 6)


@contextmanager
def moving_server() -> Iterator[str]:
    """Answers everything with a redirect to itself, and counts the keys it gets there."""

    class Moving(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    moving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Moving)
    threading.Thread(target=moving.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{moving.server_address[1]}"
    moving.shutdown()
    moving.server_close()


def test_redirects_are_not_followed() -> None:
    with moving_server() as endpoint, pytest.raises(EngineError, match="307"):
        client(endpoint).status()


# --- What is refused before anything is sent


def test_the_key_is_never_shown(endpoint: str, server: HotLoadServer) -> None:
    key = "k3y-that-nobody-may-see"
    hot_load = client(endpoint, server, key=key)
    with pytest.raises(EngineError, match="401") as failure:
        hot_load.status()
    server.faults = [Fault(status=400, body=f"Bearer {key}".encode(), kind="text/plain")]
    with pytest.raises(EngineError) as echoed:
        hot_load.signal("v1")
    for text in (repr(hot_load), str(failure.value), repr(echoed.value.context), str(echoed.value)):
        assert key not in text


@pytest.mark.parametrize(
    "endpoint", ["http://api.fireworks.ai", "http://10.0.0.1:80", "http://127.0.0.1.example.com"]
)
def test_a_key_goes_over_https_or_stays_here(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="unencrypted"):
        client(endpoint)


@pytest.mark.parametrize("endpoint", ["http://[::1]:1", "http://localhost:1", "http://127.0.0.9:1"])
def test_this_host_needs_no_https(endpoint: str) -> None:
    client(endpoint)
    assert "https://api.fireworks.ai" in repr(HotLoad("a", "m", "d", key="k"))


@pytest.mark.parametrize(
    ("account", "model", "deployment"),
    [
        ("", "m", "d"),
        ("a", "", "d"),
        ("a", "m", "d/e"),
        ("a", "accounts/b/deployments/m", "d"),
        ("a", "accounts/b/models/m/n", "d"),
        ("a", "m\r\nx: y", "d"),
        ("..", "m", "d"),
        ("a", "m", "\u00fc"),
    ],
)
def test_names_that_are_none(account: str, model: str, deployment: str) -> None:
    with pytest.raises(InvalidArgument, match="make no name"):
        HotLoad(account, model, deployment, key="k")


def test_a_model_may_be_another_accounts() -> None:
    hot_load = HotLoad("acme", "accounts/fireworks/models/qwen3-8b", "d", key="k")
    assert hot_load.model == "accounts/fireworks/models/qwen3-8b"
    assert hot_load.deployment == "accounts/acme/deployments/d"


def test_arguments_that_are_none(endpoint: str, server: HotLoadServer) -> None:
    hot_load = client(endpoint, server)
    for call in (
        lambda: hot_load.signal("a/b"),
        lambda: hot_load.signal("v2", "a/b"),
        lambda: hot_load.signal("v2", "v2"),
        lambda: hot_load.signal("v2", "v1", compression_format="arc_v9"),
        lambda: hot_load.hint("..", "file"),
        lambda: hot_load.wait("", 1),
        lambda: hot_load.wait("v1", 1, replica_count=0),
        lambda: client(endpoint, server, call_timeout_s=0),
        lambda: client(endpoint, key=""),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert not server.calls
