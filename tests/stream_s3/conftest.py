from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers.py, which rooms share

from servers import S3Server, rclone, seaweedfs


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def careless(tmp_path: Path) -> Iterator[S3Server]:
    with rclone(tmp_path) as server:
        yield server
