"""The command as a process of its own: entry points, pipes, a terminal, signals."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from thinwire import __version__

from .conftest import Pair, read_files

HASTY = """
import sys
from thinwire.cli import main, progress
progress.DELAY_S = 0.0
sys.argv = ["thinwire", *sys.argv[1:]]
main()
"""
INTERRUPTED = """
import os, signal, sys
from thinwire.cli import main
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["thinwire", *sys.argv[1:]]
main()
"""


def run_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def run_on_terminal(*arguments: object) -> tuple[str, str]:
    """Stdout through a pipe, stderr on a terminal; returns what came on each."""
    ours, theirs = pty.openpty()
    command = [sys.executable, *(str(argument) for argument in arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=True
    )
    os.close(theirs)
    seen = b""
    # Reading a terminal whose other side is closed ends with an error on Linux.
    try:
        while piece := os.read(ours, 1 << 16):
            seen += piece
    except OSError:
        pass
    os.close(ours)
    return done.stdout, seen.decode()


def test_module_and_version() -> None:
    done = run_process("-m", "thinwire", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"thinwire {__version__}\n", "")


def test_importing_the_command_is_light() -> None:
    heavy = "{'torch', 'safetensors', 'rich.progress', 'thinwire.bench'}"
    done = run_process("-c", f"import sys, thinwire.cli; print({heavy} & sys.modules.keys())")
    assert done.stdout == "set()\n"


def test_no_progress_when_piped(pair: Pair, tmp_path: Path) -> None:
    done = run_process("-c", HASTY, "diff", pair.base, pair.new, "-o", tmp_path / "out.tw")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_progress_on_a_terminal(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stdout, stderr = run_on_terminal("-c", HASTY, "apply", pair.base, pair.delta, "-o", out)
    assert "apply" in stderr
    assert "\x1b" not in stdout
    assert stdout.startswith(f"{out} holds the new checkpoint")


def test_bench_progress_on_a_terminal(pair: Pair, tmp_path: Path) -> None:
    steps = [pair.new, pair.new]
    arguments = [*steps, "--rows", "thinwire", "--repetitions", 1, "--json", "-"]
    stdout, stderr = run_on_terminal("-c", HASTY, "bench", *arguments)
    assert "step 1 thinwire" in stderr
    assert stdout.startswith("{")


def test_no_progress_for_quick_work(pair: Pair) -> None:
    stdout, stderr = run_on_terminal("-m", "thinwire", "verify", pair.delta, "--base", pair.base)
    assert "rebuilt" in stdout
    assert "verify" not in stderr


def test_interrupted(pair: Pair, tmp_path: Path) -> None:
    before = read_files(pair.base)
    siblings = sorted(tmp_path.iterdir())
    for target in (["-o", tmp_path / "out"], ["--in-place"]):
        done = run_process("-c", INTERRUPTED, "apply", pair.base, pair.delta, *target)
        assert done.returncode == 130
        assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == siblings
    assert read_files(pair.base) == before


def test_an_error_has_no_traceback(pair: Pair) -> None:
    pair.delta.write_bytes(pair.delta.read_bytes()[:100])
    done = run_process("-m", "thinwire", "inspect", pair.delta)
    assert done.returncode == 3
    assert done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_names_on_a_terminal_of_less(pair: Pair) -> None:
    strange = pair.delta.with_name("d\u00e9lta\u2603.tw")
    pair.delta.rename(strange)
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "verify", str(strange)],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0
    assert b"d\\xe9lta\\u2603.tw" in done.stdout


def test_a_reader_that_goes_away(pair: Pair) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "inspect", str(pair.delta)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == ""
