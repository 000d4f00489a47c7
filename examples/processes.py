"""Processes of a run that end with it, and waiting until a server is up."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def free_port() -> int:
    """One that nothing listens on now, and that no connection is given before the server is up."""
    while True:
        # Below those that Linux gives to outgoing connections.
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def process(
    command: Sequence[str], log: Path | None, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone, with all its own, at the end; without a log it prints here."""
    with ExitStack() as stack:
        started = subprocess.Popen(
            command,
            stdout=None if log is None else stack.enter_context(log.open("wb")),
            stderr=None if log is None else subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            yield started
        finally:
            end(started)


def end(started: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session of its own, and all that are in it."""
    for number, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, number)
        with suppress(subprocess.TimeoutExpired):
            started.wait(timeout=wait_s)


def wait_until_up(
    endpoint: str, started: subprocess.Popen[bytes], log: Path, within_s: float
) -> None:
    """Wait until a server answers; where it does not, end the run with the last lines of its log.

    Args:
        endpoint: The server's address, whose /health answers.
        started: Its process.
        log: What it printed.
        within_s: How long to wait.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{endpoint}/health", timeout=5):
            return
        if started.poll() is not None or time.monotonic() > deadline_s:
            sys.exit(f"{endpoint} did not come up:\n{tail(log)}")
        time.sleep(0.2)


def tail(log: Path, lines: int = 20) -> str:
    """What a process said last."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
