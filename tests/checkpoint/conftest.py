from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from thinwire.checkpoint import diff_checkpoint

from .making import MIXED, MIXED_NEW, pack, write_folder

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    """Processes are killed here by the thousand, the power is not cut: what was written stays.

    The descriptor must be an open one nevertheless.
    """
    with mock.patch.object(os, "fsync", os.fstat):
        yield


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Memory, where there is some to be had: small folders are made and removed by the thousand."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    """BASE, NEW and the delta between them."""
    base = write_folder(
        tmp_path / "a", {"model.safetensors": pack(MIXED), "config.json": "{}", "x.txt": "x"}
    )
    new = write_folder(
        tmp_path / "b", {"model.safetensors": pack(MIXED_NEW), "config.json": "[]", "x.txt": "x"}
    )
    diff_checkpoint(base, new, tmp_path / "d.tw")
    return base, new, tmp_path / "d.tw"
