"""The small files that make a first version loadable: config, tokenizer and the like."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.checkpoint.disk import os_errors
from thinwire.checkpoint.file_names import INDEX_NAME, is_weights_name, name_fault
from thinwire.errors import InvalidArgument, LimitExceeded

MAX_FILE_BYTES = 1 << 28
Files = str | os.PathLike[str] | Mapping[str, bytes | os.PathLike[str]]


def small_files(model: object, files: Files | None, dtype: str = "") -> dict[str, bytes]:
    """The files of a first version by name.

    Args:
        model: A Hugging Face model has its configuration with it.
        files: What comes beside, or instead of it: a folder, of which weights and subfolders are
            left out, or contents by name.
        dtype: The dtype that the weights are published in, by torch's name, or "auto": what a model
            that is trained in another one says of itself would make engines load it so.

    Raises:
        InvalidArgument: A name that a checkpoint's folder cannot have.
        LimitExceeded: A file too large to be a small one.
    """
    found = _configs(model, dtype)
    if isinstance(files, Mapping):
        found |= {name: _content(name, data) for name, data in files.items()}
    elif files is not None:
        found |= _of_folder(Path(files))
    for name in found:
        fault = name_fault(name)
        if fault or is_weights_name(name) or name == INDEX_NAME:
            raise InvalidArgument(f"the file name {name!r} {fault or 'is that of weights'}")
    return found


def _content(name: str, data: object) -> bytes:
    if isinstance(data, os.PathLike):
        with os_errors("cannot read", data):
            return Path(data).read_bytes()
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidArgument(f"the file {name!r} is {type(data).__name__}, not bytes or a path")
    return bytes(data)


def check_weights_name(name: str) -> None:
    """Raise InvalidArgument unless a weights file may have this name."""
    fault = name_fault(name)
    if fault or not is_weights_name(name):
        raise InvalidArgument(
            f"the weights file's name {name!r} {fault or 'does not end in .safetensors'}"
        )


def _of_folder(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with os_errors("cannot read", folder):
        for path in sorted(folder.iterdir()):
            name = path.name
            is_weights = is_weights_name(name) or name.endswith((".bin", ".pt", ".pth", ".gguf"))
            if not path.is_file() or is_weights or name == INDEX_NAME or name.startswith("."):
                continue
            if path.stat().st_size > MAX_FILE_BYTES:
                raise LimitExceeded(
                    f"{path} has {path.stat().st_size} bytes; a small file has at most "
                    f"{MAX_FILE_BYTES}",
                    hint="Give the files by name (files={...})",
                )
            found[name] = path.read_bytes()
    return found


def _configs(model: Any, dtype: str) -> dict[str, bytes]:
    """config.json and generation_config.json, as ``save_pretrained`` writes them."""
    while hasattr(model, "module") and not hasattr(model, "config"):
        model = model.module
    found: dict[str, bytes] = {}
    for attribute in ("config", "generation_config"):
        to_json = getattr(getattr(model, attribute, None), "to_json_string", None)
        if not callable(to_json):
            continue
        config = json.loads(to_json())
        for key in ("dtype", "torch_dtype"):
            if dtype and isinstance(config.get(key), str):
                config[key] = _published(dtype, config[key])
        text = json.dumps(config, indent=2, sort_keys=True)
        found[f"{attribute}.json"] = f"{text}\n".encode()
    return found


def _published(dtype: str, own: str) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if own in ("float32", "float64") else own
