"""grail's checkpoints (PULSE): ``checkpoint-{window}/{FULL,DELTA}``, and ``READY-{window}``.

A window is a version. ``FULL`` is a checkpoint folder. ``DELTA`` holds ``metadata.json``, with the
SHA-256 of each file and the window before, ``delta_metadata.json`` and ``delta_sparse.bin.zst``;
see :mod:`thinwire.interop.grail_layout`. A window counts once its ``READY-`` file is there.

``manifest.sig``, the signature of the publisher's hot key, **is not verified**: who wrote the files
is not known. The hash of all new weights can be; see :meth:`GrailDelta.check_weights`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import xxhash

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import ByteArray, map_file, os_errors
from thinwire.checkpoint.file_names import name_fault
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.checkpoint.strict_json import parse_object
from thinwire.errors import ChecksumMismatch, FormatError, Truncated, Unsupported
from thinwire.interop.foreign import (
    MAX_DESCRIPTION_BYTES,
    ChainVersion,
    Facts,
    ForeignDelta,
    ForeignTensor,
    check_count,
    require_base,
    rule_broken,
)
from thinwire.interop.grail_layout import (
    FORMATS,
    LENGTH_BYTES,
    SYSTEM,
    array_at,
    join_positions,
    parse_header,
)
from thinwire.interop.grail_writing import (
    DATA_NAME,
    DELTA,
    FULL,
    METADATA_NAME,
    WEIGHTS_METADATA_NAME,
    hash_weights,
    write_delta,
    write_full,
)
from thinwire.interop.payload_files import MAX_FILES
from thinwire.interop.sparse import NewWords, check_fits, words_of
from thinwire.interop.unpacked import FrameReader, description_limit, expansion_limit

NAME = "grail"

_HASH_PIECE_BYTES = 16 << 20
_WINDOW = re.compile(r"checkpoint-([0-9]{1,15})")
_READY = re.compile(r"READY-[0-9]{1,15}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class GrailDelta(ForeignDelta):
    """One opened delta; see :class:`thinwire.interop.foreign.ForeignDelta`.

    The changes are unpacked into an unnamed file when the first tensor is asked for. How much that
    may be is bounded by the base after :meth:`check_base`, else by the size of the packed file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / DATA_NAME
        self._metadata = metadata = _read_json(folder / METADATA_NAME)
        if metadata.get("checkpoint_type") != DELTA:
            rule = f"its checkpoint_type is not {DELTA}"
            raise rule_broken(SYSTEM, rule, file=folder / METADATA_NAME, error=Unsupported)
        file_bytes = _check_manifest(folder, metadata)
        window = _window(metadata, "window", folder / METADATA_NAME)
        before = _window(metadata, "prev_window", folder / METADATA_NAME)
        self._frame = map_file(self._path)
        header_text = self._read_header(FrameReader(SYSTEM, self._path, self._frame))
        self._header = parse_header(header_text, self._path)
        self._data: ByteArray | None = None
        self._unpacking = Lock()
        self._is_fitted = False
        said = _read_json(folder / WEIGHTS_METADATA_NAME)
        self._check_said(said, before, folder / WEIGHTS_METADATA_NAME)
        self._tensors = {
            name: ForeignTensor(
                entry.values[1] - entry.indices[0],
                entry.dtype,
                entry.shape,
                entry.changed_count,
            )
            for name, entry in self._header.entries.items()
        }
        self._facts = Facts(
            format=NAME,
            encoding=self._header.layout,
            version=window,
            base_version=before,
            file_bytes=file_bytes,
            metadata={
                key: str(metadata[key])
                for key in ("model_name", "anchor_window", "weights_hash", "created_at")
                if metadata.get(key) is not None
            },
        )

    @property
    def facts(self) -> Facts:
        """See :class:`ForeignDelta`."""
        return self._facts

    @property
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """See :class:`ForeignDelta`."""
        return self._tensors

    def new_tensor(self, name: str, base: StoredTensor | None) -> StoredTensor:
        """See :class:`ForeignDelta`. No tensor has a checksum of its own."""
        entry = self._header.entries[name]
        old = require_base(SYSTEM, name, base, self._path)
        check_fits(SYSTEM, self._path, name, (entry.dtype, entry.shape), old)
        with self._unpacking:
            if self._data is None:
                self._data = self._unpack()
            data = self._data
        index = array_at(data, entry.indices, entry.index_type)
        columns = array_at(data, entry.columns, entry.column_type)
        new_bits = data[slice(*entry.values)]
        values = words_of(StoredTensor(entry.dtype, (entry.changed_count,), new_bits))
        new = NewWords(SYSTEM, self._path, name, old)
        start = 0
        try:
            for positions in join_positions(index, columns, entry.shape, self._header.layout):
                new.put(positions, values[start : start + positions.size])
                start += positions.size
        except ValueError as error:
            raise self._fault(str(error), name) from None
        return new.finish()

    def check_base(self, base: Checkpoint) -> None:
        """Compare every changed tensor with a base, before anything is unpacked.

        Raises:
            TensorMismatch: The base lacks one, or it has another dtype or shape.
        """
        for entry in self._header.entries.values():
            old = require_base(SYSTEM, entry.name, base.tensors.get(entry.name), self._path)
            check_fits(SYSTEM, self._path, entry.name, (entry.dtype, entry.shape), old)
        self._is_fitted = True

    def check_weights(self, base: Checkpoint) -> bool:
        """Compare the hash of all new weights with what ``metadata.json`` says.

        Every tensor is decoded once more for that, one at a time.

        Returns:
            Whether they are proved to be the publisher's. False: the file has no hash, or one of
            32 digits that does not come out; how grail makes those is not known here.

        Raises:
            ChecksumMismatch: They are not, as with any base but the publisher's.
            FormatError, ApplyError: As :meth:`new_tensor`.
        """
        said = self._metadata.get("weights_hash")
        if not isinstance(said, str) or len(said) not in (32, 64):
            return False
        hasher: Any = hashlib.sha256() if len(said) == 64 else xxhash.xxh3_128()
        self.check_base(base)

        def tensor(name: str) -> StoredTensor:
            old = base.tensors[name]
            return self.new_tensor(name, old) if name in self._tensors else old

        hash_weights(hasher, base.tensors, tensor)
        if hasher.hexdigest() == said:
            return True
        if len(said) == 32:
            return False
        raise ChecksumMismatch(
            f"{self._path}: the new weights are not those of its weights_hash ({SYSTEM} format)",
            hint="Give the checkpoint of window"
            f" {self._facts.base_version}, or fetch the delta again",
            file=str(self._path),
        )

    def close(self) -> None:
        """Let go of what was unpacked."""
        self._data = None

    def _read_header(self, reader: FrameReader) -> bytes:
        prefix = reader.read(LENGTH_BYTES)
        size_bytes = int.from_bytes(prefix, "little")
        limit = description_limit(self._frame.size)
        check_count(SYSTEM, "bytes of header", size_bytes, limit, self._path)
        text = reader.read(size_bytes)
        if len(prefix) < LENGTH_BYTES or len(text) < size_bytes:
            raise self._fault("it ends inside of its header", error=Truncated)
        return text

    def _check_said(self, said: Mapping[str, Any], before: int, file: Path) -> None:
        """Compare what ``delta_metadata.json`` says with what the other files do."""
        layout = self._header.layout
        if said.get("format") != FORMATS[layout]:
            rule = f"its format is {str(said.get('format'))[:40]}, and the data has {layout}"
            raise rule_broken(SYSTEM, rule, file=file)
        changed_count = sum(entry.changed_count for entry in self._header.entries.values())
        shapes = {name: list(entry.shape) for name, entry in self._header.entries.items()}
        wanted = {"prev_window": before, "nonzero_params": changed_count, "shapes": shapes}
        for key, value in wanted.items():
            if key in said and said[key] != value:
                raise rule_broken(SYSTEM, f"its {key} is not that of the data", file=file)

    def _unpack(self) -> ByteArray:
        size_bytes = self._header.data_bytes
        if not self._is_fitted:
            limit = expansion_limit(self._frame.size)
            check_count(SYSTEM, "bytes of changes", size_bytes, limit, self._path)
        reader = FrameReader(SYSTEM, self._path, self._frame)
        self._read_header(reader)
        data = reader.unpack(size_bytes)
        if data.size < size_bytes:
            rule = f"its data has {data.size} bytes where its header names {size_bytes}"
            raise self._fault(rule, error=Truncated)
        return data

    def _fault(self, rule: str, name: str | None = None, **kind: Any) -> FormatError:
        return rule_broken(SYSTEM, rule, file=self._path, tensor=name, **kind)


