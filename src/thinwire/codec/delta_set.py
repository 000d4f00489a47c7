"""Several opened deltas, the shards of one version, as one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

from thinwire.codec.container import Attachment
from thinwire.codec.delta import (
    Bases,
    ChunkChanges,
    Delta,
    OutFor,
    TensorEntry,
    apply_all,
    changes_of_all,
)
from thinwire.errors import Corrupt


class DeltaSet:
    """Opened deltas of disjoint tensors and attachments; it owns them, and closes them.

    Attributes:
        tensors: Those of all deltas by name, in the order of the deltas.
        attachments: Those of all deltas, in the same order.
    """

    def __init__(self, deltas: Sequence[Delta]) -> None:
        """Put them together; an error leaves them open.

        Raises:
            Corrupt: Two of them name the same tensor or the same attachment.
        """
        self._deltas = list(deltas)
        self.tensors: dict[str, TensorEntry] = {}
        self.attachments: list[Attachment] = []
        self._home: dict[str, Delta] = {}  # of each attachment, by name
        sources: dict[str, str] = {}
        for delta in self._deltas:
            for name, entry in delta.tensors.items():
                if name in self.tensors:
                    raise _twice(f"tensor {name!r}", sources[name], delta)
                self.tensors[name] = entry
                sources[name] = delta.source
            for attachment in delta.attachments:
                if attachment.name in self._home:
                    home = self._home[attachment.name].source
                    raise _twice(f"the file {attachment.name!r}", home, delta)
                self._home[attachment.name] = delta
                self.attachments.append(attachment)

    def close(self) -> None:
        """Close every delta."""
        for delta in self._deltas:
            delta.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def identity(self) -> str:
        """A digest of the identities of all deltas, whatever their order."""
        joined = "\n".join(sorted(delta.identity for delta in self._deltas))
        return hashlib.sha256(joined.encode()).hexdigest()[:32]

    @property
    def file_bytes(self) -> int:
        """Bytes of all containers."""
        return sum(delta.file_bytes for delta in self._deltas)

    def attachment_data(self, attachment: Attachment) -> bytes:
        """As :meth:`Delta.attachment_data`."""
        return self._home[attachment.name].attachment_data(attachment)

    def is_carried(self, attachment: Attachment) -> bool:
        """As :meth:`Delta.is_carried`."""
        return self._home[attachment.name].is_carried(attachment)

    def stored_bytes(self, attachment: Attachment) -> int | None:
        """As :meth:`Delta.stored_bytes`."""
        return self._home[attachment.name].stored_bytes(attachment)

    def check_bases(self, bases: Bases) -> None:
        """As :meth:`Delta.check_bases`."""
        for delta in self._deltas:
            delta.check_bases(bases)

    def apply(
        self,
        bases: Bases,
        out_for: OutFor,
        *,
        only: Collection[str] | None = None,
        workers: int = 1,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """As :meth:`Delta.apply`; threads are not kept waiting where one delta ends."""
        apply_all(self._deltas, bases, out_for, only=only, workers=workers, on_bytes=on_bytes)

    def changes(
        self, bases: Bases, *, only: Collection[str] | None = None, workers: int = 1
    ) -> Iterator[ChunkChanges]:
        """As :meth:`Delta.changes`; threads are not kept waiting where one delta ends."""
        yield from changes_of_all(self._deltas, bases, only=only, workers=workers)


OpenDelta = Delta | DeltaSet


def _twice(what: str, source: str, other: Delta) -> Corrupt:
    return Corrupt(
        f"{what} is in both {source} and {other.source}",
        hint="Every shard of a version holds tensors and files of its own; publish it again",
    )
