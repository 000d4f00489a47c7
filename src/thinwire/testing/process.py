"""A test's server in a process of its own, which never outlives the test's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_UP_WITHIN_S = 30.0


@contextmanager
def running_module(module: str, port: int, arguments: Sequence[str], probe: str) -> Iterator[str]:
    """Run a module that serves: its endpoint; killed at the end.

    Args:
        module: Its name; it calls :func:`end_with_stdin` where it is told ``--until-stdin-ends``.
        port: A free port.
        arguments: Further ones of its command line.
        probe: A path that it answers once it is up.

    Raises:
        RuntimeError: It ended, or did not answer in time.
    """
    command = [sys.executable, "-m", module, "--port", str(port), "--until-stdin-ends", *arguments]
    # Its end of this pipe ends with us, however we end.
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(process, endpoint, probe)
        yield endpoint
    finally:
        process.kill()
        process.communicate()


def end_with_stdin() -> None:
    """End this process once the other end of its standard input is gone."""
    threading.Thread(target=_exit_with_stdin, daemon=True).start()


def _wait_until_up(process: subprocess.Popen[bytes], endpoint: str, probe: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end_s = time.monotonic() + _UP_WITHIN_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with opener.open(f"{endpoint}{probe}", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the server at {endpoint} did not start")


def _exit_with_stdin() -> None:
    os.read(0, 1)
    os._exit(0)
