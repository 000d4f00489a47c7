"""A stream in a folder with the checkpoints that went into it, and commands as processes."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.publish import Publisher

VERSIONS = 3
WITHIN_S = 60.0


class Lab(NamedTuple):
    """Checkpoints of consecutive steps, and a stream of them."""

    root: Path
    checkpoints: list[Path]
    url: str

    @property
    def store(self) -> Path:
        return self.root / "store"

    def weights(self, number: int) -> bytes:
        return (self.checkpoints[number - 1] / "model.safetensors").read_bytes()

    def tensor(self, number: int, name: str) -> bytes:
        """A tensor's bytes, read by a few lines of its own."""
        data = self.weights(number)
        size = int.from_bytes(data[:8], "little")
        start, stop = json.loads(data[8 : 8 + size])[name]["data_offsets"]
        return data[8 + size :][start:stop]


def publish_some(lab: Lab, first: int, last: int) -> None:
    with Publisher(lab.url, lab.root / "state", maintain=False) as publisher:
        for number in range(first, last + 1):
            publisher.publish(lab.checkpoints[number - 1], step=10 * number)


class Process(NamedTuple):
    """A command that runs; its lines come through queues, so that no test waits for ever."""

    popen: subprocess.Popen[str]
    stdout: queue.SimpleQueue[str]
    stderr: queue.SimpleQueue[str]

    def line(self) -> str:
        return self.stdout.get(timeout=WITHIN_S)

    def log(self, event: str) -> dict[str, Any]:
        """The next log line of this name."""
        while True:
            found: dict[str, Any] = json.loads(self.stderr.get(timeout=WITHIN_S))
            if found["event"] == event:
                return found

    def terminate(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(WITHIN_S)


@contextmanager
def running(*arguments: object) -> Iterator[Process]:
    command = [sys.executable, "-m", "thinwire", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as popen:
        lines: list[queue.SimpleQueue[str]] = []
        for pipe in (popen.stdout, popen.stderr):
            lines.append(queue.SimpleQueue())
            reader = threading.Thread(target=_pump, args=(pipe, lines[-1].put), daemon=True)
            reader.start()
        try:
            yield Process(popen, *lines)
        finally:
            popen.kill()


def _pump(pipe: Any, put: Callable[[str], None]) -> None:
    for line in pipe:
        put(line)
