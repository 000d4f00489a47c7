"""Where a delta may be written: a new file, or over a regular one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from thinwire import apply_checkpoint, diff_checkpoint
from thinwire.errors import AlreadyExists, InvalidArgument


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "folder"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str, overwrite: bool) -> None:
    base, new, target = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "out.tw"))
    save_file({"w": np.zeros(8, np.float32)}, base)
    save_file({"w": np.ones(8, np.float32)}, new)
    precious = tmp_path / "precious"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "folder":
        target.mkdir()
    else:
        if kind == "link":
            precious.write_text("keep")
        target.symlink_to(precious)
    before = target.lstat()
    with pytest.raises((InvalidArgument, AlreadyExists)):
        diff_checkpoint(base, new, target, overwrite=overwrite)
    assert target.lstat() == before
    assert not precious.exists() or precious.read_text() == "keep"


def test_nothing_is_built_inside_the_base(tmp_path: Path) -> None:
    for name, value in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        save_file({"w": np.full(8, value, np.float32)}, tmp_path / name / "model.safetensors")
    diff_checkpoint(tmp_path / "a", tmp_path / "b", tmp_path / "d.tw")
    with pytest.raises(InvalidArgument, match="part of the checkpoint"):
        apply_checkpoint(tmp_path / "a", tmp_path / "d.tw", tmp_path / "a" / "out")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model.safetensors"]
