"""The manifest of a version in SkyRL's delta weight sync; see :mod:`thinwire.interop.skyrl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thinwire.checkpoint.disk import map_file
from thinwire.checkpoint.file_names import is_weights_name, name_fault
from thinwire.checkpoint.safetensors_file import MAX_EXTENT
from thinwire.checkpoint.strict_json import parse_object
from thinwire.codec.dtypes import byte_count
from thinwire.errors import FormatError, Unsupported
from thinwire.interop.foreign import (
    MAX_DESCRIPTION_BYTES,
    MAX_TENSORS,
    check_count,
    rule_broken,
)
from thinwire.interop.payload_files import MAX_FILES, shown
from thinwire.interop.torch_names import TORCH_NAMES

SYSTEM = "SkyRL's delta sync"
MANIFEST_NAME = "manifest.json"
CHECKSUM_NAMES = ("xxh3-128", "sha256")

_UNKNOWN = {"C64", "F4", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {name: TORCH_NAMES[name] for name in TORCH_NAMES if name not in _UNKNOWN}
)
"""The dtypes that SkyRL knows: safetensors' name to torch's."""

_DTYPES = {torch_name: name for name, torch_name in DTYPE_NAMES.items()}
_LOOKS_LIKE_ONE = {"version", "base_version", "tensors", "payload_files"}


@dataclass(frozen=True)
class SkyRLRecord:
    """What a manifest says of one tensor, in SkyRL's words."""

    name: str
    dtype: str
    shape: list[int]
    uncompressed_num_bytes: int
    compressed_num_bytes: int
    payload_file: str
    payload_key: str
    checksum: str
    checksum_algorithm: str

    @property
    def stored_dtype(self) -> str:
        """Its dtype as safetensors calls it."""
        return _DTYPES[self.dtype.removeprefix("torch.")]


@dataclass(frozen=True)
class SkyRLManifest:
    """A manifest, checked.

    Attributes:
        path: The file.
        version: Which version it makes.
        base_version: From which one.
        records: The changed tensors by name.
        payload_files: The files of payloads.
        file_bytes: Its own size.
    """

    path: Path
    version: int
    base_version: int
    records: Mapping[str, SkyRLRecord]
    payload_files: list[str]
    file_bytes: int


def looks_like_manifest(path: Path) -> bool:
    """Whether a JSON file has the fields of a manifest.

    Raises:
        FormatError: It is no JSON, or too long.
        StoreError: It cannot be read.
    """
    return _read_fields(path)[0].keys() >= _LOOKS_LIKE_ONE


def read_manifest(path: Path) -> SkyRLManifest:
    """Read and check a manifest.

    Raises:
        FormatError: It breaks a rule of the format; the message names the tensor.
        StoreError: It cannot be read.
    """
    table, size = _read_fields(path)
    version = _size(path, table, "version")
    base_version = _size(path, table, "base_version")
    if base_version >= version:
        rule = f"its version is {version} and its base_version {base_version}: not an older one"
        raise rule_broken(SYSTEM, rule, file=path)
    items, files = table.get("tensors", []), table.get("payload_files", [])
    if not isinstance(items, list) or not isinstance(files, list):
        raise rule_broken(SYSTEM, "its tensors or its payload_files are no list", file=path)
    check_count(SYSTEM, "tensors", len(items), MAX_TENSORS, path)
    check_count(SYSTEM, "files", len(files), MAX_FILES, path)
    for file_name in files:
        _check_file_name(path, file_name)
    listed = set(files)
    if len(listed) < len(files):
        raise rule_broken(SYSTEM, "it lists a payload file twice", file=path)
    records: dict[str, SkyRLRecord] = {}
    for item in items:
        record = _parse_record(path, item)
        if record.name in records:
            raise rule_broken(SYSTEM, "it is listed twice", file=path, tensor=record.name)
        if record.payload_file not in listed:
            rule = f"its payload is in {shown(record.payload_file)}, which is not listed"
            raise rule_broken(SYSTEM, rule, file=path, tensor=record.name)
        records[record.name] = record
    for what in ("uncompressed_num_bytes", "compressed_num_bytes"):
        total = sum(getattr(record, what) for record in records.values())
        # Old manifests may lack them, and SkyRL then takes 0.
        if (said := _size(path, table, f"total_{what}", default=total)) != total:
            raise rule_broken(SYSTEM, f"its total_{what} is {said}, not {total}", file=path)
    return SkyRLManifest(path, version, base_version, records, files, size)


