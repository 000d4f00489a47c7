"""docs/guides/huggingface.md is true: its commands run, on servers of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from servers import S3Server, free_ports
from thinwire.testing import hf_server

from .hf_gateway import hf_gateway

pytest.importorskip("huggingface_hub", reason="NOT RUN: pip install 'thinwire[hf]'")

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "huggingface.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall(GUIDE.read_text(encoding="utf-8"))
S3_COMMANDS, HF_COMMANDS = (
    [line.removeprefix("$ ") for line in body.splitlines()]
    for language, body in BLOCKS
    if language == "console"
)
# Set by the test instead.
NOT_RUN = ("export ", "pip install ", "hf auth login")


def run(commands: list[str], folder: Path, environment: dict[str, str], bucket: str) -> None:
    """Run them one after the other where a checkpoint ``step-1`` lies."""
    (folder / "step-1").mkdir()
    weights = {"w": np.arange(5_000, dtype=np.float16)}
    save_file(weights, folder / "step-1" / "model.safetensors")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        if command.startswith(NOT_RUN):
            continue
        done = subprocess.run(
            command.replace("my-bucket", bucket),
            shell=True,
            cwd=folder,
            env={"HOME": str(folder), "PATH": path, "NO_PROXY": "127.0.0.1", **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    held = load_file(folder / "live" / "model.safetensors")
    assert held["w"].tobytes() == weights["w"].tobytes()


def test_the_gateways_commands_run(seaweedfs_server: S3Server, tmp_path: Path) -> None:
    with hf_gateway(seaweedfs_server) as gateway:
        run(S3_COMMANDS, tmp_path, gateway.server.environment, gateway.server.bucket)
        assert gateway.broken_rules == []
        assert gateway.redirected


def test_the_hubs_commands_run(tmp_path: Path) -> None:
    with hf_server.running(*free_ports(2)) as endpoint:
        environment = {
            "HF_ENDPOINT": endpoint,
            "HF_TOKEN": hf_server.WRITE_TOKEN,
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_XET_TELEMETRY_ENABLED": "0",
        }
        run(HF_COMMANDS, tmp_path, environment, "my-bucket")


def test_the_python_runs() -> None:
    (example,) = [body for language, body in BLOCKS if language == "python"]
    shown = "from huggingface_hub import get_session; print(get_session().timeout.read)"
    done = subprocess.run(
        [sys.executable, "-c", example + shown], capture_output=True, text=True, check=True
    )
    assert done.stdout == "60\n"
