"""Another system's delta, as every reader of this room shows it.

A reader opens the files, checks all that can be checked without the base, and then gives new
tensors one at a time, verified by whatever checksum the format has. What it takes from the files is
hostile: sizes are compared with the limits here before memory is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.errors import Corrupt, FormatError, LimitExceeded, TensorMismatch

MAX_TENSORS = 1 << 20
"""Tensors that one delta may name."""

MAX_DESCRIPTION_BYTES = 32 << 20
"""The longest index, manifest or header that a reader takes."""

_SHOWN_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a delta says of itself.

    Attributes:
        format: The format's name, as ``--to`` takes it: "slime", "fireworks", ...
        encoding: How the changes are coded, in the format's own words: "xor", "arc_v2", ...
        version: Which version it makes; None: the files do not say.
        base_version: Which version it was made from; None: the files do not say.
        file_bytes: Bytes of all its files.
        metadata: What else its files say, as text.
    """

    format: str
    encoding: str
    version: int | None = None
    base_version: int | None = None
    file_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)


class ForeignTensor(NamedTuple):
    """One tensor of a delta, as its files describe it; None where they do not say.

    Attributes:
        payload_bytes: Bytes of its coded change.
        dtype: As safetensors calls it.
        shape: Of the whole tensor.
        changed_count: Changed elements.
        checksum: Of the new bytes, as text.
    """

    payload_bytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    changed_count: int | None = None
    checksum: str | None = None


class ForeignDelta(ABC):
    """An opened delta of another system. Its files must stay as they are while it is open."""

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """What it says of itself."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """The tensors that it may change; every other one stays as it is in the base."""

    @property
    def files(self) -> Mapping[str, Path]:
        """Small files that come with it, by name: config, tokenizer; those of the base stay."""
        return {}

    def check_base(self, base: Checkpoint) -> None:
        """Compare what the files say of the base with it, before anything is unpacked.

        Raises:
            TensorMismatch: The base lacks a tensor, or it has another dtype or shape.
        """
        for name in self.tensors:
            if name not in base.tensors:
                raise TensorMismatch(
                    f"{base.path} has no tensor {name[:_SHOWN_CHARS]!r}, which the"
                    f" {self.facts.format} delta changes",
                    hint="Give the checkpoint that the delta was made from",
                    tensor=name,
                )

    @abstractmethod
    def new_tensor(self, name: str, base: StoredTensor | None) -> StoredTensor:
        """The new tensor, verified; ``base`` is only read. Nothing else is kept in memory.

        Args:
            name: One of ``tensors``.
            base: The base's tensor of that name; None: the base has none.

        Raises:
            FormatError: The payload breaks a rule of the format: ``ChecksumMismatch`` also where
                the base is not the one that the delta was made from, as most formats have no
                digest of the base.
            TensorMismatch: The base lacks the tensor, or it differs in dtype, shape or size.
        """

    def check_weights(self, base: Checkpoint) -> bool:
        """Compare a hash of all new weights with what the files say, where the format has one.

        Returns:
            Whether they are proved to be the trainer's.

        Raises:
            ChecksumMismatch: They are not, as with any base but the trainer's.
            FormatError, ApplyError: As :meth:`new_tensor`.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ChainVersion(NamedTuple):
    """One version of a chain of another system's deltas.

    Attributes:
        version: Its number, or its place where versions have names only.
        base_version: Which version it was made from; None: full weights.
        path: The delta, or the full weights: a folder or a file.
        name: As the system calls it.
    """

    version: int
    base_version: int | None
    path: Path
    name: str

    @property
    def is_full(self) -> bool:
        """Whether it holds the whole model."""
        return self.base_version is None


class OutFile(NamedTuple):
    """One file of a version that was written: its key at the destination and where it lies now.

    Files are brought to the destination in order; the last one makes the version exist.
    """

    key: str
    path: Path


def rule_broken(
    system: str,
    rule: str,
    *,
    file: object,
    tensor: str | None = None,
    error: type[FormatError] = Corrupt,
    hint: str = "",
) -> FormatError:
    """The error for bytes that break a rule of another system's format.

    Args:
        system: Whose rule it is: "slime's weight_v".
        rule: What is wrong, as a clause.
        file: Where.
        tensor: In which tensor.
        error: The kind.
        hint: What to do next.
    """
    place = f"{file}" if tensor is None else f"{file}: tensor {tensor[:_SHOWN_CHARS]!r}"
    context = {"system": system, "file": str(file)}
    if tensor is not None:
        context["tensor"] = tensor
    hint = hint or f"Fetch it again, or write it again with {system}"
    return error(f"{place}: {rule} ({system} format)", hint=hint, **context)


def require_base(system: str, name: str, base: StoredTensor | None, file: object) -> StoredTensor:
    """The base's tensor, where a delta cannot do without.

    Raises:
        TensorMismatch: There is none.
    """
    if base is None:
        raise TensorMismatch(
            f"{file}: the base has no tensor {name[:_SHOWN_CHARS]!r} ({system} format)",
            hint="Give the checkpoint that the delta was made from",
            tensor=name,
            file=str(file),
        )
    return base


def check_count(system: str, what: str, count: int, limit: int, file: object) -> None:
    """Refuse a count or a size beyond a limit, before memory is taken for it.

    Raises:
        LimitExceeded: ``count`` is more than ``limit``.
    """
    if count > limit:
        raise LimitExceeded(
            f"{file}: {count} {what}; the limit is {limit} ({system} format)",
            hint="Check that this is the file that you meant",
            file=str(file),
            count=count,
            limit=limit,
        )
