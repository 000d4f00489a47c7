"""Fireworks' delta files and snapshot folders.

A snapshot is a folder as Hugging Face has it, called by its identity. In an incremental one each
weights file holds a list of bytes per tensor of the file that it is the difference from, and in its
metadata, under the tensor's name, the Adler-32 of the new bytes. No file says which snapshot it was
made from, nor how it is coded: the request that announces it does. So here the coding is told from
the payloads, and the order of a chain from the numbers in its identities.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import ByteArray, os_errors, write_file
from thinwire.checkpoint.file_names import INDEX_NAME, SINGLE_FILE, is_weights_name
from thinwire.checkpoint.folder import list_files
from thinwire.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from thinwire.errors import (
    ChecksumMismatch,
    InvalidArgument,
    NotFound,
    TensorMismatch,
    ThinwireError,
    Unsupported,
)
from thinwire.interop.change import Change
from thinwire.interop.fireworks.coding import (
    Encoded,
    decode,
    encode,
    format_named,
    sniff_format,
)
from thinwire.interop.fireworks.identities import order_of, stem_of, version_of
from thinwire.interop.foreign import (
    ChainVersion,
    Facts,
    ForeignDelta,
    ForeignTensor,
    OutFile,
    require_base,
    rule_broken,
)
from thinwire.interop.hf import checkpoint_files
from thinwire.interop.payload_files import MAX_FILES, new_stored, open_payloads
from thinwire.interop.snapshot_identity import check_identity
from thinwire.interop.weights_out import new_weights
from thinwire.interop.writing import code_tensors

NAME = "fireworks"
SYSTEM = "Fireworks"
DEFAULT_FORMAT = "arc_v2"
# Bytes of memory for each byte of a tensor of which every word changed, as measured.
_MEMORY_TIMES = {"arc_v1": 5, "arc_v2": 8, "arc_v3": 25, "thinwire": 8}
_SINGLE_NAME = "model.safetensors"
_CHECKSUM = re.compile(r"\d{1,10}", re.ASCII)


class FireworksDelta(ForeignDelta):
    """An opened delta file or snapshot; see :class:`thinwire.interop.foreign.ForeignDelta`.

    Attributes:
        compression_format: How its payloads are coded.
    """

    def __init__(
        self,
        path: Path,
        weights: Mapping[str, SafetensorsFile],
        files: Mapping[str, Path],
        compression_format: str | None,
    ) -> None:
        self._homes = _homes(weights)
        self._files = files
        self._tensors = {name: _describe(name, file) for name, file in self._homes.items()}
        if compression_format is None:
            self.compression_format = _sniffed(path, self._homes)
        else:
            self.compression_format = format_named(compression_format)
        self._facts = Facts(
            format=NAME,
            encoding=self.compression_format,
            version=version_of(path.name) if path.is_dir() else None,
            file_bytes=sum(file.header.file_bytes for file in weights.values()),
            metadata={"identity": path.name} if path.is_dir() else {},
        )

    @property
    def facts(self) -> Facts:
        """What it says of itself; a snapshot's version is the last number in its identity."""
        return self._facts

    @property
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """The tensors that it may change: all of the weights files that it has."""
        return self._tensors

    @property
    def files(self) -> Mapping[str, Path]:
        """The snapshot's config, tokenizer and the like."""
        return self._files

    def new_tensor(self, name: str, base: StoredTensor | None) -> StoredTensor:
        """The new tensor, verified; see :class:`thinwire.interop.foreign.ForeignDelta`."""
        old = require_base(SYSTEM, name, base, self._homes[name].path)
        return new_stored(old, self.decode(name, old))

    def decode(self, name: str, base: StoredTensor) -> ByteArray:
        """The new bits of a tensor, verified, in memory of the caller's; ``base`` is only read.

        Raises:
            FormatError, TensorMismatch: As :meth:`new_tensor`.
        """
        payload, checksum, where = self.payload(name)
        return decode(self.compression_format, base.data, *base[:2], payload, checksum, where=where)

    def payload(self, name: str) -> tuple[ByteArray, str, str]:
        """A tensor's payload, the checksum of its new bits, and where it lies, for messages."""
        file = self._homes[name]
        where = f"{file.path}: tensor {name[:200]!r}"
        return file.tensors[name].data, file.metadata[name], where

    def close(self) -> None:
        """Let go of the files."""
        self._homes = {}


