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
# Says which version a folder holds; see marked.py. Readers skip it, and no delta may name it.
MARK_NAME = ".thinwire-mark"
MAX_MARK_BYTES = 1 << 16


def file_path(checkpoint: Path, name: str) -> Path:
    """Where the file called ``name`` of a checkpoint lies or would lie."""
    return checkpoint if name == SINGLE_FILE else checkpoint / name


def is_weights_name(name: str) -> bool:
    """Whether a file of a folder holds weights: hidden ones are left-overs of other programs."""
    return name.endswith(WEIGHTS_SUFFIX) and not name.startswith(".")


def is_left_out(name: str) -> bool:
    """Whether a file is no part of any checkpoint, and no delta may name it.

    Those are thinwire's own, and what NFS keeps of a removed file that is still open.
    """
    return name.startswith(".") and (
        ".thinwire-" in folded(name) or folded(name).startswith((".thinwire", ".nfs0"))
    )


def name_fault(name: str) -> str | None:
    """What is wrong with a file name, or None: it must be one plain path segment."""
    if not name:
        return "is empty"
    if name == "." or name.startswith(".."):
        return "is a folder's, or starts with two dots"
    if is_left_out(name):
        return "is kept for files that are not the checkpoint's"
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
