"""Plain Hugging Face checkpoints, one folder a version: what every loader reads.

``version_000007/`` holds the files of the checkpoint as they are; ``latest`` names the newest such
folder and is written last. There are no deltas.
"""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import write_file
from thinwire.checkpoint.file_names import INDEX_NAME, SINGLE_FILE, is_weights_name
from thinwire.interop.foreign import ChainVersion, OutFile

NAME = "hf"
LATEST = "latest"
_FOLDER = re.compile(r"version_(\d{6,18})", re.ASCII)


def folder_name(version: int) -> str:
    """The folder of a version."""
    return f"version_{version:06d}"


def list_versions(folder: Path) -> list[ChainVersion]:
    """The versions in a folder of such folders, oldest first."""
    found = []
    for path in folder.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.append(ChainVersion(int(match[1]), None, path, path.name))
    return sorted(found)


def write_full(checkpoint: Checkpoint, out: Path, *, version: int) -> list[OutFile]:
    """All files of a version, and then the name of its folder in ``latest``."""
    name = folder_name(version)
    latest = out / LATEST
    write_file(latest, f"{name}\n".encode())
    return [*checkpoint_files(checkpoint, name), OutFile(LATEST, latest)]


def checkpoint_files(checkpoint: Checkpoint, folder: str) -> list[OutFile]:
    """The files of a checkpoint below ``folder``: small ones, weights, and the index last."""
    weights = [
        OutFile(f"{folder}/{'model.safetensors' if name == SINGLE_FILE else name}", file.path)
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
