"""docs/interop.md: its commands parse, its example runs, its table is what the tests claim."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .test_readme import ROOT, blocks, test_commands_parse, thinwire_commands

TEXT = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
COMMANDS = thinwire_commands(TEXT)


@pytest.mark.parametrize("arguments", COMMANDS, ids=shlex.join)
def test_commands(arguments: list[str]) -> None:
    test_commands_parse(arguments)


def test_commands_are_found() -> None:
    assert {arguments[0] for arguments in COMMANDS} >= {"inspect", "convert", "mirror"}


@pytest.mark.parametrize("source", blocks(TEXT, "python"))
def test_example(source: str, tmp_path: Path) -> None:
    """One defines a function and imports what there is: the deployment it needs is not here."""
    if "import torch" in source and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: this example was NOT run")
    script = tmp_path / "example.py"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_table_is_what_the_tests_claim() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "interop_table.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
