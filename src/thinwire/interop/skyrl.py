"""SkyRL's delta weight sync, as of its release 0.4.0, the first one that has it.

``delta-00000007/`` is one version: files ``delta-rank00000-file000000.safetensors`` of zstd
payloads (a tensor's old bytes XOR its new ones), and a ``manifest.json``, written last, with the
dtype, shape, sizes and checksum of every changed tensor and where its payload is. Version 0 is the
model that both sides begin with: the chain has no full weights. Where SkyRL's publisher meets
another dtype than the base's it converts; here that is an error, as nothing is converted. Where
its receiver leaves out a tensor that the base lacks, that is one too. Revisions before the release
called the folder ``v00000007`` and its files otherwise, and took SHA-256: that is read as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors, write_file
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import (
    ChecksumMismatch,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
    Unsupported,
    VersionGap,
)
from thinwire.interop.change import Change
from thinwire.interop.checksums import checksum as checksum_of
from thinwire.interop.checksums import is_checksum
from thinwire.interop.foreign import (
    ChainVersion,
    Facts,
    ForeignDelta,
    ForeignTensor,
    OutFile,
    require_base,
    rule_broken,
)
from thinwire.interop.payload_files import (
    MAX_FILE_BYTES,
    PayloadFile,
    decode_xor,
    encode_xor,
    new_payload_files,
    new_stored,
    open_payloads,
    shown,
)
from thinwire.interop.skyrl_manifest import (
    CHECKSUM_NAMES,
    DTYPE_NAMES,
    MANIFEST_NAME,
    SYSTEM,
    SkyRLManifest,
    SkyRLRecord,
    looks_like_manifest,
    read_manifest,
)
from thinwire.interop.writing import code_changes, refuse_other_changes, require_consecutive

# Bytes of memory for each byte of a tensor of which every word changed, as measured.
_MEMORY_TIMES = 5
NAME = "skyrl"

_SHOWN_CHARS = 200
_FOLDER = re.compile(r"delta-(\d{8,18})", re.ASCII)
# As revisions before the first release called them.
_OLD_FOLDER = re.compile(r"v(\d{8,18})", re.ASCII)


def folder_name(version: int) -> str:
    """The folder of a version."""
    return f"delta-{version:08d}"


class SkyRLDelta(ForeignDelta):
    """An opened delta of SkyRL's; see :class:`thinwire.interop.foreign.ForeignDelta`."""

    def __init__(self, manifest: SkyRLManifest, files: Mapping[str, PayloadFile]) -> None:
        _check_payloads(manifest, files)
        self._manifest = manifest
        self._files = files
        sizes = [file.header.file_bytes for file in files.values()]
        self._facts = Facts(
            format=NAME,
            encoding="xor",
            version=manifest.version,
            base_version=manifest.base_version,
            file_bytes=manifest.file_bytes + sum(sizes),
        )
        self._tensors = {
            name: ForeignTensor(
                payload_bytes=record.compressed_num_bytes,
                dtype=record.stored_dtype,
                shape=tuple(record.shape),
                checksum=record.checksum,
            )
            for name, record in manifest.records.items()
        }

    @property
    def facts(self) -> Facts:
        """What it says of itself."""
        return self._facts

    @property
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """The tensors that it may change."""
        return self._tensors

    def new_tensor(self, name: str, base: StoredTensor | None) -> StoredTensor:
        """The new tensor, verified; see :class:`thinwire.interop.foreign.ForeignDelta`."""
        record = self._manifest.records[name]
        file = self._files[record.payload_file]
        old = require_base(SYSTEM, name, base, file.path)
        if (old.dtype, old.shape) != (record.stored_dtype, tuple(record.shape)):
            raise TensorMismatch(
                f"{self._manifest.path}: tensor {name[:_SHOWN_CHARS]!r} is {record.dtype}"
                f" {record.shape}, and the base's is {old.dtype} {list(old.shape)}: nothing is"
                f" converted here ({SYSTEM} format)",
                hint="Give the checkpoint that the delta was made from",
                tensor=name,
                file=str(self._manifest.path),
            )
        payload = file.tensors[record.payload_key].data
        data = decode_xor(SYSTEM, file.path, name, payload, old.data)
        if not is_checksum(record.checksum_algorithm, record.checksum, data):
            raise rule_broken(
                SYSTEM,
                f"what becomes of it does not have the {record.checksum_algorithm}"
                f" {shown(record.checksum)}",
                file=self._manifest.path,
                tensor=name,
                error=ChecksumMismatch,
                hint="Give the checkpoint that the delta was made from, or fetch the delta again",
            )
        return new_stored(old, data)

    def close(self) -> None:
        """Let go of the files."""
        self._files = {}


