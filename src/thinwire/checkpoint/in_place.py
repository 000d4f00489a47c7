"""A checkpoint becomes the new one where it lies, and survives being killed at any point.

The order that makes it safe stands in :mod:`thinwire.checkpoint.staging`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from thinwire.checkpoint.apply import DeltaSource, opened_delta
from thinwire.checkpoint.folder import hidden_path
from thinwire.checkpoint.lock import locked
from thinwire.checkpoint.staging import Recovery, real_path, settle
from thinwire.checkpoint.update import update_in_place


def apply_in_place(
    checkpoint: str | os.PathLike[str],
    delta: DeltaSource,
    *,
    workers: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Turn ``checkpoint`` itself into the one that ``delta`` describes, crash-safe.

    A folder's files that the delta does not know, say logs, and its subfolders are left alone: so
    afterwards it may hold more than the checkpoint that the delta was made to.

    Needs disk space for a redo log of 6 bytes per changed BF16 weight. A weights file whose header
    changes, or that holds a tensor carried in full, is rebuilt beside the old one and swapped in;
    that needs its space a second time.

    After an error before the log was complete, the checkpoint is as it was. After a crash or an
    error later, opening it raises ``BaseUnusable`` until this function (with any delta) or
    :func:`recover` has finished the update. Calling it again with the same delta is always right:
    where the checkpoint already is the new one, nothing happens. Whoever has the checkpoint mapped
    meanwhile sees a mix: readers must reopen.

    Args:
        checkpoint: A safetensors file or a Hugging Face folder; no links to shared files.
        delta: A delta file, its bytes, or an opened one, which stays open.
        workers: Threads that decode.
        on_bytes: Called with the raw bytes of each piece of work done.

    Raises:
        ApplyError: The delta does not fit, someone else is updating, or files are links.
        InvalidArgument: The delta turns a file into a folder or the reverse.
        FormatError: The delta, or a weights file, is malformed.
        StoreError: A file cannot be read or written, or the disk is full.
    """
    path = real_path(checkpoint)
    with opened_delta(delta) as opened, locked(hidden_path(path, "lock")):
        update_in_place(path, opened, workers=workers, on_bytes=on_bytes)


def recover(checkpoint: str | os.PathLike[str]) -> Recovery:
    """Finish, or discard, an in-place update that was interrupted.

    Returns:
        "finished": the checkpoint is now the new one. "discarded": the update had not begun to
        touch it, so it is the old one. "clean": there was nothing to do.

    Raises:
        BaseUnusable: Someone else is updating, or the update cannot be finished; says why.
        StoreError: Nothing is there, or files cannot be written.
    """
    path = real_path(checkpoint)
    with locked(hidden_path(path, "lock")):
        return settle(path)
