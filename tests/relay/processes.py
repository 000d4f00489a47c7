"""The command as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from thinwire.store.file_store import FileStore


class Relay:
    def __init__(self, popen: subprocess.Popen[str], facts: dict[str, Any]) -> None:
        self.popen = popen
        self.root = facts["url"]
        self.urls = facts["streams"]
        self.url = next(iter(self.urls.values()))
        self.memory = psutil.Process(popen.pid)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.root}/metrics", trust_env=False).text
        (line,) = [at for at in text.splitlines() if at.startswith(f"thinwire_relay_{name}")]
        return float(line.rpartition(" ")[2])

    def is_well(self) -> bool:
        answer = httpx.get(f"{self.url}/o/head.json", trust_env=False, timeout=20)
        return answer.status_code == 200

    def connect(self) -> socket.socket:
        port = int(self.root.rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port), timeout=20)

    @property
    def rss_bytes(self) -> int:
        return int(self.memory.memory_info().rss)


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "thinwire", "relay", *map(str, options)]


@contextmanager
def running(*options: object, end: int = signal.SIGTERM) -> Iterator[Relay]:
    popen = subprocess.Popen(
        [*command(*options, "--json")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert popen.stdout is not None
    try:
        yield Relay(popen, json.loads(popen.stdout.readline()))
    finally:
        popen.send_signal(end)
        popen.wait(20)
        popen.stdout.close()
    assert popen.returncode == (0 if end == signal.SIGTERM else -end)


def options_for(bucket: FileStore, tmp_path: Path) -> list[object]:
    return [
        "--stream", bucket.url, "--listen", "127.0.0.1:0", "--cache", tmp_path / "cache",
        "--limit-bytes", "64MiB",
    ]  # fmt: skip
