"""Which names a checkpoint's files may have. Names from a delta are hostile until checked here."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

WEIGHTS_SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Stands for the checkpoint itself where it is one file: no file in a folder can be called so.
SINGLE_FILE = "."
MAX_NAME_BYTES = 255


def file_path(checkpoint: Path, name: str) -> Path:
    """Where the file called ``name`` of a checkpoint lies or would lie."""
    return checkpoint if name == SINGLE_FILE else checkpoint / name


def name_fault(name: str) -> str | None:
    """What is wrong with a file name, or None: it must be one plain, visible path segment."""
    if not name:
        return "is empty"
    if name.startswith("."):
        return "starts with a dot"
    if "/" in name or "\\" in name:
        return "has path parts"
    if ":" in name:
        return "has a colon (a drive letter or a stream)"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "has control characters or is not Unicode text"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    return None


def folded(name: str) -> str:
    """The form in which two names are one on a file system that ignores case."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def first_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that are equal, or differ only in case or Unicode form."""
    seen: dict[str, str] = {}
    for name in names:
        key = folded(name)
        if key in seen:
            return seen[key], name
        seen[key] = name
    return None