def is_delta(path: Path) -> bool:
    """Whether a folder looks like a delta of grail's: ``DELTA``, or the window's that holds it."""
    names = (DATA_NAME, WEIGHTS_METADATA_NAME, METADATA_NAME)
    return all((_delta_folder(path) / name).is_file() for name in names)


def open_delta(path: Path) -> GrailDelta:
    """Open one delta, a folder, and check all that can be checked without the base.

    Raises:
        FormatError: A file is malformed, missing, or not what the manifest says.
        StoreError: One cannot be read.
    """
    return GrailDelta(_delta_folder(path))


def list_versions(folder: Path) -> list[ChainVersion]:
    """The windows that are ready, oldest first.

    Where a window has both, it is the delta if the window that it was made from is the one before,
    so that a chain stays one.

    Raises:
        FormatError: A ``metadata.json`` is malformed.
        StoreError: A folder cannot be listed.
    """
    if not folder.is_dir():
        return []
    with os_errors("cannot list", folder):
        found = {_WINDOW.fullmatch(path.name): path for path in sorted(folder.iterdir())}
    windows = {int(match[1]): path for match, path in found.items() if match and path.is_dir()}
    versions: list[ChainVersion] = []
    for window, path in sorted(windows.items()):
        if not _is_ready(path):
            continue
        before = versions[-1].version if versions else None
        delta = path / DELTA if is_delta(path / DELTA) else None
        full = path / FULL if _is_whole(path / FULL) else None
        if delta is not None:
            metadata = _read_json(delta / METADATA_NAME)
            base_version = _window(metadata, "prev_window", delta / METADATA_NAME)
            if full is None or base_version == before:
                name = f"{path.name}/{DELTA}"
                versions.append(ChainVersion(window, base_version, delta, name))
                continue
        if full is not None:
            versions.append(ChainVersion(window, None, full, f"{path.name}/{FULL}"))
    return versions