def is_delta(path: Path) -> bool:
    """Whether a folder has a manifest with the fields of SkyRL's."""
    try:
        manifest = path / MANIFEST_NAME
        return path.is_dir() and manifest.is_file() and looks_like_manifest(manifest)
    except (ThinwireError, OSError):
        return False


def open_delta(path: Path) -> SkyRLDelta:
    """Open the folder of one delta.

    Raises:
        FormatError: It breaks a rule of the format; the message names the file and the tensor.
        StoreError: It cannot be read, or has no manifest.
    """
    manifest = read_manifest(path / MANIFEST_NAME)
    _check_number(path, manifest)
    with os_errors("cannot list", path):
        found = {entry.name for entry in path.iterdir()}
    for name in manifest.payload_files:
        if name not in found:
            rule = f"its manifest names {shown(name)}, which is not there"
            raise rule_broken(SYSTEM, rule, file=path, hint="Fetch the missing file")
    files = {name: open_payloads(SYSTEM, path / name) for name in manifest.payload_files}
    return SkyRLDelta(manifest, files)


def list_versions(folder: Path) -> list[ChainVersion]:
    """The deltas in a folder of such folders, oldest first; [] if there are none.

    A folder without a manifest is one that is still being written, and is left out. The first
    delta may have a base that is not there: version 0 never is.

    Raises:
        VersionGap: A delta's base is not the version before it.
        FormatError: A manifest is malformed, says another number than its folder's name, or there
            are two for one version.
        StoreError: The folder cannot be read.
    """
    if not folder.is_dir():
        return []
    with os_errors("cannot list", folder):
        found = sorted(
            (version, path)
            for path in folder.iterdir()
            if (version := _folder_version(path)) is not None and (path / MANIFEST_NAME).exists()
        )
    versions: list[ChainVersion] = []
    for version, path in found:
        manifest = read_manifest(path / MANIFEST_NAME)
        _check_number(path, manifest)
        before = versions[-1].version if versions else manifest.base_version
        if version == before:
            raise rule_broken(SYSTEM, f"there are two folders for version {version}", file=folder)
        if manifest.base_version != before:
            raise VersionGap(
                f"{path}: a delta from version {manifest.base_version}, and the version before it"
                f" in this chain is {before} ({SYSTEM} format)",
                hint="Fetch the missing version",
                path=str(path),
                version=version,
                base_version=manifest.base_version,
            )
        versions.append(ChainVersion(version, manifest.base_version, path, path.name))
    return versions


