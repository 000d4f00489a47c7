"""The steps that make a change of a checkpoint crash-safe, whatever the change is.

``S`` is a hidden staging folder, ``R`` the same folder renamed:

1. write the redo log and new files into ``S``; sync it
2. rename ``S`` to ``R``: from here on the change will happen, before that it never did
3. carry out the log (see :mod:`thinwire.checkpoint.replay`); sync
4. rename ``R`` back to ``S`` and remove it: from here on the change is done

An ``S`` found later is garbage and is removed. An ``R`` is replayed from 3: that gives the same
result however far it had come. Only what step 3 writes touches the checkpoint.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from thinwire.checkpoint.disk import os_errors, remove, remove_quietly, shared_error, sync
from thinwire.checkpoint.folder import hidden_path
from thinwire.checkpoint.replay import replay

Recovery = Literal["clean", "discarded", "finished"]


def real_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Where a checkpoint really lies, symbolic links resolved.

    Raises:
        NotFound: Nothing is there.
        BaseUnusable: It is a link to a file, which may be another checkpoint's too.
    """
    path = Path(checkpoint)
    with os_errors("cannot open", path):
        resolved = path.resolve(strict=True)
    if path.is_symlink() and not resolved.is_dir():
        raise shared_error(path, "is a link")
    return resolved


def settle(path: Path) -> Recovery:
    """Bring a locked checkpoint into a whole state: steps 3 and 4, or away with what is staged.

    Raises:
        BaseUnusable: The log cannot be carried out; it stays.
        StoreError: Something cannot be renamed or removed.
    """
    staging, redo = hidden_path(path, "staging"), hidden_path(path, "redo")
    discarded = os.path.lexists(staging)
    remove(staging)
    if not os.path.lexists(redo):
        return "discarded" if discarded else "clean"
    replay(path, redo)
    with os_errors("cannot rename", redo):
        redo.rename(staging)
    sync(staging.parent)
    remove_quietly(staging)
    return "finished"


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """A new staging folder for step 1; it goes when the block ends, unless :func:`seal` was called.

    The checkpoint at ``path`` is locked and settled.
    """
    staging = hidden_path(path, "staging")
    try:
        with os_errors("cannot create", staging):
            staging.mkdir()
        yield staging
    finally:
        remove_quietly(staging)


def seal(path: Path, staging: Path) -> None:
    """Step 2: commit to what the staging folder holds, which is durable already."""
    with os_errors("cannot rename", staging):
        staging.rename(hidden_path(path, "redo"))


def keep_mode(old: Path, new: Path) -> None:
    """Give a staged file the mode of the one that it will replace, if there is one."""
    if old.exists():
        with os_errors("cannot write", new):
            new.chmod(stat.S_IMODE(old.stat().st_mode))
