"""Starts jobs of several processes, watches them, stops and kills them, and leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

_HERE = Path(__file__).parent
_ADDRESS = "127.0.0.1"
# What others of a job may still say once a rank has failed.
_GRACE_S = 3.0


class Host:
    """The process that forks ranks; see host.py."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_HERE.parent)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ranks.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._lock = threading.Lock()
        self._answer()

    def start(self, **facts: Any) -> int:
        """Fork a rank; returns its process id."""
        return int(self._ask({"start": facts})["pid"])

    def reap(self, pids: list[int]) -> dict[int, int]:
        """Exit codes of those that ended."""
        ended = self._ask({"reap": pids})["ended"]
        return {int(pid): code for pid, code in ended.items()}

    def close(self) -> None:
        """End it, and whatever it still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks ranks is gone"
        found: dict[str, Any] = json.loads(line)
        return found


class Job:
    """Some ranks that run one program together; a context manager that leaves no process behind.

    Args:
        host: Forks them.
        program: The program's name in programs.py.
        size: How many ranks.
        folder: A new folder for what they write down.
        store: Who runs the job's key-value store: "launcher" (this process) or "rank 0".
        limit_s: A rank that takes longer says where it hangs, and ends with exit code 1.
        options: What the program is told.
    """

    def __init__(
        self,
        host: Host,
        program: str,
        size: int,
        folder: Path,
        *,
        store: str = "launcher",
        limit_s: float = 90.0,
        **options: Any,
    ) -> None:
        self.size = size
        self.folder = folder
        folder.mkdir(parents=True)
        self._host = host
        self._codes: dict[int, int] = {}
        self._limit_s = limit_s
        self._server: Any = None
        port = 0
        if store == "launcher" and size > 1:
            self._server = dist.TCPStore(_ADDRESS, 0, None, True, wait_for_workers=False)
            port = self._server.port
        self.pids: list[int] = []
        for rank in range(size):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": _ADDRESS,
                "MASTER_PORT": str(port),
            }
            pid = host.start(
                program=program,
                env=env,
                folder=str(folder),
                log=str(folder / f"log.{rank}"),
                limit_s=limit_s,
                options=options,
            )
            self.pids.append(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in range(self.size):
            self.signal(rank, signal.SIGKILL)
        self._wait(range(self.size), 20)
        self._server = None

    def signal(self, rank: int, number: int) -> None:
        """Send a rank a signal, unless it has ended."""
        if rank not in self._ended():
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def allow(self, step: int) -> None:
        """Let the job go on up to that step."""
        part = self.folder / "leave.part"
        part.write_text(str(step))
        part.rename(self.folder / "leave")

    def release(self) -> None:
        """Let go on what is held back."""
        (self.folder / "release").touch()

    def entries(self, rank: int, what: str = "") -> list[dict[str, Any]]:
        """What a rank wrote down so far, in order."""
        path = self.folder / f"journal.{rank}"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if what in ("", entry["what"])]

    def wait_for(
        self, what: str | tuple[str, ...], step: int | None = None, ranks: Any = None
    ) -> None:
        """Wait until ranks (None: all) wrote something down, or one of several things."""
        kinds = (what,) if isinstance(what, str) else what

        def has(rank: int) -> bool:
            entries = self.entries(rank)
            return any(e["what"] in kinds and step in (None, e.get("step")) for e in entries)

        wanted = list(range(self.size) if ranks is None else ranks)
        self._until(lambda: all(map(has, wanted)), f"{what} {step or ''} of ranks {wanted}")

    def wait(self, ranks: Any = None) -> None:
        """Wait until ranks (None: all) ended by themselves and well."""
        wanted = list(range(self.size) if ranks is None else ranks)
        self._wait(wanted, self._limit_s + 10)
        codes = {rank: self._codes.get(rank) for rank in wanted}
        assert not any(codes.values()), f"exit codes by rank: {codes}\n{self.logs()}"

    def logs(self) -> str:
        """The ends of what the ranks wrote to stdout and stderr, and of their journals."""
        parts = []
        for rank in range(self.size):
            path = self.folder / f"log.{rank}"
            log = path.read_text(errors="replace")[-1800:] if path.exists() else ""
            last = "\n".join(map(str, self.entries(rank)[-4:]))
            parts.append(f"--- rank {rank} of {self.size}, exit code {self._codes.get(rank)}")
            parts.append(f"{log}\n{last}")
        return "\n".join(parts)

    def _ended(self) -> dict[int, int]:
        left = [pid for rank, pid in enumerate(self.pids) if rank not in self._codes]
        for pid, code in self._host.reap(left).items():
            self._codes[self.pids.index(pid)] = code
        return self._codes

    def _wait(self, ranks: Any, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not set(ranks) <= self._ended().keys():
            lost = [rank for rank in ranks if self._codes.get(rank, 0) > 0]
            if lost and until_s > time.monotonic() + _GRACE_S:
                # Whatever it was, the others would now wait for it as long as they may.
                until_s = time.monotonic() + _GRACE_S
            assert time.monotonic() < until_s, f"ranks still run after {limit_s} s\n{self.logs()}"
            time.sleep(0.02)

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self._limit_s
        while not holds():
            late = time.monotonic() > until_s
            lost = {rank: code for rank, code in self._ended().items() if code > 0}
            assert not late, f"no {what} within {self._limit_s} s\n{self.logs()}"
            assert not lost, f"no {what}, and ranks ended: {lost}\n{self.logs()}"
            time.sleep(0.01)
