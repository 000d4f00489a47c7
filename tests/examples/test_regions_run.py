"""examples/regions in its quick form: a death, a birth, an outage, and no wrong weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "reasoning_gym", "safetensors", "starlette", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed: the example was NOT run")

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900
PICTURES = ("staleness.svg", "bytes.svg", "reward.svg")


def test_the_quick_run(tmp_path: Path) -> None:
    command = [sys.executable, "examples/regions/run.py", "--quick", "--work", str(tmp_path)]
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        shown, _ = started.communicate(timeout=TIMEOUT_S)
    finally:
        # It removes all it made, also then.
        started.terminate()
        started.wait()
    assert started.returncode == 0, shown
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    if "NO NAMESPACES" not in shown:
        assert not [name for name in namespaces() if name.startswith(prefix(started.pid))]
    assert [path.name for path in tmp_path.iterdir()] == ["report"]

    assert found["bars"]["right weights"][0] == "PASS", found["bars"]
    samplers = found["samplers"]
    (killed,) = [name for name, sampler in samplers.items() if sampler["is_killed"]]
    last = found["versions"]
    assert samplers.pop(killed)["versions"][-1] < last
    assert all(sampler["versions"][-1] == last for sampler in samplers.values())
    assert samplers["europe-2"]["versions"][0] > 1

    check_the_outage(found)
    for region in found["traffic"].values():
        # A toy: its weights change nearly all in each step.
        assert region["sync_bytes"] / region["versions"] < region["full_bytes"]
    report = (tmp_path / "report" / "report.md").read_text()
    for picture in PICTURES:
        assert f"({picture})" in report
        assert (tmp_path / "report" / picture).read_text().startswith("<svg")


def check_the_outage(found: dict[str, Any]) -> None:
    """What was missed came as merged deltas: fewer objects than versions."""
    cut_off = found["samplers"]["asia-1"]
    assert any(what == "merge" for what, _, _ in cut_off["fetched"]), cut_off["fetched"]
    assert len(cut_off["versions"]) < found["versions"]


def namespaces() -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in shown.stdout.splitlines()]


def prefix(pid: int) -> str:
    return f"thinwire-regions-{pid}-"
