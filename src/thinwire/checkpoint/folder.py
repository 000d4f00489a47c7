"""A checkpoint on disk: one safetensors file, or a folder as Hugging Face writes it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from thinwire.checkpoint.disk import map_file, os_errors
from thinwire.checkpoint.file_names import (
    INDEX_NAME,
    SINGLE_FILE,
    WEIGHTS_SUFFIX,
    file_path,
    first_clash,
    is_left_out,
    is_weights_name,
    name_fault,
)
from thinwire.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from thinwire.checkpoint.strict_json import parse_object
from thinwire.errors import BaseUnusable, Corrupt, InvalidArgument

MAX_INDEX_BYTES = 100_000_000


class Stamp(NamedTuple):
    """Tells one state of a file from another; each save and each in-place update changes it."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp | None:
        """The stamp of a file, or None where it cannot be seen."""
        try:
            status = path.stat()
        except OSError:
            return None
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; its weights stay mapped for as long as it lives.

    Attributes:
        path: The file or folder, symbolic links resolved.
        is_folder: False where the checkpoint is one weights file.
        weights: The weights files by name, sorted; a single file goes by ``SINGLE_FILE``.
        files: Every other file at the top level by name (config, tokenizer, ...), not yet read.
        tensors: The tensors of all weights files by name.
    """

    path: Path
    is_folder: bool
    weights: Mapping[str, SafetensorsFile]
    files: Mapping[str, Path]
    tensors: Mapping[str, StoredTensor]
    _stamps: Mapping[Path, Stamp | None] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, ignore_subfolders: bool = False) -> Checkpoint:
        """Open a ``.safetensors`` file or a folder with such files at its top level.

        Several weights files are taken together; where ``model.safetensors.index.json`` exists it
        must agree with them. Symbolic links are followed. Hidden files such as ``.gitattributes``
        belong to the checkpoint, hidden folders (``.git``, ``.cache``), hidden things that are not
        regular files, and thinwire's own files do not.

        Args:
            path: The file or folder.
            ignore_subfolders: Leave subfolders out instead of refusing them. What lies in them is
                then in no delta.

        Raises:
            NotFound: Nothing is there.
            InvalidArgument: It is no checkpoint, or holds a subfolder or special file.
            FormatError: A weights file or the index is malformed.
            BaseUnusable: An in-place update of it was interrupted and is not yet recovered.
        """
        with os_errors("cannot open", path):
            resolved = Path(path).resolve(strict=True)
        is_folder = resolved.is_dir()
        names = (
            list_files(resolved, ignore_subfolders=ignore_subfolders)
            if is_folder
            else [SINGLE_FILE]
        )
        # First the stamps, then the look at the logs, then the maps: whatever begins or ends after
        # the stamps shows in them later.
        redo_logs = _redo_logs(resolved, names)
        stamps = _take_stamps(resolved, names, redo_logs)
        _refuse_unfinished(redo_logs)
        if not is_folder:
            weights = {SINGLE_FILE: SafetensorsFile.open(resolved)}
            return cls(resolved, False, weights, {}, _all_tensors(weights), stamps)
        weights = {
            name: SafetensorsFile.open(resolved / name) for name in names if is_weights_name(name)
        }
        if not weights:
            raise InvalidArgument(
                f"{resolved} holds no {WEIGHTS_SUFFIX} file",
                hint="Pass a Hugging Face model folder or one safetensors file",
                path=str(resolved),
            )
        tensors = _all_tensors(weights)
        if INDEX_NAME in names:
            _check_index(resolved / INDEX_NAME, weights)
        files = {name: resolved / name for name in names if name not in weights}
        return cls(resolved, True, weights, files, tensors, stamps)

    def check_unchanged(self) -> None:
        """Find out whether what was read is one state: call it when everything was read.

        Raises:
            InvalidArgument: A file was saved, or an in-place update began or ended, since opening.
        """
        for path, stamp in self._stamps.items():
            if Stamp.of(path) != stamp:
                raise InvalidArgument(
                    f"{self.path} changed while it was read: see {path.name}",
                    hint="Run the same command again when nobody writes to the checkpoint",
                    path=str(path),
                )


def hidden_path(checkpoint: Path, role: str) -> Path:
    """Where thinwire keeps something of its own for a checkpoint: inside a folder, beside a file.

    ``checkpoint`` has its symbolic links resolved. Readers skip the name: see
    :func:`is_left_out`.
    """
    if checkpoint.is_dir():
        return checkpoint / f".thinwire-{role}"
    return checkpoint.with_name(f".{checkpoint.name}.thinwire-{role}")


def refuse_unfinished_files(folder: Path) -> None:
    """Raise BaseUnusable if an in-place update of one file of a folder was interrupted.

    Whoever puts another file of that name there makes a folder that nobody can open.
    """
    with os_errors("cannot list", folder):
        logs = list(folder.glob(".?*.thinwire-redo"))
    _refuse_unfinished({log: folder / log.name[1:].removesuffix(".thinwire-redo") for log in logs})


def _redo_logs(checkpoint: Path, names: Iterable[str]) -> dict[Path, Path]:
    """Where logs of unfinished updates would lie, each with what it would be an update of.

    A weights file may be a checkpoint of its own: so the files in a folder count, and the folder
    around a file.
    """
    updated = [checkpoint]
    if checkpoint.is_dir():
        updated += [checkpoint / name for name in names if is_weights_name(name)]
    else:
        updated.append(checkpoint.parent)
    return {hidden_path(path, "redo"): path for path in updated}


def _refuse_unfinished(redo_logs: Mapping[Path, Path]) -> None:
    for redo, updated in redo_logs.items():
        if os.path.lexists(redo):
            raise BaseUnusable(
                f"{updated}: an in-place update was interrupted half-way",
                hint="Run `thinwire apply BASE DELTA --in-place` again, or thinwire.recover(BASE)",
                path=str(updated),
            )


def _take_stamps(
    checkpoint: Path, names: Iterable[str], redo_logs: Iterable[Path]
) -> dict[Path, Stamp | None]:
    paths = [file_path(checkpoint, name) for name in names]
    return {
        path: Stamp.of(path) for path in [*paths, hidden_path(checkpoint, "staging"), *redo_logs]
    }


def list_files(folder: Path, *, ignore_subfolders: bool) -> list[str]:
    """The names of the files that belong to a folder's checkpoint, sorted.

    Raises:
        InvalidArgument: It holds something that no checkpoint may; see :meth:`Checkpoint.open`.
        StoreError: It cannot be listed.
    """
    with os_errors("cannot list", folder), os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
        entries = [entry for entry in entries if not _is_skipped(entry, ignore_subfolders)]
        for entry in entries:
            if fault := _entry_fault(entry):
                raise InvalidArgument(
                    f"{folder}: {entry.name!r} {fault[0]}", hint=fault[1], path=str(folder)
                )
    names = [entry.name for entry in entries]
    if clash := first_clash(names):
        raise InvalidArgument(
            f"{folder}: the names {clash[0]!r} and {clash[1]!r} differ only in case",
            hint="Rename one: some file systems hold only one of them",
            path=str(folder),
        )
    return names


def _is_skipped(entry: os.DirEntry[str], ignore_subfolders: bool) -> bool:
    if entry.name.startswith(".") and (is_left_out(entry.name) or not entry.is_file()):
        return True
    return ignore_subfolders and entry.is_dir()


def _entry_fault(entry: os.DirEntry[str]) -> tuple[str, str] | None:
    """What is wrong with an entry of a folder and what to do about it, or None."""
    if entry.is_dir():
        return (
            "is a subfolder",
            "Move it elsewhere, pass the inner folder itself, or leave subfolders out"
            " (ignore_subfolders=True, --ignore-subfolders)",
        )
    if not entry.is_file():
        kind = "is a broken link" if entry.is_symlink() else "is not a regular file"
        return kind, "Remove it or move it elsewhere"
    if fault := name_fault(entry.name):
        return f"is a name that {fault}", "Rename it: a delta carries only plain names"
    return None


def _all_tensors(weights: Mapping[str, SafetensorsFile]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, str] = {}
    for file_name, file in weights.items():
        for name, tensor in file.tensors.items():
            if name in home:
                raise Corrupt(
                    f"tensor {name!r} is in both {home[name]} and {file_name}"
                    f" of {file.path.parent}",
                    hint="Remove the weights file that is left over from an earlier save",
                    tensor=name,
                    files=[home[name], file_name],
                )
            home[name] = file_name
            tensors[name] = tensor
    return tensors


def _check_index(path: Path, weights: Mapping[str, SafetensorsFile]) -> None:
    for name, file_name in _read_weight_map(path).items():
        if file_name not in weights:
            raise Corrupt(
                f"{path}: names the weights file {file_name!r}, which is not there",
                hint="Fetch the missing file",
                file=file_name,
            )
        if name not in weights[file_name].tensors:
            raise Corrupt(
                f"{path}: tensor {name!r} is not in {file_name!r}",
                hint="Fetch the index and the weights files again, from one save",
                tensor=name,
                file=file_name,
            )


def _read_weight_map(path: Path) -> dict[str, str]:
    raw = map_file(path)
    if raw.size > MAX_INDEX_BYTES:
        raise _bad_index(path, f"{raw.size} bytes are more than {MAX_INDEX_BYTES}")
    try:
        weight_map = parse_object(raw.tobytes()).get("weight_map")
    except ValueError as error:
        raise _bad_index(path, str(error)[:200]) from None
    if not isinstance(weight_map, dict):
        raise _bad_index(path, "it has no weight_map")
    if not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise _bad_index(path, "it places a tensor in something that is no file name")
    return weight_map


def _bad_index(path: Path, reason: str) -> Corrupt:
    message = f"{path}: not an index of weights files: {reason}"
    return Corrupt(message, hint="Fetch the index again", path=str(path))


def refuse_inside(target: Path, *checkpoints: Checkpoint) -> None:
    """Raise InvalidArgument if ``target`` would become a part of a checkpoint's folder."""
    for checkpoint in checkpoints:
        if checkpoint.is_folder and target.parent.resolve() == checkpoint.path:
            raise InvalidArgument(
                f"{target} would become a part of the checkpoint {checkpoint.path}",
                hint="Write it outside the checkpoint's folder",
                path=str(target),
            )
