"""Plain Hugging Face checkpoints, one folder a version: what every loader reads.

``version_000007/`` holds the files of the checkpoint as they are; ``latest`` names the newest such
folder and is written last. There are no deltas.
"""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors, write_file
from thinwire.checkpoint.file_names import INDEX_NAME, SINGLE_FILE, is_weights_name
from thinwire.interop.foreign import ChainVersion, OutFile

NAME = "hf"
LATEST = "latest"
SINGLE_NAME = "model.safetensors"
"""What every loader calls the one weights file of a checkpoint."""

_FOLDER = re.compile(r"version_(\d{6,18})", re.ASCII)


def folder_name(version: int) -> str:
    """The folder of a version."""
    return f"version_{version:06d}"


def list_versions(folder: Path) -> list[ChainVersion]:
    """The versions in a folder of such folders, oldest first; [] if there are none.

    Raises:
        StoreError: The folder cannot be read.
    """
    if not folder.is_dir():
        return []
    with os_errors("cannot list", folder):
        paths = [path for path in folder.iterdir() if path.is_dir()]
    found = [(match, path) for path in paths if (match := _FOLDER.fullmatch(path.name))]
    return sorted(ChainVersion(int(match[1]), None, path, path.name) for match, path in found)


def write_full(checkpoint: Checkpoint, out: Path, *, version: int) -> list[OutFile]:
    """All files of a version, and then the name of its folder in ``latest``."""
    name = folder_name(version)
    latest = out / LATEST
    write_file(latest, pointer_to(name))
    return [*checkpoint_files(checkpoint, name), OutFile(LATEST, latest)]


def pointer_to(name: str) -> bytes:
    """What ``latest`` holds while a folder is the newest."""
    return f"{name}\n".encode()


def checkpoint_files(checkpoint: Checkpoint, folder: str) -> list[OutFile]:
    """The files of a checkpoint below ``folder``: small ones, weights, and the index last."""
    weights = [
        OutFile(f"{folder}/{SINGLE_NAME if name == SINGLE_FILE else name}", file.path)
        for name, file in checkpoint.weights.items()
    ]
    small = [
        OutFile(f"{folder}/{name}", path)
        for name, path in checkpoint.files.items()
        if not is_weights_name(name) and name != INDEX_NAME
    ]
    index = [
        OutFile(f"{folder}/{INDEX_NAME}", path)
        for name, path in checkpoint.files.items()
        if name == INDEX_NAME
    ]
    return [*small, *weights, *index]
