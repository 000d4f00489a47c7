"""What examples/regions starts ends with it, also where it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0
START = """
import sys
from pathlib import Path
from programs import Processes

processes = Processes(Path(sys.argv[1]))
"""


def start(code: str, logs: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START + code, str(logs)],
        cwd=ROOT / "examples" / "regions",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends(pid: int) -> bool:
    give_up_s = time.monotonic() + TIMEOUT_S
    while is_running(pid) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    return not is_running(pid)


def test_a_process_dies_with_a_run_that_is_killed(tmp_path: Path) -> None:
    code = """
sleeper = processes.start("sleeper", ["sleep", "1000"])
print(sleeper.handle.pid, flush=True)
sys.stdin.readline()
"""
    run = start(code, tmp_path)
    assert run.stdout is not None
    sleeper = int(run.stdout.readline())
    assert is_running(sleeper)
    run.kill()
    run.wait()
    assert ends(sleeper)


def test_stopping_ends_what_a_process_started_itself_even_if_it_will_not(tmp_path: Path) -> None:
    code = """
import programs
programs.TERM_WAIT_S = 0.2
script = "trap '' TERM; sleep 1000 & echo $!; while true; do sleep 0.1; done"
stubborn = processes.start("stubborn", ["sh", "-c", script], is_talking=True)
print(stubborn.handle.pid, stubborn.handle.stdout.readline(), flush=True)
processes.close()
print(stubborn.handle.returncode)
"""
    told, _ = start(code, tmp_path).communicate(timeout=TIMEOUT_S)
    pids, code_of_end = told.split()[:2], told.split()[2]
    assert code_of_end == "-9"
    assert all(ends(int(pid)) for pid in pids)


def test_one_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = """
import programs
failing = processes.start("failing", ["sh", "-c", "echo the disk is full >&2; exit 3"])
fine = processes.start("fine", ["true"])
failing.handle.wait(), fine.handle.wait()
try:
    processes.check()
except programs.Failed as error:
    print(error)
failing.may_end = True
processes.check()
print("done")
"""
    told, _ = start(code, tmp_path).communicate(timeout=TIMEOUT_S)
    assert told.split("\n") == ["failing ended with 3:", "the disk is full", "", "done", ""]
