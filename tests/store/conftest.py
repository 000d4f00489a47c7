from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thinwire.store import Store, open_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers.py, which rooms share

from servers import S3Server, rclone, seaweedfs

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_cloud_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own set-up: no variables, no profiles."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


def set_environment(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["memory", "file", "seaweedfs"])
def fresh_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Store:
    """An empty store that retries nothing."""
    number = next(_numbers)
    openers: dict[str, Callable[[], str]] = {
        "memory": lambda: f"memory://contract-{number}",
        "file": lambda: (tmp_path / "store with a space").as_uri(),
        "seaweedfs": lambda: f"{_seaweedfs(request, monkeypatch).url}/contract/{number}",
    }
    return open_store(openers[request.param](), retry_s=0)


def _seaweedfs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    server: S3Server = request.getfixturevalue("seaweedfs_server")
    set_environment(monkeypatch, server)
    return server
