"""What applying a delta means for a folder that holds some tensors of the model only.

Such a folder was installed by a follower that wants a part: its weights files are of its own
making, so their headers are never the delta's and always stay. A change of layout (a tensor comes,
goes, or takes another dtype or shape) has no place in them: the folder must be installed again.
"""

from __future__ import annotations

from thinwire.checkpoint.disk import map_file
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.checkpoint.folder import Checkpoint
from thinwire.checkpoint.plan import (
    Plan,
    PlannedFile,
    PlannedWeights,
    attachments_by_kind,
    base_file_view,
    check_carried_bytes,
    check_names,
)
from thinwire.codec.container import Attachment
from thinwire.codec.delta_set import OpenDelta
from thinwire.codec.digest import tensor_digest, xxh3_64
from thinwire.errors import TensorMismatch


def plan_partial(base: Checkpoint, delta: OpenDelta) -> Plan:
    """Check that a delta, opened with ``only``, fits a partial folder, and list what it makes.

    Files that the delta carries come, except the index of all weights files. Those that it does not
    carry must be the base's where the folder has them; it need not have them.

    Raises:
        TensorMismatch: The folder's tensors are not exactly the delta's, or their layout changed.
        BaseMismatch: A file that the delta does not carry differs in the base.
        Corrupt, LimitExceeded: As :func:`plan_result`.
    """
    files, removed = _small_files(delta)
    _check_tensors(base, delta)
    planned = [PlannedFile(file.name, file, not delta.is_carried(file)) for file in files]
    for file in planned:
        if file.from_base and file.name in base.files:
            base_file_view(base, file.attachment)
    weights = [PlannedWeights(name, file.header, True) for name, file in base.weights.items()]
    return Plan(weights, planned, [file.name for file in removed])


def is_partial_result(base: Checkpoint, delta: OpenDelta) -> bool:
    """Whether a partial folder already is what the delta makes; reads until a difference."""
    files, removed = _small_files(delta)
    return (
        base.tensors.keys() == delta.tensors.keys()
        and base.files.keys().isdisjoint(file.name for file in removed)
        and all(_has_file(base, file, delta.is_carried(file)) for file in files)
        and all(
            tensor_digest(entry.dtype, base.tensors[name].data) == entry.new_digest
            for name, entry in delta.tensors.items()
        )
    )


def _small_files(delta: OpenDelta) -> tuple[list[Attachment], list[Attachment]]:
    """The files that a partial folder shall have and those that it shall not, names checked."""
    by_kind = attachments_by_kind(delta)
    check_names([], by_kind["file"], by_kind["removed"])
    check_carried_bytes(delta, by_kind["file"])
    # The index places all tensors of the model; the folder may have one of its own.
    files = [file for file in by_kind["file"] if file.name != INDEX_NAME]
    removed = [file for file in by_kind["removed"] if file.name != INDEX_NAME]
    return files, removed


def _has_file(base: Checkpoint, file: Attachment, is_carried: bool) -> bool:
    path = base.files.get(file.name)
    if path is None:
        return not is_carried
    return xxh3_64(map_file(path)) == file.digest


def _check_tensors(base: Checkpoint, delta: OpenDelta) -> None:
    for name, entry in delta.tensors.items():
        tensor = base.tensors.get(name)
        if entry.kind in ("full", "removed"):
            change = "goes" if entry.kind == "removed" else "comes, or changes its dtype or shape"
            raise _mismatch(base, name, f"{change}: the layout of the model changed")
        if tensor is None:
            raise _mismatch(base, name, "is missing in this partial folder")
        if (tensor.dtype, tensor.shape) != (entry.dtype, tuple(entry.shape)):
            raise _mismatch(
                base,
                name,
                f"is {tensor.dtype} {list(tensor.shape)} where the delta expects {entry.dtype}"
                f" {list(entry.shape)}: the layout of the model changed",
            )
    for name in base.tensors:
        if name not in delta.tensors:
            # It would stay as it is, and the folder would be no version at all.
            raise _mismatch(base, name, "is not among those that are read from the delta")


def _mismatch(base: Checkpoint, name: str, reason: str) -> TensorMismatch:
    return TensorMismatch(
        f"{base.path}: tensor {name!r} {reason}",
        hint="Install the folder again",
        tensor=name,
        path=str(base.path),
    )
