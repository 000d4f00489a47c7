"""Reading slime's ``weight_v`` folders; see :mod:`thinwire.interop.slime`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from thinwire.checkpoint.disk import ByteArray, os_errors
from thinwire.checkpoint.file_names import INDEX_NAME, is_weights_name
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import ChecksumMismatch, InvalidArgument, ThinwireError, VersionGap
from thinwire.interop.checksums import is_checksum
from thinwire.interop.foreign import (
    ChainVersion,
    Facts,
    ForeignDelta,
    ForeignTensor,
    require_base,
    rule_broken,
)
from thinwire.interop.hf import SINGLE_NAME
from thinwire.interop.payload_files import (
    PayloadFile,
    declared_bytes,
    decode_xor,
    new_stored,
    open_payloads,
    shown,
    size_mismatch,
    unpack,
)
from thinwire.interop.slime_index import (
    CHECKSUM_NAMES,
    COMPRESSION,
    ENCODINGS,
    SYSTEM,
    SlimeIndex,
    folder_version,
    read_index,
)

NAME = "slime"

# What `overwrite` counts and addresses bytes with.
WORD_BYTES = 4
WORD = np.dtype("<u4")


class SlimeDelta(ForeignDelta):
    """An opened delta of slime's; see :class:`thinwire.interop.foreign.ForeignDelta`."""

    def __init__(self, index: SlimeIndex, files: Mapping[str, PayloadFile]) -> None:
        self._encoding = index.choice("delta_encoding", ENCODINGS)
        self._checksum = index.choice("checksum_format", CHECKSUM_NAMES)
        index.choice("compression_format", (COMPRESSION,))
        version, base_version = index.number("version"), index.number("base_version")
        if base_version >= version:
            rule = f"its version is {version} and its base_version {base_version}: not an older one"
            raise rule_broken(SYSTEM, rule, file=index.path)
        self._files = files
        self._homes = index.weight_map
        self._facts = Facts(
            format=NAME,
            encoding=self._encoding,
            version=version,
            base_version=base_version,
            file_bytes=index.file_bytes + sum(file.header.file_bytes for file in files.values()),
            metadata={
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in index.settings.items()
                if key not in ("version", "base_version", "delta_encoding")
            },
        )
        self._tensors = {
            name: self._describe(name, files[file_name])
            for name, file_name in index.weight_map.items()
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
        file = self._files[self._homes[name]]
        payload = file.tensors[name].data
        old = require_base(SYSTEM, name, base, file.path)
        if self._encoding == "xor":
            data = decode_xor(SYSTEM, file.path, name, payload, old.data)
        else:
            data = _decode_overwrite(file.path, name, payload, old.data)
        text = file.metadata[name]
        if not is_checksum(self._checksum, text, data):
            raise rule_broken(
                SYSTEM,
                f"what becomes of it does not have the {self._checksum} {shown(text)}",
                file=file.path,
                tensor=name,
                error=ChecksumMismatch,
                hint="Give the checkpoint that the delta was made from, or fetch the delta again",
            )
        return new_stored(old, data)

    def close(self) -> None:
        """Let go of the files."""
        self._files = {}

    def _describe(self, name: str, file: PayloadFile) -> ForeignTensor:
        text = file.metadata.get(name)
        if text is None:
            rule = "the file's metadata has no checksum for it"
            raise rule_broken(SYSTEM, rule, file=file.path, tensor=name)
        return ForeignTensor(payload_bytes=file.payload_bytes(name), checksum=text)


def is_delta(path: Path) -> bool:
    """Whether a folder has an index that says that it is a delta of slime's."""
    try:
        index = path / INDEX_NAME
        return path.is_dir() and index.is_file() and read_index(index).is_delta
    except (ThinwireError, OSError):
        return False


def open_delta(path: Path) -> SlimeDelta:
    """Open the folder of one delta. Files that its index does not name are not read.

    Raises:
        InvalidArgument: It holds full weights.
        FormatError: It breaks a rule of the format; the message names the file and the tensor.
        StoreError: It cannot be read, or has no index.
    """
    index = read_index(path / INDEX_NAME)
    if not index.is_delta:
        raise InvalidArgument(
            f"{path} is no delta: its index has no delta_encoding ({SYSTEM} format)",
            hint="Open it as a checkpoint: it holds full weights",
            path=str(path),
        )
    _check_number(path, index)
    listed = set(index.weight_map.values())
    found = set(filter(is_weights_name, _names(path)))
    for name in sorted(listed - found):
        rule = f"its index names {shown(name)}, which is not there"
        raise rule_broken(SYSTEM, rule, file=path, hint="Fetch the missing file")
    files = {name: open_payloads(SYSTEM, path / name) for name in sorted(listed)}
    _check_homes(index, files)
    return SlimeDelta(index, files)


def list_versions(folder: Path) -> list[ChainVersion]:
    """The versions in a folder of ``weight_v`` folders, oldest first; [] if there are none.

    A folder without an index is one that is still being written and is left out, unless its only
    weights are in ``model.safetensors``. The first delta may have a base that is no longer there.

    Raises:
        VersionGap: A delta's base is not the version before it.
        FormatError: An index is malformed, or says another number than its folder's name.
        StoreError: The folder cannot be read.
    """
    if not folder.is_dir():
        return []
    with os_errors("cannot list", folder):
        paths = [path for path in folder.iterdir() if path.is_dir()]
    found = sorted(
        (version, path) for path in paths if (version := folder_version(path.name)) is not None
    )
    versions: list[ChainVersion] = []
    for version, path in found:
        listed = _chain_version(version, path)
        if listed is None:
            continue
        before = versions[-1].version if versions else listed.base_version
        if listed.base_version is not None and listed.base_version != before:
            raise VersionGap(
                f"{path}: a delta from version {listed.base_version}, and the version before it in"
                f" this chain is {before} ({SYSTEM} format)",
                hint="Fetch the missing version, or go on from the next full one",
                path=str(path),
                version=version,
                base_version=listed.base_version,
            )
        versions.append(listed)
    return versions


def _chain_version(version: int, path: Path) -> ChainVersion | None:
    """One version of a chain; None: it is not whole yet."""
    names = _names(path)
    if INDEX_NAME not in names:
        # A delta's files come before its index and look like weights: only this is no part of one.
        is_full = set(filter(is_weights_name, names)) == {SINGLE_NAME}
        return ChainVersion(version, None, path, path.name) if is_full else None
    index = read_index(path / INDEX_NAME)
    if not index.is_delta:
        return ChainVersion(version, None, path, path.name)
    _check_number(path, index)
    return ChainVersion(version, index.number("base_version"), path, path.name)


def _check_number(path: Path, index: SlimeIndex) -> None:
    expected = folder_version(path.name)
    if expected is not None and index.number("version") != expected:
        rule = f"its version is {index.number('version')}, and its folder is {path.name}"
        raise rule_broken(SYSTEM, rule, file=index.path)


def _check_homes(index: SlimeIndex, files: Mapping[str, PayloadFile]) -> None:
    """Each tensor is in the one file that the index says, and there are no others."""
    for file_name, file in files.items():
        for name in file.tensors:
            home = index.weight_map.get(name)
            if home != file_name:
                where = "is not in the index" if home is None else f"is in {shown(home)} by it"
                raise rule_broken(SYSTEM, f"it {where}", file=file.path, tensor=name)
    for name, file_name in index.weight_map.items():
        if name not in files[file_name].tensors:
            raise rule_broken(
                SYSTEM, f"it is not in {shown(file_name)}", file=index.path, tensor=name
            )


def _names(folder: Path) -> set[str]:
    with os_errors("cannot list", folder):
        return {path.name for path in folder.iterdir()}


def _decode_overwrite(file: object, name: str, payload: ByteArray, old: ByteArray) -> ByteArray:
    """The new bytes of a tensor; the checksum is still to be compared."""
    size = declared_bytes(payload)
    if size is None:
        # slime's receiver unpacks it in one go, which needs the size.
        rule = "its payload is no zstd frame that says its size"
        raise rule_broken(SYSTEM, rule, file=file, tensor=name)
    count, rest = divmod(size - WORD_BYTES, WORD_BYTES + 1)
    if rest:  # Also where there is no room for the count.
        rule = f"its payload has {size} bytes, which no number of changes takes"
        raise rule_broken(SYSTEM, rule, file=file, tensor=name)
    if count > old.size:
        raise size_mismatch(SYSTEM, file, name, f"changes {count} bytes", old)
    plain = unpack(SYSTEM, file, name, payload, size)
    values_start = WORD_BYTES * (1 + count)
    if int.from_bytes(plain[:WORD_BYTES], "little") != count:
        rule = f"its payload has room for {count} changes and says another number"
        raise rule_broken(SYSTEM, rule, file=file, tensor=name)
    positions = np.frombuffer(plain, WORD, count, WORD_BYTES)
    if count and int(positions.max()) >= old.size:
        what = f"changes byte {int(positions.max())}"
        raise size_mismatch(SYSTEM, file, name, what, old)
    is_sorted = bool((positions[1:] > positions[:-1]).all())
    if not is_sorted and np.unique(positions).size < count:
        raise rule_broken(SYSTEM, "its payload changes a byte twice", file=file, tensor=name)
    new = old.copy()
    new[positions] = np.frombuffer(plain, np.uint8, count, values_start)
    return new
