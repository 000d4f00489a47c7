"""A real vLLM behind its OpenAI-compatible server, on loopback, ended with all its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import psutil
import pytest

_UP_WITHIN_S = 180.0
_DOWN_WITHIN_S = 15.0
_TAIL_LINES = 60
# At its end each process lists what Triton's bindings leak, a hundred lines.
_NOISE = ("nanobind:", " - leaked", " - ...", "See https://nanobind")
# How vLLM names its processes: VLLM::Worker, or VLLM::Worker_TP0 and so on.
_WORKER, _ENGINE_CORE = "VLLM::Worker", "VLLM::EngineCore"

SETTINGS = {
    # Nothing outside this machine is asked or told.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The routes of weight transfer are there in this mode only.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Bound and many-threaded ranks on few cores wait for each other: 17 s for a first answer.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NO_PROXY": "127.0.0.1",
}
_ARGUMENTS = (
    "--dtype=bfloat16",
    "--max-model-len=256",
    "--max-num-seqs=8",
    "--enforce-eager",
    # Without this the caches of each rank are the whole of VLLM_CPU_KVCACHE_SPACE.
    "--num-gpu-blocks-override=256",
)
# A start is imports, 10 s of processor time for each process. A single rank works inside the engine
# core, as it does on a GPU, and not in a process of its own: 22 s instead of 33.
_ONE_RANK = ("--distributed-executor-backend=uni",), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class VllmServer:
    """``with VllmServer(model, folder) as server``: up and healthy inside, wholly gone after.

    ``folder`` takes the log. ``backend`` None starts a vLLM that knows nothing of thinwire.
    """

    running: ClassVar[list[VllmServer]] = []

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        tensor_parallel: int = 1,
        backend: str | None = "thinwire",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        one_rank_arguments, one_rank = _ONE_RANK if tensor_parallel == 1 else ((), {})
        self.model = model
        self.ranks = tensor_parallel
        self.port = _free_port()
        self.log = folder / f"vllm-{self.port}.log"
        self._command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            f"--model={model}",
            "--served-model-name=model",
            "--host=127.0.0.1",
            f"--port={self.port}",
            f"--tensor-parallel-size={tensor_parallel}",
            *_ARGUMENTS,
            *one_rank_arguments,
            *arguments,
        ]
        if backend is not None:
            self._command.append(f"--weight-transfer-config={json.dumps({'backend': backend})}")
        self._environment = {**os.environ, **SETTINGS, **one_rank, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process that answers HTTP; it leads the group of all."""
        assert self._process is not None
        return self._process.pid

    @property
    def engine_core_pid(self) -> int:
        """The process that schedules."""
        (found,) = self._pids(_ENGINE_CORE)
        return found

    @property
    def worker_pids(self) -> list[int]:
        """The processes that hold the model, by rank; a single one is the engine core."""
        return self._pids(_WORKER) or self._pids(_ENGINE_CORE)

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(self)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is not None:
            print(f"--- the end of {self.log}\n{self.log_tail()}", file=sys.stderr)

    def is_healthy(self) -> bool:
        with suppress(OSError):
            urllib.request.urlopen(f"{self.endpoint}/health", timeout=5).close()
            return True
        return False

    def get(self, route: str) -> Any:
        return self._answer(urllib.request.Request(f"{self.endpoint}{route}"))

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """What a route answers to this JSON; ``urllib.error.HTTPError`` where it refuses."""
        return self._answer(
            urllib.request.Request(
                f"{self.endpoint}{route}",
                data=json.dumps(body or {}).encode(),
                headers={"Content-Type": "application/json"},
            )
        )

    def stream(self, route: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The events that a route answers with, as they come."""
        request = urllib.request.Request(
            f"{self.endpoint}{route}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)

    def kill(self) -> None:
        """SIGKILL to every process at once, as when a host dies; ``stop`` may still follow."""
        processes = self._processes()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_DOWN_WITHIN_S)

    def stop(self) -> None:
        """Ask it to end, which frees its shared memory, then end whatever is left."""
        if self in self.running:
            self.running.remove(self)
        if self._process is None:
            return
        processes = self._processes()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DOWN_WITHIN_S)
        psutil.wait_procs(processes, timeout=2)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.kill()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not line.startswith(_NOISE)][-_TAIL_LINES:])

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        give_up = time.monotonic() + _UP_WITHIN_S
        while not self.is_healthy():
            if self._process.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"vLLM did not start: {self._command}\n{self.log_tail()}")
            time.sleep(0.1)

    def _answer(self, request: urllib.request.Request) -> Any:
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
        return json.loads(content) if content else None

    def _processes(self) -> list[psutil.Process]:
        """Every process of this server but the first."""
        if self._process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def _pids(self, title: str) -> list[int]:
        named = []
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if line.startswith(title):
                    named.append((line, process.pid))
        return [pid for _, pid in sorted(named)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