def open_fireworks(path: Path | str, compression_format: str | None = None) -> FireworksDelta:
    """Open one delta file, or the folder of an incremental snapshot.

    Args:
        path: The file or folder.
        compression_format: How its payloads are coded; None: as they look.

    Raises:
        BackendNotFoundError: There is no such format.
        InvalidArgument: The folder holds no weights file, or what no checkpoint may.
        FormatError: It breaks a rule of the format; the message names the file and the tensor.
        StoreError: It cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return FireworksDelta(path, {path.name: _open(path)}, {}, compression_format)
    names = list_files(path, ignore_subfolders=True)
    weights = [name for name in names if is_weights_name(name)]
    if not weights or len(weights) > MAX_FILES:
        raise InvalidArgument(
            f"{path} holds {len(weights)} weights files, not 1 to {MAX_FILES}",
            hint="Give the folder of one snapshot, or one delta file",
            path=str(path),
        )
    # The index says which file holds which tensor, and that stays as it is in the base.
    files = {n: path / n for n in names if not is_weights_name(n) and n != INDEX_NAME}
    return FireworksDelta(path, {n: _open(path / n) for n in weights}, files, compression_format)


open_delta = open_fireworks


def is_delta(path: Path) -> bool:
    """Whether a file, or the first weights file of a folder, looks like a delta of Fireworks'."""
    try:
        if path.is_dir():
            names = list_files(path, ignore_subfolders=True)
            path = path / next(name for name in names if is_weights_name(name))
        if not path.name.endswith(".safetensors"):
            return False
        file = _open(path)
        for name, tensor in file.tensors.items():
            _describe(name, file)
            if sniff_format(tensor.data) is None:
                return False
    except (ThinwireError, OSError, StopIteration):
        return False
    return bool(file.tensors)


def list_versions(folder: Path) -> list[ChainVersion]:
    """The snapshots in a folder of snapshots, oldest first; [] where none of them is incremental.

    Their order is that of the one number that differs between their identities, or of their names
    where they have no numbers; each incremental one is taken to be made from the one before it.
    Of several that are called alike but for ``-full-1`` and so on, the last full one counts: it was
    sent because the others failed.

    Raises:
        InvalidArgument: The names do not say the order: two have the same number, or more than one
            number differs.
        StoreError: The folder cannot be listed.
    """
    if not folder.is_dir():
        return []
    with os_errors("cannot list", folder):
        paths = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    snapshots = [(path, is_delta(path)) for path in paths if _has_weights(path)]
    if not any(is_incremental for _, is_incremental in snapshots):
        return []
    by_stem: dict[str, tuple[Path, bool]] = {}
    for path, is_incremental in sorted(snapshots, key=lambda row: stem_of(row[0].name)):
        stem, _ = stem_of(path.name)
        if stem in by_stem and is_incremental:
            raise InvalidArgument(
                f"{folder}: {path.name[:80]!r} is incremental, but its name says that it was sent"
                f" in full in place of {stem[:80]!r}",
                hint="Rename it, or take it out of the folder",
                path=str(path),
            )
        by_stem[stem] = path, is_incremental
    by_version = dict(zip(order_of(list(by_stem), folder), by_stem.values(), strict=True))
    versions: list[ChainVersion] = []
    for version in sorted(by_version):
        path, is_incremental = by_version[version]
        before = versions[-1].version if versions else version - 1
        base = before if is_incremental else None
        versions.append(ChainVersion(version, base, path, path.name))
    return versions


