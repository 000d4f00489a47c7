from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    """The power is not cut here, and versions are published by the thousand."""
    with mock.patch.object(os, "fsync", os.fstat):
        yield


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    """Memory for the folders of a long stream, where there is some to be had."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder)
