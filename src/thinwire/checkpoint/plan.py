"""What applying a delta to a base means, file by file: checked before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.checkpoint.disk import ByteArray, map_file
from thinwire.checkpoint.file_names import (
    SINGLE_FILE,
    file_path,
    first_clash,
    is_weights_name,
    name_fault,
)
from thinwire.checkpoint.folder import Checkpoint
from thinwire.checkpoint.safetensors_file import Header, check_header_bytes, parse_header
from thinwire.codec.container import Attachment
from thinwire.codec.delta_set import OpenDelta
from thinwire.codec.digest import tensor_digest, xxh3_64
from thinwire.errors import BaseMismatch, Corrupt, LimitExceeded, TensorMismatch

# Files that are not weights and travel in the delta, all together: they are held in memory.
MAX_CARRIED_BYTES = 64 << 20


class PlannedWeights(NamedTuple):
    """A weights file of the result."""

    name: str
    header: Header
    from_base: bool  # the base's file of this name has the same header


class PlannedFile(NamedTuple):
    """Another file of the result."""

    name: str
    attachment: Attachment
    from_base: bool  # the delta does not carry it: the base's file of this name has the same bytes


class Plan(NamedTuple):
    """The files of the result, and those of the base that it shall not have."""

    weights: Sequence[PlannedWeights]
    files: Sequence[PlannedFile]
    removed: Sequence[str]

    @property
    def is_folder(self) -> bool:
        """Whether the result is a folder; else it is one weights file."""
        return all(weights.name != SINGLE_FILE for weights in self.weights)


def plan_result(base: Checkpoint, delta: OpenDelta) -> Plan:
    """Check that the delta fits the base and is sound, and list the files of the result.

    Raises:
        Corrupt: The delta's file names, headers and tensors contradict each other.
        BaseMismatch: A file that the delta does not carry differs in the base.
        TensorMismatch: The base's tensors are not those that the delta was made from.
        LimitExceeded: The files or headers that travel are too large.
    """
    by_kind = attachments_by_kind(delta)
    headers = by_kind["header"]
    if not headers:
        raise _unsound("it names no weights file; it was not made from checkpoints")
    check_names(headers, by_kind["file"], by_kind["removed"])
    check_carried_bytes(delta, by_kind["file"])
    _check_base_tensors(base, delta)
    weights = [_plan_weights(base, delta, attachment) for attachment in headers]
    _check_new_tensors(weights, delta)
    files = [
        PlannedFile(attachment.name, attachment, not delta.is_carried(attachment))
        for attachment in by_kind["file"]
    ]
    for file in files:
        if file.from_base:
            base_file_view(base, file.attachment)
    return Plan(weights, files, [attachment.name for attachment in by_kind["removed"]])


def is_result(base: Checkpoint, delta: OpenDelta) -> bool:
    """Whether ``base`` already is what the delta makes; reads until the first difference."""
    by_kind = attachments_by_kind(delta)
    entries = {name: entry for name, entry in delta.tensors.items() if entry.kind != "removed"}
    return (
        base.weights.keys() == {attachment.name for attachment in by_kind["header"]}
        and base.tensors.keys() == entries.keys()
        and base.files.keys().isdisjoint(attachment.name for attachment in by_kind["removed"])
        and all(
            xxh3_64(base.weights[attachment.name].header_bytes) == attachment.digest
            for attachment in by_kind["header"]
        )
        and all(
            attachment.name in base.files
            and xxh3_64(map_file(base.files[attachment.name])) == attachment.digest
            for attachment in by_kind["file"]
        )
        and all(
            tensor_digest(entry.dtype, base.tensors[name].data) == entry.new_digest
            for name, entry in entries.items()
        )
    )


def base_file_view(base: Checkpoint, attachment: Attachment) -> ByteArray:
    """The verified bytes of the base's file that the delta says to keep.

    Raises:
        BaseMismatch: The base lacks it or holds other bytes.
    """
    path = base.files.get(attachment.name)
    if path is None:
        raise _file_mismatch(base, attachment, "is not there")
    view = map_file(path)
    if view.size != attachment.size or xxh3_64(view) != attachment.digest:
        raise _file_mismatch(base, attachment, "holds other bytes")
    return view


def attachments_by_kind(delta: OpenDelta) -> dict[str, list[Attachment]]:
    """The attachments of each kind, in order.

    Raises:
        Corrupt: One is of an unknown kind.
    """
    by_kind: dict[str, list[Attachment]] = {"header": [], "file": [], "removed": []}
    for attachment in delta.attachments:
        if attachment.kind not in by_kind:
            raise _unsound(f"the file {attachment.name!r} is of unknown kind {attachment.kind!r}")
        by_kind[attachment.kind].append(attachment)
    return by_kind


def check_names(
    headers: list[Attachment], files: list[Attachment], removed: list[Attachment]
) -> None:
    """Refuse file names that are hostile, of the wrong kind, or equal but for their case.

    Raises:
        Corrupt: Says which.
    """
    if headers and headers[0].name == SINGLE_FILE:
        if len(headers) + len(files) > 1:
            raise _unsound("it is of a single file and names others too")
        headers = []
    for attachment in [*headers, *files, *removed]:
        if fault := name_fault(attachment.name):
            raise _unsound(f"the file name {attachment.name[:80]!r} {fault}")
        if is_weights_name(attachment.name) != (attachment.kind == "header"):
            raise _unsound(f"the file {attachment.name!r} cannot be of kind {attachment.kind!r}")
    if clash := first_clash(attachment.name for attachment in [*headers, *files]):
        raise _unsound(f"the file names {clash[0]!r} and {clash[1]!r} differ only in case")


def check_carried_bytes(delta: OpenDelta, files: list[Attachment]) -> None:
    """Refuse a delta whose small files would take too much memory.

    Raises:
        LimitExceeded: Those that travel have more than ``MAX_CARRIED_BYTES``.
    """
    carried_bytes = sum(file.size for file in files if delta.is_carried(file))
    if carried_bytes > MAX_CARRIED_BYTES:
        raise LimitExceeded(
            f"the delta carries {carried_bytes} bytes of files; the limit is {MAX_CARRIED_BYTES}",
            hint="Make the delta again without large files that are not safetensors",
            carried_bytes=carried_bytes,
        )


def _check_base_tensors(base: Checkpoint, delta: OpenDelta) -> None:
    for name, entry in delta.tensors.items():
        if entry.kind == "full":
            continue
        tensor = base.tensors.get(name)
        if tensor is None:
            raise _tensor_mismatch(base, name, "is missing")
        if (tensor.dtype, tensor.shape) != (entry.dtype, tuple(entry.shape)):
            raise _tensor_mismatch(
                base,
                name,
                f"is {tensor.dtype} {list(tensor.shape)} where the delta expects"
                f" {entry.dtype} {list(entry.shape)}",
            )
    for name in base.tensors:
        if name not in delta.tensors:
            raise _tensor_mismatch(base, name, "is not known to the delta")


def _plan_weights(base: Checkpoint, delta: OpenDelta, attachment: Attachment) -> PlannedWeights:
    file = base.weights.get(attachment.name)
    if delta.is_carried(attachment):
        check_header_bytes(attachment.size, f"the delta's {attachment.name}")
        header = parse_header(delta.attachment_data(attachment), f"the delta's {attachment.name}")
        same = file is not None and file.header_bytes == header.bytes
        return PlannedWeights(attachment.name, header, same)
    if file is None:
        raise _file_mismatch(base, attachment, "is not there")
    if len(file.header_bytes) != attachment.size or xxh3_64(file.header_bytes) != attachment.digest:
        raise _file_mismatch(base, attachment, "has another safetensors header")
    return PlannedWeights(attachment.name, file.header, True)


def _check_new_tensors(weights: list[PlannedWeights], delta: OpenDelta) -> None:
    placed: set[str] = set()
    for file in weights:
        for name, span in file.header.spans.items():
            entry = delta.tensors.get(name)
            if entry is None or entry.kind == "removed" or name in placed:
                reason = "twice" if name in placed else "without its bytes"
                raise _unsound(f"the header of {file.name} names tensor {name!r} {reason}")
            if (span.dtype, span.shape) != (entry.dtype, tuple(entry.shape)):
                raise _unsound(f"index and header of {file.name} differ on tensor {name!r}")
            placed.add(name)
    for name, entry in delta.tensors.items():
        if entry.kind != "removed" and name not in placed:
            raise _unsound(f"no header names tensor {name!r}")


def _unsound(reason: str) -> Corrupt:
    return Corrupt(f"the delta is unsound: {reason}", hint="Make or fetch the delta again")


def _file_mismatch(base: Checkpoint, attachment: Attachment, reason: str) -> BaseMismatch:
    path = file_path(base.path, attachment.name)
    return BaseMismatch(
        f"{path} {reason}; the delta needs {attachment.size} bytes with digest"
        f" {attachment.digest:016x}",
        hint="Use the checkpoint that the delta was made from",
        file=str(path),
        expected_digest=attachment.digest,
    )


def _tensor_mismatch(base: Checkpoint, name: str, reason: str) -> TensorMismatch:
    return TensorMismatch(
        f"{base.path}: tensor {name!r} {reason}",
        hint="Use the checkpoint that the delta was made from",
        tensor=name,
        path=str(base.path),
    )
