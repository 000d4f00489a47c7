"""What a follower writes into, and the mark that says which version it exactly holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from thinwire.checkpoint import Checkpoint, MarkedFolder
from thinwire.checkpoint.disk import os_errors
from thinwire.checkpoint.lock import locked
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.threads import default_workers
from thinwire.errors import BaseUnusable, InvalidArgument
from thinwire.stream.records import FORMAT, Link, VersionKind
from thinwire.stream.version import Version


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which version a sink holds, exactly.

    ``tensors``: the patterns of a partial follower; empty: everything. The other fields are those
    of :class:`thinwire.stream.version.Version`.
    """

    format: int = FORMAT
    stream: str
    tensors: list[str] = []
    version: int
    step: int | None
    lineage: str
    kind: VersionKind
    manifest: str
    weights: str
    layout: str
    payload_bytes: int
    raw_bytes: int
    word_count: int
    changed_count: int
    created_ms: int
    metadata: dict[str, Any] = {}
    signer: str = ""

    @property
    def link(self) -> Link:
        """As a later version's manifest names it."""
        return Link(self.version, self.manifest)

    def to_version(self) -> Version:
        """The version as callers are told of it."""
        facts = {name: getattr(self, name) for name in Version.__dataclass_fields__}
        return Version(**facts)

    @classmethod
    def of(cls, version: Version, stream: str, tensors: list[str]) -> Mark:
        """The mark of a sink that holds ``version`` of a stream."""
        facts = {name: getattr(version, name) for name in Version.__dataclass_fields__}
        facts["metadata"] = dict(version.metadata)
        return cls(stream=stream, tensors=tensors, **facts)


class Installing(Protocol):
    """New content of a sink, being written beside the old one."""

    def path_for(self, name: str) -> Path:
        """Where the file called ``name`` is to be written."""


class Sink(Protocol):
    """What a follower writes into. At every moment it is exactly at its mark, or unusable."""

    def own(self) -> AbstractContextManager[None]:
        """Be the only follower of this sink meanwhile, and start with a clean scratch folder."""

    def scratch(self) -> Path:
        """A folder for what was fetched and is not yet applied."""

    def mark(self) -> Mark | None:
        """Which version it holds; None: none. Finishes or discards an interrupted update."""

    def checkpoint(self) -> Checkpoint:
        """What it holds."""

    def apply(self, delta: DeltaSet, mark: Mark) -> None:
        """Turn it into what ``delta`` makes of it, and mark it so."""

    def installing(self, mark: Mark) -> AbstractContextManager[Installing]:
        """Replace everything it holds."""


class CheckpointSink:
    """A Hugging Face folder that is always at exactly one version.

    Any engine can load it while no update runs. An update is crash-safe: a redo log first, the
    bytes second, the mark last; whatever interrupts it, the next follower, or
    :func:`thinwire.recover`, finishes or discards it.

    Args:
        folder: The folder; made when missing. It must be empty, or have been made by thinwire.
        workers: Threads that decode; None: one for each processor, at most 8.
    """

    def __init__(self, folder: str | os.PathLike[str], *, workers: int | None = None) -> None:
        self.folder = Path(folder)
        self._workers = default_workers() if workers is None else workers
        self._marked = MarkedFolder(self.folder)

    def __repr__(self) -> str:
        return f"CheckpointSink({str(self.folder)!r})"

    def __str__(self) -> str:
        return str(self.folder)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Hold the folder's follower lock.

        Raises:
            BaseUnusable: Another follower or publisher holds it.
        """
        with locked(self.folder / ".thinwire-follower"):
            self._clear_scratch()
            yield
            self._clear_scratch()

    def scratch(self) -> Path:
        """A hidden folder inside: on the same file system."""
        path = self.folder / ".thinwire-fetched"
        with os_errors("cannot create", path):
            path.mkdir(exist_ok=True)
        return path

    def mark(self) -> Mark | None:
        """The mark in the folder.

        Raises:
            BaseUnusable: The mark, or an interrupted update, cannot be read.
            InvalidArgument: The folder holds files that thinwire did not put there.
        """
        data = self._marked.read_mark()
        if data is None:
            self._refuse_foreign()
            return None
        try:
            return msgspec.json.decode(data, type=Mark)
        except msgspec.MsgspecError as error:
            raise BaseUnusable(
                f"{self.folder}: its mark is malformed: {error}",
                hint="Remove the folder; the follower makes it again",
                path=str(self.folder),
            ) from None

    def checkpoint(self) -> Checkpoint:
        """The folder, opened; as after every update, it must be opened again."""
        return Checkpoint.open(self.folder, ignore_subfolders=True)

    def apply(
        self, delta: DeltaSet, mark: Mark, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Apply a verified delta in place and switch the mark with it."""
        self._marked.apply(
            delta,
            msgspec.json.encode(mark),
            workers=self._workers,
            on_bytes=on_bytes,
            partial=bool(mark.tensors),
        )

    def applying(self, delta: DeltaSet, mark: Mark) -> AbstractContextManager[None]:
        """As :meth:`apply`; the block runs once everything is verified and before it counts."""
        return self._marked.applying(delta, msgspec.json.encode(mark), workers=self._workers)

    def installing(self, mark: Mark | Callable[[], Mark]) -> AbstractContextManager[Installing]:
        """Write new files beside; leaving the context swaps them in together with the mark.

        The mark may be known only at the end: a callable is asked then.
        """
        if isinstance(mark, Mark):
            return self._marked.installing(msgspec.json.encode(mark))
        return self._marked.installing(lambda: msgspec.json.encode(mark()))

    def _refuse_foreign(self) -> None:
        with os_errors("cannot list", self.folder):
            foreign = [path.name for path in self.folder.iterdir() if path.name[0] != "."]
        if foreign:
            raise InvalidArgument(
                f"{self.folder} holds {foreign[0]!r}, which thinwire did not put there",
                hint="Give an empty folder, or one that thinwire made",
                path=str(self.folder),
            )

    def _clear_scratch(self) -> None:
        shutil.rmtree(self.folder / ".thinwire-fetched", ignore_errors=True)
