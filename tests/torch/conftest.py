from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    """Power cuts are not tested here, and hundreds of versions are published."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture(autouse=True)
def _no_hugging_face_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own models."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stream of a test's own, and who publishes and follows it."""
    # Not above: torch may be missing.
    from thinwire.publish import leader

    from .training import Stand

    monkeypatch.setattr(leader, "_RESOLVE_S", 0.01)
    found = Stand(tmp_path)
    yield found
    found.close()
