"""Forks the ranks of jobs: torch is imported once, and not by every rank of every job.

Reads one request a line on stdin, answers each with a line: ``{"start": ...}`` with the id of the
new process, ``{"reap": [ids]}`` with the exit codes of those that ended. At the end of stdin
everything that still runs is killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    os.fsync = lambda fd: None  # type: ignore[assignment]  # power cuts are not tested here
    # Else torch imports it in each rank, at the first collective call: half of what jobs cost.
    importlib.import_module("torch._dynamo")
    from ranks import programs, worker

    # Ranks share what is here as long as they do not touch it, as collections would.
    gc.freeze()
    running: set[int] = set()
    _answer({"ready": sorted(programs.PROGRAMS)})
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                worker.main(request["start"], programs.PROGRAMS)
            running.add(pid)
            _answer({"pid": pid})
        else:
            _answer({"ended": _reaped(running, request["reap"])})
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reaped(running: set[int], wanted: list[int]) -> dict[int, int]:
    ended = {}
    for pid in running.intersection(wanted):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
            running.discard(pid)
    return ended


def _answer(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