def write_delta(
    change: Change,
    out: Path,
    *,
    version: int,
    base_version: int,
    checksum: str = "xxh3-128",
    max_file_bytes: int = MAX_FILE_BYTES,
    workers: int = 1,
) -> list[OutFile]:
    """Write one delta into the empty folder ``out``: its payload files, then its manifest.

    Args:
        change: What it does.
        out: Where the files are to lie until they are brought to their place.
        version: Which version it makes.
        base_version: Which version it is made from: the one before.
        checksum: "xxh3-128", or "sha256", which SkyRL reads too and was its first one.
        max_file_bytes: After how many bytes of payloads another file is begun.
        workers: Threads that code; the bytes are the same for any number.

    Raises:
        InvalidArgument: An argument is not one that the format has.
        TensorMismatch: A tensor came, went, or changed dtype or shape.
        Unsupported: SkyRL does not know a changed tensor's dtype, something else than tensors
            changed, or versions are left out.
        StoreError: The disk is full.
    """
    if checksum not in CHECKSUM_NAMES:
        raise InvalidArgument(
            f"the checksum {checksum[:40]!r} is not one of {SYSTEM} format",
            hint=f"Known are {', '.join(CHECKSUM_NAMES)}",
        )
    require_consecutive(SYSTEM, version, base_version)
    refuse_other_changes(SYSTEM, change)
    records: list[SkyRLRecord] = []

    def path_of(number: int) -> Path:
        return out / f"delta-rank00000-file{number:06d}.safetensors"

    def code(name: str, old: StoredTensor, new: StoredTensor) -> tuple[bytes, SkyRLRecord]:
        if new.dtype not in DTYPE_NAMES:
            raise Unsupported(
                f"tensor {name[:_SHOWN_CHARS]!r} is {new.dtype}, which SkyRL does not know",
                hint=f"It knows {', '.join(DTYPE_NAMES)}",
                tensor=name,
            )
        payload = encode_xor(old.data, new.data)
        return payload, SkyRLRecord(
            name=name,
            dtype=DTYPE_NAMES[new.dtype],
            shape=list(new.shape),
            uncompressed_num_bytes=new.data.size,
            compressed_num_bytes=len(payload),
            payload_file="",  # known once it is written
            payload_key=name,
            checksum=checksum_of(checksum, new.data),
            checksum_algorithm=checksum,
        )

    with new_payload_files(path_of, max_file_bytes) as files:
        for name, (payload, record) in code_changes(
            change, code, workers, memory_times=_MEMORY_TIMES
        ):
            number = files.add(name, payload)
            records.append(replace(record, payload_file=path_of(number).name))
    manifest = {
        "version": version,
        "base_version": base_version,
        "tensors": [asdict(record) for record in records],
        "total_uncompressed_num_bytes": sum(row.uncompressed_num_bytes for row in records),
        "total_compressed_num_bytes": sum(row.compressed_num_bytes for row in records),
        "payload_files": [path.name for path in files.paths],
    }
    write_file(out / MANIFEST_NAME, json.dumps(manifest).encode())
    folder = folder_name(version)
    return [OutFile(f"{folder}/{path.name}", path) for path in [*files.paths, out / MANIFEST_NAME]]


def write_full(checkpoint: Checkpoint, out: Path, *, version: int) -> list[OutFile]:
    """Refuse: SkyRL's chain has no full versions.

    Raises:
        InvalidArgument: Always.
    """
    raise InvalidArgument(
        f"{SYSTEM} has no full versions, so {checkpoint.path} cannot be version {version} in {out}",
        hint="Start both sides with it as their base model: that is version 0",
    )


def _folder_version(path: Path) -> int | None:
    if match := _FOLDER.fullmatch(path.name):
        return int(match[1]) if folder_name(int(match[1])) == path.name else None
    # Others may call a folder so, too.
    match = _OLD_FOLDER.fullmatch(path.name)
    return int(match[1]) if match and is_delta(path) else None


def _check_number(path: Path, manifest: SkyRLManifest) -> None:
    match = _FOLDER.fullmatch(path.name) or _OLD_FOLDER.fullmatch(path.name)
    if match and manifest.version != int(match[1]):
        rule = f"its version is {manifest.version}, and its folder is {path.name}"
        raise rule_broken(SYSTEM, rule, file=manifest.path)


def _check_payloads(manifest: SkyRLManifest, files: Mapping[str, PayloadFile]) -> None:
    """Each record has a payload of its own, of the size that it says, and no other is there."""
    left = {(file_name, key) for file_name, file in files.items() for key in file.tensors}
    for record in manifest.records.values():
        place = record.payload_file, record.payload_key
        if place not in left:
            rule = (
                f"its payload {shown(record.payload_key)} in {shown(record.payload_file)} is"
                " missing, or is another tensor's too"
            )
            raise rule_broken(SYSTEM, rule, file=manifest.path, tensor=record.name)
        left.remove(place)
        size = files[record.payload_file].payload_bytes(record.payload_key)
        if size != record.compressed_num_bytes:
            rule = f"its payload has {size} bytes, not {record.compressed_num_bytes}"
            raise rule_broken(SYSTEM, rule, file=manifest.path, tensor=record.name)
    for file_name, key in sorted(left):
        raise rule_broken(SYSTEM, "no record is for it", file=files[file_name].path, tensor=key)
