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


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_followers_see_the_whole_weights_of_every_step(tmp_path: Path, kind: str) -> None:
    url, folder, model = (tmp_path / "store").as_uri(), tmp_path / "trained", tmp_path / "model"
    folder.mkdir()
    tiny_model(is_tied=kind == "ddp").save_pretrained(model)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), kind, url, str(model), str(folder)],
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
    assert all(version.changed_count for version, _ in found[1:])
