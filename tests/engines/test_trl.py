"""TRL's own AsyncGRPOTrainer sends its weights through thinwire, alone and in a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed: AsyncGRPOTrainer was NOT run")

from safetensors.torch import load_file

from .making import bits, rebuilt, tiny_model, tokenizer_in

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tokenizer_in(folder)
    return folder


def test_every_version_is_the_trainers(tmp_path: Path, model: Path) -> None:
    from .async_grpo import train

    url = (tmp_path / "store").as_uri()
    worker, witness, sender = train(url, model, tokenizer_in(model), tmp_path / "out")
    # The trainer's number of each version is the stream's, and it was committed by then.
    assert worker.seen == [(1, 1), (2, 2), (3, 3), (4, 4)]
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 2, 3]
    for version, tensors in found:
        assert version.step is not None
        assert bits(tensors) == bits(witness.weights[version.step])
    assert all(version.changed_count for version, _ in found[1:])
    assert sender.head is None  # destroyed with the training


def test_in_a_job_one_rank_publishes_alone(tmp_path: Path, model: Path) -> None:
    url, folder = (tmp_path / "store").as_uri(), tmp_path / "trained"
    folder.mkdir()
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "tests.engines.async_grpo", url, model, folder],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 2, 3]
    for version, tensors in found:
        assert bits(tensors) == bits(load_file(folder / f"{version.step}.safetensors"))
