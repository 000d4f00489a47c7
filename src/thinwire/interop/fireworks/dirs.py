"""Two checkpoint folders to the folder of an incremental snapshot."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from thinwire.checkpoint.disk import (
    map_file,
    os_errors,
    put_in_place,
    remove_quietly,
    temporary_sibling,
    write_file,
)
from thinwire.checkpoint.file_names import is_weights_name
from thinwire.checkpoint.folder import list_files
from thinwire.errors import AlreadyExists
from thinwire.interop.fireworks.coding import format_named
from thinwire.interop.fireworks.dropin import compress_files
from thinwire.interop.fireworks.errors import DeltaKeyMismatchError


class OneSided(NamedTuple):
    """The files that only one of two folders has.

    Attributes:
        src: Those that only the old one has: none of it is in the delta.
        dst: Those that only the new one has: small files are in the delta, weights are not.
    """

    src: list[str]
    dst: list[str]


def delta_compress_dirs(
    src: str,
    dst: str,
    diff_dir: str,
    compression_format: str,
    executor: Executor | None = None,
    *,
    allow_one_sided: bool = False,
) -> OneSided:
    """Write the incremental snapshot that leads from one checkpoint folder to another.

    Weights files are paired by name; config, tokenizer and the like are those of ``dst``. The
    folder appears once it is whole. Folders in them are refused, whatever they hold.

    Args:
        src: The old checkpoint.
        dst: The new one.
        diff_dir: The folder to write; it may exist if it is empty. The package adds to one that is
            not.
        compression_format: See :func:`thinwire.interop.fireworks.delta_compress`.
        executor: Runs the work of each weights file, in threads or processes; None: one after the
            other, where the package starts four processes.
        allow_one_sided: Go on where a file, hidden or not, is on one side only, and say so in what
            is returned.

    Returns:
        The files that are on one side only: none, unless they are allowed.

    Raises:
        BackendNotFoundError: There is no such format.
        DeltaKeyMismatchError: A file, or a tensor, is on one side only.
        DeltaSizeMismatchError: A tensor changed dtype or shape.
        AlreadyExists: ``diff_dir`` holds something.
        InvalidArgument, FormatError, StoreError: A folder holds what no checkpoint may; or a file
            cannot be read or written.
    """
    format_named(compression_format)
    old_dir, new_dir, target = Path(src), Path(dst), Path(diff_dir).absolute()
    old_names = set(list_files(old_dir, ignore_subfolders=False))
    new_names = set(list_files(new_dir, ignore_subfolders=False))
    one_sided = OneSided(sorted(old_names - new_names), sorted(new_names - old_names))
    if any(one_sided) and not allow_one_sided:
        raise DeltaKeyMismatchError(
            f"files on one side only: in {src}: {_shown(one_sided.src)}; in {dst}:"
            f" {_shown(one_sided.dst)}",
            hint="Send full weights, or pass allow_one_sided=True to leave weights of one side out",
            src=one_sided.src,
            dst=one_sided.dst,
        )
    with os_errors("cannot write", target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise AlreadyExists(
                f"{target} holds something", hint="Choose another folder", path=str(target)
            )
        target.parent.mkdir(parents=True, exist_ok=True)
    staging = temporary_sibling(target)
    try:
        with os_errors("cannot write", target):
            staging.mkdir()
        _compress_pairs(
            old_dir, new_dir, staging, old_names & new_names, compression_format, executor
        )
        for name in sorted(new_names):
            if not is_weights_name(name):
                write_file(staging / name, map_file(new_dir / name).data)
        put_in_place(staging, target)
    except BaseException:
        remove_quietly(staging)
        raise
    return one_sided


def _compress_pairs(
    old_dir: Path,
    new_dir: Path,
    out_dir: Path,
    names: set[str],
    compression_format: str,
    executor: Executor | None,
) -> None:
    calls = [
        (str(old_dir / name), str(new_dir / name), str(out_dir / name), compression_format)
        for name in sorted(names)
        if is_weights_name(name)
    ]
    if executor is None:
        for call in calls:
            _compress_pair(*call)
        return
    futures = [executor.submit(_compress_pair, *call) for call in calls]
    try:
        for future in futures:
            future.result()
    finally:
        # After a failure nobody may write into the folder that is going.
        for future in futures:
            if not future.cancel():
                future.exception()


def _compress_pair(src: str, dst: str, diff_file: str, compression_format: str) -> None:
    """One weights file; returns nothing, so that a process pool sends nothing back."""
    compress_files(src, dst, diff_file, compression_format)


def _shown(names: list[str]) -> str:
    if not names:
        return "none"
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name[:80]) for name in names[:3]) + rest
