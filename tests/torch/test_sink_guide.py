"""docs/guides/torch.md is true: its examples run, its commands parse."""

from __future__ import annotations

import importlib.util
import json
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


# Each in a fork: to import torch takes longer than any of them.
RUN_EACH = """
import json, os, sys
import thinwire.torch

for number, source in enumerate(json.load(sys.stdin)):
    if pid := os.fork():
        print(number, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.mkdir(str(number))
    os.chdir(str(number))
    exec(compile(source, f"example {number}", "exec"), {"__name__": "__main__"})
    break
"""


def test_examples_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=json.dumps(EXAMPLES),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    codes = [line.split() for line in done.stdout.splitlines()]
    assert (done.stderr, done.returncode) == ("", 0)
    assert codes == [[str(number), "0"] for number in range(len(EXAMPLES))]


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