def _delta_folder(path: Path) -> Path:
    return path / DELTA if (path / DELTA).is_dir() else path


def _is_ready(folder: Path) -> bool:
    with os_errors("cannot list", folder):
        return any(_READY.fullmatch(path.name) for path in folder.iterdir())


def _is_whole(folder: Path) -> bool:
    """Whether all files of a full version are there: it may be uploaded after READY is."""
    if not (folder / METADATA_NAME).is_file():
        return False
    names = _manifest(_read_json(folder / METADATA_NAME), folder / METADATA_NAME)
    return all((folder / name).is_file() for name in names)


def _read_json(path: Path) -> dict[str, Any]:
    data = map_file(path)
    check_count(SYSTEM, "bytes", data.size, MAX_DESCRIPTION_BYTES, path)
    try:
        return parse_object(data.tobytes())
    except ValueError as error:
        raise rule_broken(SYSTEM, f"it is not JSON: {str(error)[:200]}", file=path) from None


def _window(metadata: Mapping[str, Any], key: str, file: Path) -> int:
    value = metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise rule_broken(SYSTEM, f"its {key} is not the number of a window", file=file)
    return value


def _manifest(metadata: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The files of a version and their SHA-256; every name is one plain path segment."""
    manifest = metadata.get("file_manifest")
    if not isinstance(manifest, dict):
        raise rule_broken(SYSTEM, "it has no file_manifest", file=file)
    check_count(SYSTEM, "files", len(manifest), MAX_FILES, file)
    for name, digest in manifest.items():
        if fault := name_fault(name):
            raise rule_broken(SYSTEM, f"the file name {name[:80]!r} {fault}", file=file)
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise rule_broken(SYSTEM, f"the digest of {name[:80]!r} is no SHA-256", file=file)
    return manifest


def _check_manifest(folder: Path, metadata: Mapping[str, Any]) -> int:
    """Compare each file with its digest; returns their bytes, those of the manifest included."""
    manifest = _manifest(metadata, folder / METADATA_NAME)
    for name in (DATA_NAME, WEIGHTS_METADATA_NAME):
        if name not in manifest:
            rule = f"its file_manifest does not name {name}"
            raise rule_broken(SYSTEM, rule, file=folder / METADATA_NAME)
    file_bytes = map_file(folder / METADATA_NAME).size
    for name, digest in manifest.items():
        data = map_file(folder / name, follow_link=False)
        hasher = hashlib.sha256()
        for start in range(0, data.size, _HASH_PIECE_BYTES):
            hasher.update(data[start : start + _HASH_PIECE_BYTES].data)
        if hasher.hexdigest() != digest:
            rule = "it is not the file whose SHA-256 the manifest has"
            raise rule_broken(SYSTEM, rule, file=folder / name, error=ChecksumMismatch)
        file_bytes += data.size
    return file_bytes


__all__ = [
    "NAME",
    "GrailDelta",
    "is_delta",
    "list_versions",
    "open_delta",
    "write_delta",
    "write_full",
]
