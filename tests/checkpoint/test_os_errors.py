"""Which error a failing system call becomes, and what its hint says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from thinwire.checkpoint import apply_checkpoint, diff_checkpoint
from thinwire.errors import AccessDenied, StoreError, Unavailable, from_os_error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_no_space_or_a_failing_device(number: int) -> None:
    error = from_os_error(OSError(number, os.strerror(number)), "cannot write", "x")
    assert type(error) is Unavailable
    assert error.retryable
    assert "space" in error.hint


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EISDIR, "This is a folder; give a file"),
        (errno.ENOTDIR, "folder"),
        (errno.ENAMETOOLONG, "shorter"),
        (errno.ELOOP, "link"),
        (errno.EMFILE, "ulimit"),
        (errno.EBUSY, "path"),
        (errno.EINVAL, "path"),
        (errno.ESTALE, "path"),
    ],
)
def test_other_failures_are_not_worth_repeating(number: int, hint: str) -> None:
    error = from_os_error(OSError(number, os.strerror(number)), "cannot write", "x")
    assert type(error) is StoreError
    assert not error.retryable
    assert hint in error.hint
    assert error.context["errno"] == number


def test_a_read_only_file_system() -> None:
    error = from_os_error(OSError(errno.EROFS, "Read-only file system"), "cannot write", "x")
    assert type(error) is AccessDenied
    assert "read-only" in str(error).lower()


def test_for_real(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, new, delta = pair
    with pytest.raises(StoreError, match="give a file"):
        apply_checkpoint(base, tmp_path, tmp_path / "out")
    with pytest.raises(StoreError, match="shorter"):
        diff_checkpoint(base, new, tmp_path / ("x" * 300))
    with pytest.raises(StoreError, match="folder"):
        diff_checkpoint(base, new, delta / "x")
