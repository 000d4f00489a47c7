"""A weights file becomes the new one where it lies, all or nothing.

The package writes into the file tensor by tensor, each before its checksum is seen. Here all
tensors are decoded and verified first, into an unnamed file; what changes is then written as a
delta of thinwire's, again unnamed, and applied through a redo log: a process killed at any point
leaves the old file, or one that the next call finishes.
"""

from __future__ import annotations

from pathlib import Path

from thinwire.checkpoint import Checkpoint, apply_in_place, recover
from thinwire.checkpoint.file_names import SINGLE_FILE
from thinwire.codec.container import Attachment
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import write_delta
from thinwire.errors import BaseMismatch, ChecksumMismatch, InvalidArgument, NotFound
from thinwire.interop.change import ForeignChange
from thinwire.interop.fireworks.errors import DeltaKeyMismatchError
from thinwire.interop.fireworks.folder import FireworksDelta, open_fireworks
from thinwire.interop.fireworks.layout import checksum_of
from thinwire.interop.unnamed import map_written, unnamed_file
from thinwire.interop.writing import spooled_pairs


def update_weights_file(base_path: Path, diff_path: Path, compression_format: str) -> None:
    """Turn a weights file into what a delta file makes of it.

    An update that was cut short before is finished first. Where the file already is the new one,
    nothing happens.

    Needs disk space beside the file: for the model a second time, for its changes and for the redo
    log. It is given back at the end, also where the process is killed.

    Args:
        base_path: The weights file; no link to a shared one.
        diff_path: The delta file.
        compression_format: How it is coded.

    Raises:
        DeltaKeyMismatchError: They do not hold tensors of the same names.
        FormatError: The delta breaks a rule of the format; ``ChecksumMismatch`` also where the file
            is not the one that it was made from.
        NotFound: There is no such file.
        TensorMismatch, BaseUnusable, StoreError: As :func:`thinwire.checkpoint.apply_in_place`.
    """
    if not base_path.exists():
        raise NotFound(f"there is no {base_path}", hint="Check the path", path=str(base_path))
    if not base_path.is_file():
        raise InvalidArgument(f"{base_path} is not a file", hint="Give one weights file")
    recover(base_path)
    base = Checkpoint.open(base_path)
    with open_fireworks(diff_path, compression_format) as delta:
        check_names(base, delta, base_path, diff_path)
        try:
            _update(base, delta)
        except (BaseMismatch, ChecksumMismatch):
            if not _is_new(base, delta):
                raise


def check_names(base: Checkpoint, delta: FireworksDelta, base_path: Path, diff_path: Path) -> None:
    """Refuse a delta of a file that holds other tensors.

    Raises:
        DeltaKeyMismatchError: As said; one of the names is in the message.
    """
    if unpaired := sorted(base.tensors.keys() ^ delta.tensors.keys()):
        raise DeltaKeyMismatchError(
            f"{base_path} and {diff_path}: tensor {unpaired[0][:200]!r} is in one of them only"
            f" ({len(unpaired)} such tensors)",
            hint="Give the weights file that the delta was made from",
            tensor=unpaired[0],
        )


def _update(base: Checkpoint, delta: FireworksDelta) -> None:
    folder = base.path.parent
    header = base.weights[SINGLE_FILE].header_bytes
    attachment = Attachment(SINGLE_FILE, "header", None, len(header), xxh3_64(header))
    with unnamed_file(folder) as file:
        with spooled_pairs(ForeignChange(base, delta), folder) as pairs:
            write_delta(file, pairs, [attachment], spool_dir=folder)
        packed = map_written(file)
        # The base must not have become another while its tensors were read.
        base.check_unchanged()
        apply_in_place(base.path, packed.data)


def _is_new(base: Checkpoint, delta: FireworksDelta) -> bool:
    return all(
        checksum_of(tensor.data) == delta.tensors[name].checksum
        for name, tensor in base.tensors.items()
    )
