"""vLLM and `thinwire attach`, as processes of their own, both from .venv-vllm."""

from __future__ import annotations

import json
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

from settings import Settings

_UP_WITHIN_S = 240.0
_ENVIRONMENT = {
    # Nothing outside this machine is asked or told.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The routes of weight transfer are there in this mode only.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The trainer has the other core.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Inside the server's process, as one rank needs none of its own: it starts in half the time.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "NO_PROXY": "127.0.0.1",
}


def free_port() -> int:
    """One that nothing listens on now, and that no connection is given before vLLM is up."""
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
            for number, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    started.wait(timeout=wait_s)


@contextmanager
def vllm(python: Path, model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real vLLM on loopback; its weights change through `thinwire attach` alone."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--dtype=bfloat16", "--max-model-len=64"]
    command += ["--max-num-seqs=16", "--enforce-eager", "--distributed-executor-backend=uni"]
    command += ["--enable-scale-out"]  # /inference/v1/generate, which tells each token's version
    command += [f"--weight-transfer-config={json.dumps({'backend': 'thinwire'})}"]
    with process(command, log, _ENVIRONMENT) as started:
        _wait_until_up(f"http://127.0.0.1:{port}", started, log)
        yield started


@contextmanager
def attached(python: Path, settings: Settings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`thinwire attach`: keeps vLLM at the newest version of the stream."""
    command = [str(python), "-m", "thinwire", "attach", "--engine=vllm", "--cache=reset"]
    command += [f"--endpoint={settings.engine}", f"--stream={settings.url}"]
    command += [f"--folder={settings.host_copy}", "--poll=0.2"]
    with process(command, log, {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}) as started:
        yield started


def first_end(trainer: subprocess.Popen[bytes], *others: subprocess.Popen[bytes]) -> int:
    """Wait for the trainer; returns its exit status, or 1 where one of the others ended first."""
    while trainer.poll() is None:
        if any(other.poll() is not None for other in others):
            return 1
        time.sleep(0.2)
    return trainer.returncode


def tail(log: Path, lines: int = 20) -> str:
    """What a process said last."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _wait_until_up(endpoint: str, started: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _UP_WITHIN_S
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{endpoint}/health", timeout=5):
            return
        if started.poll() is not None or time.monotonic() > deadline_s:
            sys.exit(f"vLLM did not come up:\n{tail(log)}")
        time.sleep(0.5)
