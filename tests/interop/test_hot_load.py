"""Fireworks' hot-load API, called on a server of ours that really loads snapshots."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import Deadline, EngineError, InvalidArgument
from thinwire.interop.fireworks.hot_load import HotLoad, PromptCache
from thinwire.testing.hot_load_fleet import Fleet
from thinwire.testing.hot_load_server import Fault, HotLoadServer, serving

from .hot_loading import Bucket, Ticking, loaded, renew, some_weights


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


def test_a_chain_arrives_bit_for_bit(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    hot_load, weights = client(endpoint, server), [some_weights(seed) for seed in range(4)]
    for number, new in enumerate(weights):
        base = f"v{number - 1}" if number else None
        bucket.put(f"v{number}", new, weights[number - 1] if number else None)
        assert hot_load.hint(f"v{number}", "w.bin")
        assert hot_load.signal(f"v{number}", base).identity == f"v{number}"
        hot_load.wait(f"v{number}", 60)
        for name in "abc":
            assert loaded(server, name) == new.tobytes()
    assert server.hints == [(f"v{number}", "w.bin") for number in range(4)]
    assert [one.identity for one in hot_load.status()] == ["v3"] * 3
    hot_load.close()


@pytest.mark.claim("hot-load", "write", "its documented fields")
def test_what_is_sent(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    hot_load = client(endpoint, server)
    for identity in ("v1", "v2"):
        bucket.put(identity, some_weights(1), some_weights(1) if identity == "v2" else None)
    hot_load.signal("v1", reset_prompt_cache=PromptCache.NEW_SESSION)
    hot_load.wait("v1", 60)
    hot_load.signal("v2", "v1", compression_format="arc_v3", ignored_config_fields=["a", "b"])
    assert [call.body for call in server.calls if call.method == "POST"] == [
        {"identity": "v1", "reset_prompt_cache": "new_session"},
        {
            "identity": "v2",
            "incremental_snapshot_metadata": {
                "previous_snapshot_identity": "v1",
                "compression_format": "arc_v3",
                "checksum_format": "alder32",
            },
            "validation": {"extra_fields_ignore": ["a", "b"]},
        },
    ]


def test_the_status_is_described(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    bucket.put("v1", some_weights(1))
    server.fleet.failures["b"] = "disk full\nand more"
    hot_load = client(endpoint, server)
    before = hot_load.status()
    assert [(one.name, one.identity, one.target) for one in before] == [
        (name, None, None) for name in "abc"
    ]
    hot_load.signal("v1")
    hot_load.status()
    a, b, _ = hot_load.status()
    assert a.serves("v1")
    assert not b.serves("v1")
    assert (b.is_ready, b.stage, b.target, b.identity) == (True, "error", "v1", None)
    assert b.error == "RuntimeError: disk full and more"
    assert b.has_failed("v1")
    assert not b.has_failed("v0")
    assert str(b).isprintable()


def test_a_failed_replica_ends_the_wait(
    endpoint: str, server: HotLoadServer, bucket: Bucket
) -> None:
    hot_load, weights = client(endpoint, server), [some_weights(seed) for seed in range(4)]
    bucket.put("v1", weights[1])
    hot_load.signal("v1")
    hot_load.wait("v1", 60)
    bucket.put("v2", weights[2], weights[1])
    server.fleet.failures["b"] = "out of memory"
    hot_load.signal("v2", "v1")
    with pytest.raises(EngineError, match=r"given up: b: .*out of memory") as failure:
        hot_load.wait("v2", 60)
    assert "full snapshot" in failure.value.hint
    assert failure.value.context["behind"] == [("b", "v1", "error")]
    assert pickle.loads(pickle.dumps(failure.value)).context == failure.value.context
    assert loaded(server, "b") == weights[1].tobytes()
    # The others are at another snapshot now: no base fits them all.
    bucket.put("v3", weights[3], weights[2])
    with pytest.raises(EngineError, match="400") as failure:
        hot_load.signal("v3", "v2")
    assert "full one" in failure.value.hint
    bucket.put("v3-full", weights[3])
    hot_load.signal("v3-full")
    hot_load.wait("v3-full", 60)
    assert loaded(server, "b") == weights[3].tobytes()


def test_enough_replicas_may_be_some(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    bucket.put("v1", some_weights(1))
    server.fleet.stuck.add("c")
    server.fleet.failures["a"] = "broken"
    hot_load = client(endpoint, server)
    hot_load.signal("v1")
    # The first look finds a failed one, and one that loads yet.
    server.fleet.stuck.add("b")
    hot_load.status()
    server.fleet.stuck.remove("b")
    hot_load.wait("v1", 60, replica_count=1)
    with pytest.raises(EngineError, match="given up"):
        hot_load.wait("v1", 60, replica_count=3)
    server.fleet.replicas["a"].stage = "idle"
    with pytest.raises(Deadline) as failure:
        hot_load.wait("v1", 60, replica_count=2)
    assert failure.value.context["serving_count"] == 1


def test_the_deadline_names_who_is_behind(
    endpoint: str, server: HotLoadServer, bucket: Bucket
) -> None:
    ticking = Ticking()
    hot_load = client(endpoint, server, clock=ticking.clock(), poll_s=2.0)
    bucket.put("v1", some_weights(1))
    server.fleet.stuck.add("b")
    server.fleet.stages["downloading"] = "a stage nobody knows"
    hot_load.signal("v1")
    with pytest.raises(Deadline) as failure:
        hot_load.wait("v1", 7.0)
    text = str(failure.value)
    assert "2 of 3 replicas serve it, and 3 must; b: ready at None" in text
    assert "stage 'a stage nobody knows', loading 'v1'" in text
    assert failure.value.context["behind"] == [("b", None, "a stage nobody knows")]
    assert failure.value.retryable
    assert ticking.slept == [2.0, 2.0, 2.0, 1.0]
    # Looked once more at the end, and at least once.
    assert sum(call.method == "GET" for call in server.calls) == 5
    with pytest.raises(Deadline):
        hot_load.wait("v1", 0.0)
    server.fleet.stuck.clear()
    hot_load.wait("v1", 60)


def test_an_older_failure_is_not_this_ones(
    endpoint: str, server: HotLoadServer, bucket: Bucket
) -> None:
    hot_load = client(endpoint, server)
    server.fleet.failures |= dict.fromkeys("abc", "old trouble")
    hot_load.signal("v0")
    hot_load.status(), hot_load.status()
    with pytest.raises(Deadline, match="old trouble"):
        hot_load.wait("v1", 5)
    bucket.put("v1", some_weights(1))
    hot_load.signal("v1")
    hot_load.wait("v1", 60)


def test_replicas_come_and_go(endpoint: str, server: HotLoadServer, bucket: Bucket) -> None:
    ticking = Ticking()
    hot_load = client(endpoint, server, clock=ticking.clock())
    weights = [some_weights(seed) for seed in range(3)]
    bucket.put("v1", weights[1])
    hot_load.signal("v1")
    hot_load.wait("v1", 60)
    bucket.put("v2", weights[2], weights[1])
    server.fleet.stuck.add("c")
    hot_load.signal("v2", "v1")
    ticking.on_sleep = [lambda: None, lambda: None, lambda: server.fleet.remove("c")]
    hot_load.wait("v2", 60)
    with pytest.raises(Deadline, match="2 of 2 replicas serve it, and 3 must"):
        hot_load.wait("v2", 10, replica_count=3)
    server.fleet.stuck.clear()
    server.fleet.add("c")
    hot_load.wait("v2", 60, replica_count=3)
    assert loaded(server, "c") == weights[2].tobytes()
    for name in "abc":
        server.fleet.remove(name)
    with pytest.raises(Deadline, match="0 of 0 replicas"):
        hot_load.wait("v2", 10)


def test_a_replica_that_was_seen_before_is_told(endpoint: str, server: HotLoadServer) -> None:
    ticking = Ticking()
    hot_load = client(endpoint, server, clock=ticking.clock())
    server.fleet.stuck |= {"a", "b", "c"}
    ticking.on_sleep = [lambda: server.fleet.remove("c")]
    with pytest.raises(Deadline, match="0 of 2 replicas serve it, of 3 seen before"):
        hot_load.wait("v2", 10)


def test_a_reset_that_the_deployment_does_not_know(bucket: Bucket) -> None:
    server = HotLoadServer(Fleet("a", bucket.load), takes_reset=False)
    bucket.put("v1", some_weights(1))
    with serving(server) as endpoint:
        hot_load = client(endpoint, server)
        with pytest.raises(EngineError, match="Extra inputs") as failure:
            hot_load.signal("v1", reset_prompt_cache=PromptCache.ALL)
        assert "may_drop_reset" in failure.value.hint
        assert not server.fleet.ledger
        sent = hot_load.signal("v1", reset_prompt_cache=PromptCache.ALL, may_drop_reset=True)
        assert sent == ("v1", True)
        hot_load.wait("v1", 60)


def test_another_refusal_is_not_the_resets(endpoint: str, server: HotLoadServer) -> None:
    with pytest.raises(EngineError, match="is served"):
        client(endpoint, server).signal(
            "v3", "v2", reset_prompt_cache=PromptCache.ALL, may_drop_reset=True
        )
    assert len(server.calls) == 1


def test_a_reset_that_is_taken(endpoint: str, server: HotLoadServer) -> None:
    hot_load = client(endpoint, server)
    sent = hot_load.signal("v1", reset_prompt_cache=PromptCache.NONE, may_drop_reset=True)
    assert sent == ("v1", False)
    with pytest.raises(ValueError, match="sometimes"):
        hot_load.signal("v2", reset_prompt_cache="sometimes")  # type: ignore[arg-type]


def test_hints_may_be_unknown() -> None:
    server = HotLoadServer(takes_hints=False)
    with serving(server) as endpoint:
        assert not client(endpoint, server).hint("v1", "model.safetensors")
    server = HotLoadServer()
    with serving(server) as endpoint:
        assert not client(endpoint, server, hint_file_field="file").hint("v1", "m.safetensors")
        assert client(endpoint, server).hint("v1", "m.safetensors")
        server.faults.append(Fault(status=403))
        with pytest.raises(EngineError, match="403"):
            client(endpoint, server).hint("v1", "m.safetensors")
        with pytest.raises(InvalidArgument, match="file name"):
            client(endpoint, server).hint("v1", "../m.safetensors")
    assert server.hints == [("v1", "m.safetensors")]
