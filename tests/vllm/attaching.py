"""``thinwire attach`` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .following import Rollout

_TIMEOUT_S = 60.0


class Sidecar:
    """``with Sidecar(rollout, endpoint) as sidecar``: runs inside, is ended by SIGTERM after."""

    def __init__(self, rollout: Rollout, endpoint: str, *arguments: str) -> None:
        self.command = [
            str(Path(sys.executable).with_name("thinwire")),
            "attach",
            "--engine=vllm",
            f"--endpoint={endpoint}",
            f"--stream={rollout.url}",
            f"--folder={rollout.folder / 'host'}",
            "--cache=reset",
            "--poll=0.05",
            "--json",
            *arguments,
        ]
        self.lines: list[dict[str, Any]] = []
        self._errors: list[str] = []

    def run(self) -> tuple[int, list[dict[str, Any]], str]:
        """Let it run to its end: exit status, lines, and what it logged."""
        done = subprocess.run(self.command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        return done.returncode, [json.loads(at) for at in done.stdout.splitlines()], done.stderr

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._threads = [
            threading.Thread(target=self._read_lines), threading.Thread(target=self._read_errors)
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is not None:
            print("".join(self._errors))

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> None:
        self.process.kill()

    def wait_until_dead(self) -> None:
        self._ended()

    def wait_for(self, version: int) -> dict[str, Any]:
        """The line that tells of a version."""
        give_up = time.monotonic() + _TIMEOUT_S
        while True:
            for line in self.lines:
                if line.get("version") == version:
                    return line
            assert time.monotonic() < give_up, "".join(self._errors)
            assert self.process.poll() is None, "".join(self._errors)
            time.sleep(0.02)

    @property
    def log(self) -> str:
        return "".join(self._errors)

    def _ended(self) -> int:
        try:
            status = self.process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for thread in self._threads:
            thread.join()
        return status

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)