def _read_fields(path: Path) -> tuple[dict[str, Any], int]:
    raw = map_file(path)
    check_count(SYSTEM, "bytes of manifest", raw.size, MAX_DESCRIPTION_BYTES, path)
    try:
        return parse_object(raw.tobytes()), raw.size
    except ValueError as error:
        raise rule_broken(SYSTEM, f"it is no manifest: {str(error)[:200]}", file=path) from None


def _parse_record(path: Path, item: Any) -> SkyRLRecord:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise rule_broken(SYSTEM, "one of its tensors has no name", file=path)
    name: str = item["name"]
    values = dict(item)
    # Before there was a choice of checksums, the only one had its own name.
    legacy = values.pop("sha256", None)
    if "checksum" not in values:
        values["checksum"] = legacy
        values.setdefault("checksum_algorithm", "sha256")
    values.setdefault("checksum_algorithm", "xxh3-128")
    known = {field.name for field in fields(SkyRLRecord)}
    for key in sorted(values.keys() - known):
        rule = f"it has {shown(key)}, which SkyRL does not know"
        raise rule_broken(SYSTEM, rule, file=path, tensor=name, error=Unsupported)
    for key in ("dtype", "payload_file", "payload_key", "checksum", "checksum_algorithm"):
        if not isinstance(values.get(key), str):
            rule = f"its {key} is {shown(values.get(key))}"
            raise rule_broken(SYSTEM, rule, file=path, tensor=name)
    sizes = {
        key: _size(path, values, key, tensor=name)
        for key in ("uncompressed_num_bytes", "compressed_num_bytes")
    }
    record = SkyRLRecord(**(values | sizes | {"shape": _shape(path, values, name)}))
    _check_file_name(path, record.payload_file, tensor=name)
    _check_kind(path, record)
    return record


def _check_kind(path: Path, record: SkyRLRecord) -> None:
    """Its dtype and checksum are known ones, and its size is that of its shape."""
    if record.checksum_algorithm not in CHECKSUM_NAMES:
        raise rule_broken(
            SYSTEM,
            f"its checksum_algorithm is {shown(record.checksum_algorithm)}",
            file=path,
            tensor=record.name,
            error=Unsupported,
            hint=f"Known are {', '.join(CHECKSUM_NAMES)}",
        )
    if record.dtype.removeprefix("torch.") not in _DTYPES:
        raise rule_broken(
            SYSTEM,
            f"its dtype is {shown(record.dtype)}",
            file=path,
            tensor=record.name,
            error=Unsupported,
            hint=f"Known are {', '.join(_DTYPES)}",
        )
    try:
        size = byte_count(record.stored_dtype, record.shape)
    except FormatError as error:
        rule = f"its shape is impossible: {error.message}"
        raise rule_broken(SYSTEM, rule, file=path, tensor=record.name, error=type(error)) from None
    if size != record.uncompressed_num_bytes:
        rule = (
            f"its uncompressed_num_bytes is {record.uncompressed_num_bytes}, where"
            f" {record.dtype} {record.shape} needs {size}"
        )
        raise rule_broken(SYSTEM, rule, file=path, tensor=record.name)


def _shape(path: Path, values: Mapping[str, Any], name: str) -> list[int]:
    shape = values.get("shape")
    # type(), because True is an int to isinstance.
    if not isinstance(shape, list) or not all(
        type(extent) is int and 0 <= extent < MAX_EXTENT for extent in shape
    ):
        raise rule_broken(SYSTEM, f"its shape is {shown(shape)}", file=path, tensor=name)
    return shape


def _size(
    path: Path,
    table: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    tensor: str | None = None,
) -> int:
    value = table.get(key, default)
    if type(value) is not int or not 0 <= value < MAX_EXTENT:
        raise rule_broken(SYSTEM, f"its {key} is {shown(value)}", file=path, tensor=tensor)
    return value


def _check_file_name(path: Path, name: Any, *, tensor: str | None = None) -> None:
    # SkyRL joins it to a folder as it is; here it must be a plain name.
    if not isinstance(name, str):
        rule = f"it names the file {shown(name)}, which is no name"
        raise rule_broken(SYSTEM, rule, file=path, tensor=tensor)
    fault = name_fault(name)
    if fault is None and not is_weights_name(name):
        fault = "is not one of weights"
    if fault:
        rule = f"it names the file {shown(name)}: the name {fault}"
        raise rule_broken(SYSTEM, rule, file=path, tensor=tensor)
