"""Processes that end with this one: each with a log, a group of its own, and no way to stay."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
TERM_WAIT_S = 15.0
_LIBC = ctypes.CDLL(None)


class Failed(Exception):
    """A process ended that should not have, or something did not come up."""


def die_with_parent() -> None:
    """In a child before it becomes its program: killed when this process is, however that ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Process:
    """A running program."""

    name: str
    handle: subprocess.Popen[str]
    log: Path
    may_end: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.handle.poll() is None

    def tail(self) -> str:
        """The end of its log."""
        with suppress(OSError):
            return self.log.read_text(errors="replace")[-3000:]
        return ""

    def kill(self) -> None:
        """As a machine dies: no word of farewell. The whole group."""
        self.may_end = True
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)
        self.handle.wait()


class Processes:
    """All that were started, to be stopped in the opposite order.

    To be used from the main thread: a child lives no longer than the thread that started it.

    Args:
        logs: Where each writes NAME.log, both streams.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[Process] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        is_talking: bool = False,
    ) -> Process:
        """Start a program.

        Args:
            name: Of its log.
            command: The program and its arguments.
            variables: More of its environment.
            is_talking: Whether its standard input and output are for the caller.
        """
        log = self._logs / f"{name}.log"
        with log.open("ab") as errors:
            handle = subprocess.Popen(
                list(command),
                env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
                stdin=subprocess.PIPE if is_talking else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_talking else errors,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        process = Process(name, handle, log)
        self._all.append(process)
        return process

    def check(self) -> None:
        """Raise if one failed that nobody stopped.

        Raises:
            Failed: With the end of its log.
        """
        for process in self._all:
            code = process.handle.poll()
            if code not in (None, 0) and not process.may_end:
                raise Failed(f"{process.name} ended with {code}:\n{process.tail()}")

    def stop(self, some: Sequence[Process]) -> None:
        """Ask some to end, all at once, and end those that do not, with what they started."""
        for process in some:
            process.may_end = True
            if process.is_alive:
                process.handle.terminate()
        give_up_s = time.monotonic() + TERM_WAIT_S
        for process in some:
            with suppress(subprocess.TimeoutExpired):
                process.handle.wait(max(0.0, give_up_s - time.monotonic()))
            process.kill()

    def close(self) -> None:
        """Stop them all, the last one first."""
        self.stop(self._all[::-1])