def write_delta(
    change: Change,
    out: Path,
    *,
    version: int,
    base_version: int,
    compression_format: str = DEFAULT_FORMAT,
    identity: str | None = None,
    workers: int = 1,
) -> list[OutFile]:
    """Write an incremental snapshot: every tensor of the model, changed or not, and all files.

    Args:
        change: What becomes of the base.
        out: An empty folder.
        version: Which version it makes.
        base_version: Which version it was made from; Fireworks' files do not say.
        compression_format: "arc_v1", "arc_v2", "arc_v3", or "thinwire".
        identity: The snapshot's name; None: after ``version``.
        workers: Threads that code; the bytes are the same for any number.

    Raises:
        BackendNotFoundError: There is no such format.
        InvalidArgument: The identity is no plain name.
        TensorMismatch: A tensor came or went, moved to another file, or changed dtype or shape.
        StoreError: The disk is full.
    """
    name = format_named(compression_format)
    identity = _identity(version, identity)
    _check_layout(change)
    files = []
    for file_name in sorted(change.file_names):
        path = out / file_name
        write_file(path, change.read_file(file_name))
        files.append(OutFile(f"{identity}/{file_name}", path))
    # The index, which makes a folder of several weights files whole, goes last.
    files.sort(key=lambda file: file.key.endswith(f"/{INDEX_NAME}"))
    index = files[-1:] if files and files[-1].path.name == INDEX_NAME else []

    def code(tensor: str) -> Encoded:
        old, new = change.base.tensors[tensor], change.new_tensor(tensor)
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise _other_layout(f"tensor {tensor[:200]!r} changed dtype or shape")
        return encode(name, old.data, new.data, *new[:2])

    weights = []
    for file_name, tensors in change.layout.items():
        path = out / (_SINGLE_NAME if file_name == SINGLE_FILE else file_name)
        with new_weights(path) as writer:
            coded = code_tensors(change, tensors, code, workers, memory_times=_MEMORY_TIMES[name])
            for tensor, encoded in zip(tensors, coded, strict=True):
                writer.add_payload(tensor, *encoded)
        weights.append(OutFile(f"{identity}/{path.name}", path))
    return [*files[: len(files) - len(index)], *weights, *index]


def write_full(
    checkpoint: Checkpoint, out: Path, *, version: int, identity: str | None = None
) -> list[OutFile]:
    """A full snapshot: the checkpoint's files, named where they lie.

    Args:
        checkpoint: The version.
        out: An empty folder.
        version: Its number.
        identity: The snapshot's name; None: after ``version``.

    Raises:
        InvalidArgument: The identity is no plain name.
    """
    return checkpoint_files(checkpoint, _identity(version, identity))


def _identity(version: int, identity: str | None) -> str:
    name = f"step-{version:08d}" if identity is None else identity
    check_identity(name)
    return name


def _check_layout(change: Change) -> None:
    """Refuse what an incremental snapshot has no way to say: each file must keep its tensors."""
    for file_name in change.layout.keys() | change.base.weights.keys():
        held = change.base.weights.get(file_name)
        if held is None or held.tensors.keys() != set(change.layout.get(file_name, ())):
            raise _other_layout(
                f"the tensors of {file_name[:200]!r} are others, or it came or went"
            )


def _other_layout(what: str) -> TensorMismatch:
    return TensorMismatch(
        f"{what}: {SYSTEM} has no incremental snapshot for that",
        hint="Write a full snapshot for this version",
    )


def _open(path: Path) -> SafetensorsFile:
    if not path.exists():
        raise NotFound(f"{path} is not there", hint="Check the path", path=str(path))
    return open_payloads(SYSTEM, path)


def _has_weights(folder: Path) -> bool:
    with os_errors("cannot list", folder):
        return any(is_weights_name(path.name) for path in folder.iterdir())


def _homes(weights: Mapping[str, SafetensorsFile]) -> dict[str, SafetensorsFile]:
    homes: dict[str, SafetensorsFile] = {}
    for file in weights.values():
        for name in file.tensors:
            if name in homes:
                rule = f"it is also in {homes[name].path.name}"
                raise rule_broken(SYSTEM, rule, file=file.path, tensor=name)
            homes[name] = file
    return homes


def _describe(name: str, file: SafetensorsFile) -> ForeignTensor:
    text = file.metadata.get(name)
    if text is None or not _CHECKSUM.fullmatch(text):
        rule = "the file's metadata has no Adler-32 for it, or not in decimal digits"
        raise rule_broken(SYSTEM, rule, file=file.path, tensor=name, error=ChecksumMismatch)
    return ForeignTensor(payload_bytes=file.tensors[name].data.size, checksum=text)


def _sniffed(path: Path, homes: Mapping[str, SafetensorsFile]) -> str:
    """The one format that all payloads look like."""
    found: str | None = None
    for name, file in homes.items():
        one = sniff_format(file.tensors[name].data)
        if one is None or found not in (None, one):
            rule = f"its payload looks like {one or 'no known format'}, others like {found}"
            raise rule_broken(SYSTEM, rule, file=file.path, tensor=name, error=Unsupported)
        found = one
    # No tensor: nothing is coded in any way.
    return found or DEFAULT_FORMAT
