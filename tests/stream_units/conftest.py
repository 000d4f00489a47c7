from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from .making import Arrays, DictStore, history, maintained, published

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    """Power cuts are not tested here, and hundreds of versions are published."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Memory, where there is some to be had: small folders are made and removed by the hundred."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _no_hugging_face_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own models."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


VERSIONS = history(10)


@pytest.fixture(scope="session")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> DictStore:
    store, folder = DictStore(), tmp_path_factory.mktemp("whole")
    published(store, folder / "baseline", VERSIONS, merge_levels=[2, 4], anchor_every=6)
    maintained(store, folder / "work")
    return store


@pytest.fixture
def whole(_whole: DictStore) -> DictStore:
    """Ten versions, merged deltas of two and of four, anchors of 1 and 10; a copy for each test."""
    return _whole.copy()


@pytest.fixture
def versions() -> list[Arrays]:
    """What ``whole`` holds."""
    return VERSIONS
