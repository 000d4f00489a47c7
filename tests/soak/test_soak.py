"""Twenty-five kills of real processes; `make soak` has five hundred. See benchmarks/soak."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak"
RUN = SOAK / "run.py"


def test_nothing_is_lost_when_processes_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, RUN, "--rounds", "25", "--root", tmp_path / "soak"]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert found.returncode == 0, f"{found.stdout[-6000:]}\n{found.stderr[-3000:]}"


def test_a_process_that_fails_is_told_with_the_seed(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    command = [sys.executable, RUN, "--rounds", "2", "--seed", "7", "--root", tmp_path / "soak"]
    command += ["--url", (tmp_path / "store").as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 1
    assert "seed 7; everything is kept in" in found.stdout


class Small(NamedTuple):
    """A stream of three versions, a follower's folder, and what checks both."""

    root: Path
    checks: ModuleType
    checker: object

    @property
    def follower(self) -> Path:
        return self.root / "follower"

    def manifest(self, version: int) -> Path:
        (found,) = self.root.glob(f"store/*/manifests/{version:012d}.json")
        return found


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Small]:
    monkeypatch.syspath_prepend(str(SOAK))
    import actors
    import checks

    from thinwire.follow import Follower

    (tmp_path / "journal").mkdir()
    (tmp_path / "trainer").mkdir()
    soak = actors.Soak((tmp_path / "store").as_uri(), 5, tmp_path)
    journal = actors.Journal(soak, "publisher", "publisher.1")
    actors.publisher(soak, journal, "publisher.1", tmp_path / "publisher", False, False, 3)
    with Follower(soak.stream(), tmp_path / "follower", lease=False) as follower:
        follower.catch_up()
    yield Small(tmp_path, checks, checks.Checker(soak))
    for name in ("actors", "checks", "oracle"):
        sys.modules.pop(name, None)


def test_the_checker_finds_nothing_where_all_is_well(small: Small) -> None:
    small.checker.journals()
    assert small.checker.folder(small.follower, is_partial=False) == 3
    assert small.checker.stream() == 3


def test_the_checker_finds_a_wrong_bit(small: Small) -> None:
    weights = next(small.follower.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(data)
    with pytest.raises(small.checks.Violation, match="1 of"):
        small.checker.folder(small.follower, is_partial=False)


def test_the_checker_finds_a_wrong_version(small: Small) -> None:
    mark = small.follower / ".thinwire-mark"
    small.manifest(3).unlink()
    with pytest.raises(small.checks.Violation, match="no manifest"):
        small.checker.folder(small.follower, is_partial=False)
    mark.write_bytes(mark.read_bytes().replace(b'"version":3', b'"version":2'))
    with pytest.raises(small.checks.Violation, match="other things"):
        small.checker.folder(small.follower, is_partial=False)


def test_the_checker_finds_a_lost_or_replaced_version(small: Small) -> None:
    small.checker.journals()
    small.manifest(3).write_bytes(small.manifest(2).read_bytes())
    with pytest.raises(small.checks.Violation, match="removed or replaced"):
        small.checker.journals()
    small.manifest(3).unlink()
    with pytest.raises(small.checks.Violation, match="removed or replaced"):
        small.checker.journals()


def test_the_checker_finds_a_lost_object(small: Small) -> None:
    shutil.rmtree(next(small.root.glob("store/*/deltas/*-000000000003")))
    with pytest.raises(small.checks.Violation, match="fsck"):
        small.checker.stream()
