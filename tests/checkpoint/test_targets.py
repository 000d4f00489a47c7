"""Where a delta may be written: a new file, or over a regular one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from thinwire import diff_checkpoint
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
