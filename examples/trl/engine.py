"""vLLM and `thinwire attach`, as processes of their own, both from .venv-vllm."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import process, wait_until_up
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


@contextmanager
def vllm(python: Path, model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real vLLM on loopback; its weights change through `thinwire attach` alone."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--dtype=bfloat16", "--max-model-len=64"]
    command += ["--max-num-seqs=16", "--enforce-eager", "--distributed-executor-backend=uni"]
    command += ["--enable-scale-out"]  # /inference/v1/generate, which tells each token's version
    command += [f"--weight-transfer-config={json.dumps({'backend': 'thinwire'})}"]
    with process(command, log, _ENVIRONMENT) as started:
        wait_until_up(f"http://127.0.0.1:{port}", started, log, _UP_WITHIN_S)
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
