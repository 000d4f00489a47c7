from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.checkpoint import diff_checkpoint

from .making import MIXED, MIXED_NEW, pack, write_folder


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
