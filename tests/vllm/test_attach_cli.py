"""``thinwire attach`` with a real vLLM: once, and for as long as it is let."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

from thinwire.engines.engine import label_of

from .attaching import Sidecar
from .checking import check_serves
from .following import Rollout
from .fresh import FreshLoads
from .gate import Gate, not_found
from .server import VllmServer


def test_once(server: VllmServer, rollout: Rollout, fresh: FreshLoads) -> None:
    for _ in range(2):
        status, lines, log = Sidecar(rollout, server.endpoint, "--once").run()
        assert status == 0, log
        (line,) = lines
        (label,) = list(rollout.models)[-1:]
        assert line["label"] == label
        assert line["version"] == len(rollout.models)
        assert (line["way"], line["cache"], line["is_proved"]) == ("attach", "reset", True)
        assert line["phases"].keys() == {
            "meet", "pause", "attach", "caches", "label", "resume", "prove",
        }  # fmt: skip
        assert 0 < line["pause_s"] < 60
        check_serves(server, rollout, fresh, label)
        rollout.change()


def test_until_it_is_stopped(
    server: VllmServer, rollout: Rollout, fresh: FreshLoads, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    port = free_port()
    with Sidecar(
        rollout, server.endpoint, f"--ready-file={ready}", f"--metrics-port={port}"
    ) as sidecar:
        assert sidecar.wait_for(1)["way"] == "attach"
        assert ready.exists()
        for number in (2, 3):
            version = rollout.change()
            line = sidecar.wait_for(number)
            assert (line["way"], line["label"]) == ("changes", label_of(version))
            check_serves(server, rollout, fresh, version)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert sidecar.stop() == 0
    assert not ready.exists()
    assert "thinwire_engine" in metrics
    # The engine goes on with what it has.
    check_serves(server, rollout, fresh, version)
    rollout.change()
    check_serves(server, rollout, fresh, version)


def test_no_engine(rollout: Rollout) -> None:
    status, lines, _ = Sidecar(rollout, f"http://127.0.0.1:{free_port()}", "--once").run()
    assert status != 0
    assert "unreachable" in json.dumps(lines)


def test_a_ready_file_does_not_outlive_the_process(rollout: Rollout, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    status, lines, _ = Sidecar(
        rollout, f"http://127.0.0.1:{free_port()}", "--once", f"--ready-file={ready}"
    ).run()
    assert status != 0
    assert "--ready-file" in json.dumps(lines)


def test_without_its_routes_the_failure_says_how_to_start_vllm(
    server: VllmServer, rollout: Rollout
) -> None:
    """They are there in vLLM's development mode only."""
    with Gate(server.port) as gate:
        gate.before = lambda route: not_found()
        status, lines, _ = Sidecar(rollout, gate.endpoint, "--once").run()
    assert status != 0
    assert "VLLM_SERVER_DEV_MODE" in json.dumps(lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
