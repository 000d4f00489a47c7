"""docs/guides/regions.md is true: its story runs as it stands, and its other commands parse."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from safetensors.numpy import load_file

from thinwire.cli.app import app

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers.py, which rooms share

from servers import free_ports

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "regions.md"
TEXT = GUIDE.read_text(encoding="utf-8")
STORY, _, REST = TEXT.partition("## What it costs")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"Save it as `(\w+\.py)`")
PROGRAMS = ("curl", "openssl", "awk", "bash")
NOT_RUN = ("pip install ",)


def commands(text: str) -> list[str]:
    """The lines behind a prompt, in order."""
    lines = "".join(body for language, body in FENCE.findall(text) if language == "console")
    return [line.removeprefix("$ ") for line in lines.splitlines() if line.startswith("$ ")]


def test_the_story_runs(tmp_path: Path) -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{missing} are not installed: docs/guides/regions.md was NOT run")
    pytest.importorskip("thinwire.hub", reason="NOT RUN: pip install 'thinwire[hub]'")
    names = SCRIPT.findall(STORY)
    programs = [body for language, body in FENCE.findall(STORY) if language == "python"]
    hub, relay = free_ports(2)

    def at_free_ports(text: str) -> str:
        return text.replace(":8765", f":{hub}").replace(":8766", f":{relay}")

    for name, body in zip(names, programs, strict=True):
        (tmp_path / name).write_text(at_free_ports(body))
    lines = [line for line in commands(STORY) if not line.startswith(NOT_RUN)]
    # The hub listens where it does unless told otherwise.
    story = at_free_ports("\n".join(lines)).replace("thinwire hub ", f"thinwire hub --port {hub} ")
    # Job control, as at a prompt: `kill %2` needs it.
    (tmp_path / "story.sh").write_text(f"set -em\n{story}\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        "HOME": str(tmp_path),
        "PATH": path,
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "story.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "story.sh"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(240)
        finally:
            end_session(process.pid)
    shown = (tmp_path / "story.log").read_text(errors="replace")
    assert code == 0, shown[-4000:]
    assert "503" not in re.findall(r"^\d{3}$", shown, re.MULTILINE)
    assert shown.count("\nTrue\n") == 2
    (fetched,), (given,) = (
        re.findall(rf"^thinwire_relay_{which}_bytes_total{{\S*}} (\S+)$", shown, re.MULTILINE)
        for which in ("upstream", "served")
    )
    weights_bytes = 2 * 200_000
    # A whole model and two deltas for each of two replicas, fetched once.
    assert float(given) > 1.9 * float(fetched) > weights_bytes
    weights = load_file(tmp_path / "checkpoint" / "model.safetensors")["layer.weight"]
    held = load_file(tmp_path / "us" / "replica-1" / "model.safetensors")["layer.weight"]
    assert held.tobytes() == weights.tobytes()
    assert '"current_snapshot_identity": "version_000003"' in shown


def end_session(leader: int) -> None:
    """End whatever the story left behind: each job of it has a process group of its own."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


@pytest.mark.parametrize(
    "command", [line.strip() for line in commands(TEXT) if line.strip().startswith("thinwire ")]
)
def test_commands_parse(command: str) -> None:
    words = shlex.split(command.removesuffix("&"), comments=True)[1:]
    words = [word.replace("$KEY", "0" * 64) for word in words]
    group = typer.main.get_command(app)
    with group.make_context("thinwire", list(words)) as context:
        _, found, rest = group.resolve_command(context, words)
        assert found is not None
        found.make_context(found.name, list(rest), parent=context).close()


@pytest.mark.parametrize("command", [c for c in commands(REST) if c.startswith("thinwire plan")])
def test_the_plans_can_be_made(command: str) -> None:
    program = Path(sys.executable).with_name("thinwire")
    done = subprocess.run(
        [program, *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    for word in ("time to all replicas", "a join", "egress"):
        assert word in done.stdout


def test_the_simulated_cut_can_be_played() -> None:
    (options,) = re.findall(r"`(--simulate \d+ --cut [\d:]+)`", REST)
    (first, _) = [c for c in commands(REST) if c.startswith("thinwire plan")]
    program = Path(sys.executable).with_name("thinwire")
    done = subprocess.run(
        [program, *shlex.split(first)[1:], *options.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
