"""deploy/systemd: systemd takes the units, finds them locked down, and what they start parses."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from thinwire.cli.app import app

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
NAMES = sorted(path.name for path in UNITS.glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
SYSTEM = Path("/usr/lib/systemd/system")
# Of 100; systemd calls all up to 24 "OK". Whoever talks to a bucket needs sockets and the network.
MAX_EXPOSURE = 20


def settings(name: str) -> list[tuple[str, str]]:
    lines = (UNITS / name).read_text().splitlines()
    found = [line.partition("=") for line in lines if line[:1] not in ("", "#", "[")]
    return [(key, value) for key, _, value in found]


def environment(name: str) -> dict[str, str]:
    """What the example of its environment file says."""
    stem = re.sub(r"^thinwire-|@?\.service$", "", name)
    lines = (UNITS / f"{stem}.env").read_text().splitlines()
    found = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {key: value for key, _, value in found}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which all that the units need lies, and they themselves."""
    if ANALYZE is None or not SYSTEM.is_dir():
        pytest.skip("systemd-analyze is not installed: the units of deploy/systemd were NOT linted")
    for folder in ("etc/systemd/system", "usr/lib/systemd/system", "opt/thinwire/bin", "usr/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for path in (*SYSTEM.glob("*.target"), *SYSTEM.glob("*.slice"), *SYSTEM.glob("*.socket")):
        shutil.copy(path, tmp_path / "usr/lib/systemd/system")
    for program in ("opt/thinwire/bin/thinwire", "usr/bin/install"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    for name in NAMES:
        shutil.copy(UNITS / name, tmp_path / "etc/systemd/system")
    return tmp_path


def analyze(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    command = [ANALYZE, *arguments[:1], f"--root={root}", *arguments[1:]]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )


def test_systemd_takes_them(root: Path) -> None:
    for name in NAMES:
        done = analyze(root, "verify", "--man=no", name.replace("@.", "@policy."))
        # It warns of what it does not know, and exits with 0.
        assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_unit_would_be_found(root: Path) -> None:
    path = root / "etc/systemd/system/thinwire-hub.service"
    path.write_text(path.read_text().replace("MemoryMax=", "MemoryMost="))
    assert "MemoryMost" in analyze(root, "verify", "--man=no", path.name).stderr


@pytest.mark.parametrize("name", NAMES)
def test_they_are_locked_down(root: Path, name: str) -> None:
    done = analyze(
        root, "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", "--no-pager", name
    )
    assert done.returncode == 0, done.stdout[-500:]


@pytest.mark.parametrize("name", NAMES)
def test_what_they_start_parses(name: str) -> None:
    values = dict(settings(name))
    start = values["ExecStart"]
    for variable, value in environment(name).items():
        start = start.replace(f"${{{variable}}}", value).replace(f"${variable}", value)
    assert "$" not in start, "a variable that the example of the environment file does not have"
    start = re.sub(r"%[a-zA-Z]", "/x", start)
    program, *arguments = shlex.split(start)
    assert program == "/opt/thinwire/bin/thinwire"
    group = typer.main.get_command(app)
    with group.make_context("thinwire", list(arguments)) as context:
        _, command, rest = group.resolve_command(context, arguments)
        assert command is not None
        command.make_context(command.name, list(rest), parent=context).close()


@pytest.mark.parametrize("name", NAMES)
def test_they_come_back_and_have_limits(name: str) -> None:
    values = dict(settings(name))
    assert values["Restart"] == "on-failure"
    assert values["StartLimitIntervalSec"] == "0"
    assert values["RestartPreventExitStatus"] == "2"
    assert values["NoNewPrivileges"] == "yes"
    assert "MemoryMax" in values
    # Secrets come by LoadCredential: none is in a unit, and none among the arguments.
    assert not re.search(r"(?i)(secret|token)_?(access)?_?(key)?=\S", values["ExecStart"])


def test_the_user_of_followers_can_be_made() -> None:
    program = shutil.which("systemd-sysusers")
    if program is None:
        pytest.skip("systemd-sysusers is not installed: thinwire.sysusers was NOT tried")
    done = subprocess.run(
        [program, "--dry-run", str(UNITS / "thinwire.sysusers")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert dict(settings("thinwire-follow@.service"))["User"] == "thinwire"
