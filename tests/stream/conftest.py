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
    """The power is not cut here, and followers by the thousand catch up."""
    with mock.patch.object(os, "fsync", os.fstat):
        yield


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Memory, where there is some to be had: most of the time folders are made and removed here."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder)
