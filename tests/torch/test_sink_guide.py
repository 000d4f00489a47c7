"""docs/guides/torch.md is true: its examples run, its commands parse."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: its guide was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import typer

from thinwire.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "torch.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [body for language, body in FENCE.findall(GUIDE) if language == "python"]
COMMANDS = [
    line.removeprefix("$ thinwire ")
    for language, body in FENCE.findall(GUIDE)
    if language == "console"
    for line in body.splitlines()
    if line.startswith("$ thinwire ")
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[number]],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    arguments = shlex.split(command)
    group = typer.main.get_command(app)
    with group.make_context("thinwire", list(arguments)) as context:
        _, found, rest = group.resolve_command(context, arguments)
        assert found is not None
        found.make_context(found.name, list(rest), parent=context).close()


def test_there_is_something_to_run() -> None:
    assert len(EXAMPLES) >= 3
    assert len(COMMANDS) >= 2
