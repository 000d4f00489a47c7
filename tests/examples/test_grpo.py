"""examples/grpo.py in its quick form: two real processes, proved versions, a reward that rises."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

for package in ("torch", "transformers", "reasoning_gym", "safetensors"):
    pytest.importorskip(package, reason=f"{package} is not installed: the example was NOT run")

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


def run(work: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "examples/grpo.py", "--work", str(work), *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_the_quick_run(tmp_path: Path) -> None:
    done = run(tmp_path, "--quick", "--steps", "16", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    steps = len(rows)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))

    # The proof, made by digests that thinwire has no part in.
    assert all(row["is_equal"] for row in rows)
    assert f"equal the trainer's of that step: yes ({steps} of {steps}, BLAKE3)" in done.stdout
    assert f"weights of its step: yes ({steps + 1} of {steps + 1} rebuilt)" in done.stdout

    # Asynchronous, within bounds, and not one version behind for ever.
    assert 1 <= max(row["staleness"] for row in rows) <= 2
    assert statistics.median(row["ratio"] for row in rows) == pytest.approx(1, abs=0.1)

    rewards, third = [row["reward"] for row in rows], steps // 3
    rise = statistics.fmean(rewards[-third:]) - statistics.fmean(rewards[:third])
    assert rise > 0.05, done.stdout

    assert all(row["payload_bytes"] < row["raw_bytes"] / 3 for row in rows)
    if "arc_v3 is NOT MEASURED" not in done.stdout:
        assert all(row["payload_bytes"] < 0.8 * row["arc_bytes"] for row in rows)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, forgotten afterwards: others have modules of these names, too."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name in ("report", "digests"):
        sys.modules.pop(name, None)
    yield importlib.import_module("report")
    for name in ("report", "digests"):
        sys.modules.pop(name, None)


def test_a_wrong_digest_is_found(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The proof can fail: what the sampler held is compared, not believed."""

    def record(step: int, sampled_step: int = 0, sampled_digest: str = "a") -> SimpleNamespace:
        batch = {"batch": 0, "version": 1, "step": sampled_step, "digest": sampled_digest}
        return SimpleNamespace(step=step, batch=batch)

    digests = {0: "a", 1: "b", 2: "c"}
    start, first = record(0), record(1)
    assert report.prove_sampled([start, first, record(2, 1, "b")], digests)
    assert not report.prove_sampled([start, first, record(2, 1, "a")], digests)
    assert not report.prove_sampled([start, first, record(2, 7, "b")], digests)
    assert capsys.readouterr().out.count("NOT the weights of its step") == 2
