"""ThinwireCallback in real jobs of two ranks: DDP and FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed: its callback was NOT tested in a job"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: NOT tested in a job")

from safetensors.torch import load_file

from .making import bits, rebuilt, tiny_model

SCRIPT = Path(__file__).with_name("rank_training.py")
TIMEOUT_S = 300
KINDS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of trainings of every kind that have ended."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in KINDS:
        tiny_model(is_tied=kind == "ddp").save_pretrained(folder / kind / "model")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *KINDS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_followers_see_the_whole_weights_of_every_step(
    trained: Path, tmp_path: Path, kind: str
) -> None:
    folder = trained / kind
    found = rebuilt((folder / "store").as_uri(), tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 2, 3]
    for version, tensors in found:
        assert bits(tensors) == bits(load_file(folder / f"{version.step}.safetensors"))
    assert all(version.changed_count for version, _ in found[1:])
