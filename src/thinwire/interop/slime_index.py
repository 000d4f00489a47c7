"""The index of a version in slime's ``weight_v`` layout; see :mod:`thinwire.interop.slime`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.checkpoint.disk import map_file
from thinwire.checkpoint.file_names import is_weights_name, name_fault
from thinwire.checkpoint.strict_json import parse_object
from thinwire.errors import Unsupported
from thinwire.interop.foreign import (
    MAX_DESCRIPTION_BYTES,
    MAX_TENSORS,
    check_count,
    rule_broken,
)
from thinwire.interop.payload_files import MAX_FILES, shown

SYSTEM = "slime's weight_v"
ENCODINGS = ("xor", "overwrite")
CHECKSUM_NAMES = ("xxh3-128", "blake3", "adler32")
COMPRESSION = "zstd"

_FOLDER = re.compile(r"weight_v(\d{6,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


def folder_name(version: int) -> str:
    """The folder of a version."""
    return f"weight_v{version:06d}"


def folder_version(name: str) -> int | None:
    """The version that a folder is for, by its name; None: for none."""
    match = _FOLDER.fullmatch(name)
    if match is None or folder_name(int(match[1])) != name:
        return None
    return int(match[1])


@dataclass(frozen=True)
class SlimeIndex:
    """The index of a version's folder, checked.

    Attributes:
        path: The file.
        metadata: Its metadata, as it is.
        weight_map: The file of each tensor, by name.
        file_bytes: Its size.
    """

    path: Path
    metadata: Mapping[str, Any]
    weight_map: Mapping[str, str]
    file_bytes: int

    @property
    def is_delta(self) -> bool:
        """Whether the folder holds a delta; else it holds full weights."""
        return "delta_encoding" in self.metadata

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        """The metadata without what is nested."""
        return {
            key: value
            for key, value in self.metadata.items()
            if value is None or isinstance(value, str | int | float)
        }

    def number(self, key: str) -> int:
        """A version's number, as text or as a number.

        Raises:
            Corrupt: It is missing, or is no number.
        """
        value = self.metadata.get(key)
        if type(value) is int and 0 <= value < 10**18:
            return value
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            return int(value)
        raise rule_broken(SYSTEM, f"its {key} is {shown(value)}, not a number", file=self.path)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        """A setting that must be one of the known ones.

        Raises:
            Corrupt: It is missing, or is not text.
            Unsupported: It is another one.
        """
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise rule_broken(SYSTEM, f"its {key} is {shown(value)}", file=self.path)
        if value not in known:
            raise rule_broken(
                SYSTEM,
                f"its {key} is {shown(value)}",
                file=self.path,
                error=Unsupported,
                hint=f"Known are {', '.join(known)}",
            )
        return value


def read_index(path: Path) -> SlimeIndex:
    """Read and check an index of weights files.

    Raises:
        FormatError: It is malformed.
        StoreError: It cannot be read.
    """
    raw = map_file(path)
    check_count(SYSTEM, "bytes of index", raw.size, MAX_DESCRIPTION_BYTES, path)
    try:
        fields = parse_object(raw.tobytes())
    except ValueError as error:
        raise rule_broken(SYSTEM, f"it is no index: {str(error)[:200]}", file=path) from None
    metadata, weight_map = fields.get("metadata", {}), fields.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise rule_broken(SYSTEM, "its metadata or its weight_map is no table", file=path)
    check_count(SYSTEM, "tensors", len(weight_map), MAX_TENSORS, path)
    for file_name in weight_map.values():
        if not isinstance(file_name, str):
            rule = f"it places a tensor in {shown(file_name)}, which is no file name"
            raise rule_broken(SYSTEM, rule, file=path)
    names = set(weight_map.values())
    check_count(SYSTEM, "files", len(names), MAX_FILES, path)
    for file_name in names:
        fault = name_fault(file_name)
        if fault is None and not is_weights_name(file_name):
            fault = "is not one of weights"
        if fault:
            rule = f"it names the file {shown(file_name)}: the name {fault}"
            raise rule_broken(SYSTEM, rule, file=path)
    return SlimeIndex(path, metadata, weight_map, raw.size)
