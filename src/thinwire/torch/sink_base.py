"""The bits that a torch sink decodes against: a folder's, or the module's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from thinwire.checkpoint import Checkpoint, SafetensorsFile
from thinwire.checkpoint.apply import write_small_file
from thinwire.checkpoint.disk import remove_quietly
from thinwire.checkpoint.file_names import is_weights_name
from thinwire.checkpoint.plan import plan_result
from thinwire.checkpoint.safetensors_file import Header, Span, StoredTensor
from thinwire.codec.delta_set import DeltaSet
from thinwire.errors import BaseUnusable, InvalidArgument
from thinwire.follow.sink import CheckpointSink, Installing, Mark
from thinwire.torch.sink_places import Published


class Base(Protocol):
    """Where a torch sink's bits and its mark are kept. At every moment exactly at its mark."""

    def own(self) -> AbstractContextManager[None]:
        """As :class:`thinwire.follow.Sink`."""

    def scratch(self) -> Path:
        """As :class:`thinwire.follow.Sink`."""

    def mark(self) -> Mark | None:
        """As :class:`thinwire.follow.Sink`."""

    def checkpoint(self) -> Checkpoint:
        """As :class:`thinwire.follow.Sink`."""

    def applying(self, delta: DeltaSet, mark: Mark) -> AbstractContextManager[None]:
        """Run the block once a delta is verified; at its end it and the mark count."""

    def installing(self, mark: Mark) -> AbstractContextManager[Installing]:
        """As :class:`thinwire.follow.Sink`; at its end the files and the mark count."""


class FolderBase(CheckpointSink):
    """A checkpoint folder that is one step ahead of the module, or at the same version.

    A partial folder's update cannot be held open: it counts before the block runs, so that a module
    that fails then is behind its folder until it is read from it anew.
    """

    @contextmanager
    def applying(self, delta: DeltaSet, mark: Mark) -> Iterator[None]:
        """See :class:`Base`."""
        if mark.tensors:
            self.apply(delta, mark)
            yield
        else:
            with super().applying(delta, mark):
                yield


class ModuleBase:
    """The module's own tensors, with the mark in memory: a restart begins from an anchor.

    What is no tensor, such as headers and config, is kept beside, in a folder of ours.

    Args:
        folder: For small files, and for what is being fetched.
        read: Reads a published tensor's bits from the module.
    """

    def __init__(self, folder: Path, read: Callable[[str, Published], np.ndarray]) -> None:
        self._folder = folder
        self._read = read
        self._mark: Mark | None = None
        self._headers: dict[str, Header] = {}
        self._files: dict[str, Path] = {}
        self._count = 0
        self._is_owned = False

    def __repr__(self) -> str:
        return "the module"

    @contextmanager
    def own(self) -> Iterator[None]:
        """See :class:`Base`."""
        if self._is_owned:
            raise BaseUnusable("another follower has this sink", hint="Close it first")
        self._is_owned = True
        try:
            yield
        finally:
            self._is_owned = False
            shutil.rmtree(self._folder / "fetched", ignore_errors=True)

    def scratch(self) -> Path:
        """See :class:`Base`."""
        path = self._folder / "fetched"
        path.mkdir(exist_ok=True)
        return path

    def mark(self) -> Mark | None:
        """See :class:`Base`."""
        return self._mark

    def forget(self) -> None:
        """The module holds no version any more."""
        self._mark = None

    def checkpoint(self) -> Checkpoint:
        """See :class:`Base`; its tensors are read from the module when they are asked for."""
        tensors: dict[str, StoredTensor] = {}
        weights = {}
        for name, header in self._headers.items():
            own = {
                tensor: StoredTensor(span.dtype, span.shape, self._bits(tensor, span))
                for tensor, span in header.spans.items()
            }
            weights[name] = _LiveFile(name, header, own)
            tensors |= own
        return Checkpoint(self._folder, True, weights, dict(self._files), tensors, {})

    @contextmanager
    def applying(self, delta: DeltaSet, mark: Mark) -> Iterator[None]:
        """See :class:`Base`."""
        base = self.checkpoint()
        plan = plan_result(base, delta)
        folder = self._next_folder()
        try:
            files = {file.name: folder / file.name for file in plan.files}
            for file in plan.files:
                write_small_file(base, delta, file, files[file.name])
            yield
        except BaseException:
            remove_quietly(folder)
            raise
        self._commit({file.name: file.header for file in plan.weights}, files, mark)

    @contextmanager
    def installing(self, mark: Mark) -> Iterator[Installing]:
        """See :class:`Base`."""
        staged = _Folder(self._next_folder())
        try:
            yield staged
            headers = {
                name: SafetensorsFile.open(path).header
                for name, path in staged.paths.items()
                if is_weights_name(name)
            }
            for name in headers:
                staged.paths.pop(name).unlink()
        except BaseException:
            remove_quietly(staged.folder)
            raise
        self._commit(headers, staged.paths, mark)

    def _bits(self, name: str, span: Span) -> np.ndarray:
        return self._read(name, Published(span.dtype, span.shape))

    def _next_folder(self) -> Path:
        self._count += 1
        folder = self._folder / f"files-{self._count}"
        folder.mkdir()
        return folder

    def _commit(self, headers: Mapping[str, Header], files: Mapping[str, Path], mark: Mark) -> None:
        self._headers, self._files, self._mark = dict(headers), dict(files), mark
        for old in self._folder.glob("files-*"):
            if old.name != f"files-{self._count}":
                remove_quietly(old)


class Staged:
    """Remembers where the files of a new version were written."""

    def __init__(self, staged: Installing) -> None:
        self._staged = staged
        self._paths: dict[str, Path] = {}

    def path_for(self, name: str) -> Path:
        """See :class:`thinwire.follow.sink.Installing`."""
        self._paths[name] = self._staged.path_for(name)
        return self._paths[name]

    def weights(self) -> dict[str, SafetensorsFile]:
        """Its weights files, opened."""
        return {
            name: SafetensorsFile.open(path)
            for name, path in self._paths.items()
            if is_weights_name(name)
        }


class _Folder:
    """Files of a new version, in a folder of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[str, Path] = {}

    def path_for(self, name: str) -> Path:
        """See :class:`thinwire.follow.sink.Installing`."""
        if "/" in name or name in ("", ".", ".."):
            raise InvalidArgument(f"{name!r} is no file name")
        return self.paths.setdefault(name, self.folder / name)


class _LiveFile(SafetensorsFile):
    """A weights file that has a header only: its tensors are the module's."""

    def __init__(self, name: str, header: Header, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = Path(name)
        self.header = header
        self.tensors = tensors


def check_arguments(canonical: str, *, needs_copy: bool, ways: Sequence[bool]) -> None:
    """Refuse arguments of a sink that do not go together.

    Raises:
        InvalidArgument: Says which.
    """
    if canonical not in ("folder", "none"):
        raise InvalidArgument(f"canonical is {canonical!r}", hint='Give "folder" or "none"')
    if canonical == "none" and needs_copy:
        raise InvalidArgument(
            'canonical="none" decodes against the module: folder, load and ignore need a copy',
            hint='Leave them out, or canonical="none"',
        )
    if sum(ways) > 1:
        raise InvalidArgument(
            "load, places and names (rename, tied, ignore) are three ways to place tensors",
            hint="Give one",
        )


def is_same(one: Mark, other: Mark | None) -> bool:
    """Whether two marks name the same content of the same version."""
    return other is not None and all(
        getattr(one, field) == getattr(other, field)
        for field in ("stream", "lineage", "manifest", "version", "tensors")
    )
