"""A torch module that is kept, in place, at exactly one version of a stream."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from thinwire.checkpoint import Checkpoint, SafetensorsFile
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.threads import default_workers
from thinwire.errors import BaseUnusable, InvalidArgument, ThinwireError
from thinwire.follow.selection import Selection
from thinwire.follow.sink import Installing, Mark
from thinwire.stream.version import Version
from thinwire.torch.sink_base import (
    Base,
    FolderBase,
    ModuleBase,
    Staged,
    check_arguments,
    is_same,
)
from thinwire.torch.sink_live import LiveVersion
from thinwire.torch.sink_lock import UpdateLock
from thinwire.torch.sink_places import Bound, Content, NamedPlaces, Places, Published
from thinwire.torch.sink_prepare import (
    Decoded,
    aliases_in,
    check_same,
    loads_for,
    published_of,
    writes_for,
)
from thinwire.torch.sink_proof import check_dtypes, digest_of, holds
from thinwire.torch.sink_writes import Load, LoaderWrite, UpdateTimes, Writes, fill, read_bits
from thinwire.torch.state import Rename

Tensors = Mapping[str, StoredTensor]


class TorchSink:
    """Keeps a module's tensors, where they lie, at exactly one version of a stream.

    ::

        sink = TorchSink(model)
        with thinwire.Follower("s3://bucket/run", sink) as follower:
            follower.catch_up()
            with sink.reading() as version:
                model(ids)

    An update is decoded and verified while readers go on. Then, alone, it exchanges the changed
    words: no tensor moves, and the pause grows with the changes and not with the model. What fails
    before leaves the module as it was; what fails meanwhile is taken back; where even that fails,
    readers are refused until the module was read anew. A mix of two versions is never read by
    whoever reads inside :meth:`reading`.

    A tensor whose dtype is not the published one gets what ``copy_`` would make of it.

    Tensors on a GPU are changed by ``index_copy_`` there, of positions and words that were uploaded
    on a stream of their own; the device is waited for before and after. This never ran on a GPU:
    the same code is tested on the CPU.

    Args:
        module: The module: its parameters must be those of the stream, or ``rename`` and ``tied``
            say how they correspond. Persistent buffers follow where the stream has them.
        folder: Where the published bits are kept, a :class:`thinwire.CheckpointSink`'s folder: a
            restart goes on from it. None: a temporary one, the size of the model, removed at the
            end.
        canonical: "folder": deltas are decoded against that folder. "none": against the module
            itself; it must have the published dtypes, its mark is kept in memory, and a restart
            begins from an anchor. Each update copies what is on a GPU to the host.
        rename: What a name of the module is called in the stream; None: it stays as it is.
            As of :class:`TorchPublisher`.
        tied: Names of the stream that are not published, each with the one to take instead; those
            that the publisher found are known.
        ignore: Shell patterns of tensors of the stream that the module need not have.
        load: The module's own loader of whole tensors by name, where it does not hold them as they
            are published. It is given those in which something changed, and must be able to be
            given the old ones again. Nothing else is known of the module then.
        places: Instead of names: where the module holds the stream's tensors.
        lock: Shared by sinks that are to be updated and read together.
        update_timeout_s: How long an update waits for readers.
        workers: Threads that decode; None: one for each processor, at most 8.

    Raises:
        InvalidArgument: Arguments that do not go together.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        folder: str | os.PathLike[str] | None = None,
        canonical: Literal["folder", "none"] = "folder",
        rename: Rename | None = None,
        tied: Mapping[str, str] | None = None,
        ignore: Sequence[str] = (),
        load: Load | None = None,
        places: Places | None = None,
        lock: UpdateLock | None = None,
        update_timeout_s: float = 60.0,
        workers: int | None = None,
    ) -> None:
        check_arguments(
            canonical,
            needs_copy=folder is not None or load is not None or bool(ignore),
            ways=[load is not None, places is not None, bool(rename or tied or ignore)],
        )
        self._workers = default_workers() if workers is None else workers
        own = folder
        if own is None:
            own = tempfile.mkdtemp(prefix="thinwire-sink-")
            self._remove = weakref.finalize(self, shutil.rmtree, own, ignore_errors=True)
        self.module = module
        self._load = load
        self._places = places or NamedPlaces(module, rename=rename, tied=tied, ignore=ignore)
        self._bound: Bound | None = None
        # The base must not keep this object alive, or nobody removes its folder.
        read: Any = weakref.WeakMethod(self._bits)
        self._base: Base = (
            FolderBase(own, workers=self._workers)
            if canonical == "folder"
            else ModuleBase(Path(own), lambda name, published: read()(name, published))
        )
        self._is_copied = canonical == "folder"
        self._live = LiveVersion(lock or UpdateLock(), update_timeout_s)
        self._swaps_on_host = True

    def __repr__(self) -> str:
        return f"TorchSink({type(self.module).__name__})"

    @property
    def version(self) -> Version | None:
        """The version that the module holds now; None: none. Look at it inside :meth:`reading`."""
        mark = self._live.mark
        return None if mark is None else mark.to_version()

    @property
    def last_update(self) -> UpdateTimes | None:
        """What the last update took."""
        return self._live.last_update

    @contextmanager
    def reading(self, timeout_s: float | None = None) -> Iterator[Version]:
        """Use the module; yields the version that it holds, all of it, for as long as this lasts.

        Any number of threads may read at once. Once an update waits, new readers wait for it.

        Raises:
            BaseUnusable: The module holds no whole version: none came yet, or writing one failed.
            Deadline: An update took longer than ``timeout_s``.
        """
        with self._live.reading(timeout_s) as version:
            yield version

    @torch.no_grad()
    def prove(self) -> bool | None:
        """Compare the module, read in full, with the digests of the version that it holds.

        Call it where the follower is used: no update may run meanwhile.

        Returns:
            Whether it is right; None: the copy that it was loaded from is, and a module with a
            loader of its own cannot be read back.

        Raises:
            BaseUnusable: It holds no version.
        """
        with self.reading():
            mark = self._live.mark
            assert mark is not None
            tensors = self._base.checkpoint().tensors
            # A part of the model has no digest to be compared with.
            if not mark.tensors and digest_of(tensors) != mark.weights:
                return False
            if self._bound is None:
                return None
            return holds(self._bound, tensors)

    def distrust(self, reason: str) -> None:
        """Let nobody read the module until the follower has caught up, which reads it anew.

        For whoever found out, as by :meth:`prove`, that it is not what it should be.
        """
        with self._live.alone():
            self._live.close(reason)
            if isinstance(self._base, ModuleBase):
                self._base.forget()

    @contextmanager
    def own(self) -> Iterator[None]:
        """See :class:`thinwire.Sink`."""
        with self._base.own():
            yield

    def scratch(self) -> Path:
        """See :class:`thinwire.Sink`."""
        return self._base.scratch()

    @torch.no_grad()
    def mark(self) -> Mark | None:
        """Which version the folder holds, and the module with it: after a restart it is read anew.

        Raises:
            TensorMismatch: The module's tensors are not those of the folder.
            ThinwireError: As :meth:`thinwire.CheckpointSink.mark`.
        """
        found = self._base.mark()
        if found is None or is_same(found, self._live.mark):
            return found
        checkpoint = self._base.checkpoint()
        if not found.tensors and digest_of(checkpoint.tensors) != found.weights:
            # Somebody changed it: what it says it holds is nowhere, so the follower begins anew.
            return None
        start_s = time.perf_counter()
        bound = self._bind(checkpoint.weights, published_of(checkpoint.tensors), found)
        self._fill(bound, checkpoint.tensors, found, start_s)
        return found

    def checkpoint(self) -> Checkpoint:
        """See :class:`thinwire.Sink`."""
        return self._base.checkpoint()

    @torch.no_grad()
    def apply(self, delta: DeltaSet, mark: Mark) -> None:
        """Turn the module into what a verified ``delta`` makes of it.

        Raises:
            ThinwireError: The module and the mark are as they were.
            Deadline: So they are; readers did not end in time.
        """
        start_s = time.perf_counter()
        before = self.mark()
        if before is None:
            raise BaseUnusable("the module holds no version that a delta could be applied to")
        base = self._base.checkpoint()
        decoded = Decoded.of(delta, base, workers=self._workers)
        writes, bound = self._prepare(base, decoded, mark)
        is_written = False
        try:
            with self._base.applying(decoded.replayed(delta), mark):
                self._write(writes, mark, start_s)
                is_written = True
        except BaseException:
            if is_written:
                self._take_back(writes, before)
            raise
        self._bound = bound

    @contextmanager
    def installing(self, mark: Mark) -> Iterator[Installing]:
        """See :class:`thinwire.Sink`; the module is filled once the files are verified.

        Raises:
            TensorMismatch: They are not for this module, which is as it was.
        """
        before = self._live.mark
        is_written = False
        try:
            with self._base.installing(mark) as staged:
                files = Staged(staged)
                yield files
                start_s = time.perf_counter()
                with torch.no_grad():
                    weights = files.weights()
                    tensors = {n: t for file in weights.values() for n, t in file.tensors.items()}
                    bound = self._bind(weights, published_of(tensors), mark)
                    is_written = True
                    self._fill(bound, tensors, mark, start_s)
        except BaseException:
            if is_written:
                self._refill(before)
            raise

    def _bind(
        self, files: Mapping[str, SafetensorsFile], tensors: Mapping[str, Published], mark: Mark
    ) -> Bound | None:
        """Find a place for every tensor; None where the module has a loader of its own.

        Raises:
            TensorMismatch: One has none.
        """
        if not self._is_copied and mark.tensors:
            raise InvalidArgument(
                'canonical="none" holds whole models',
                hint='Leave tensors= out, or canonical="none"',
            )
        if self._load is not None:
            return None
        wants = Selection(mark.tensors).wants
        bound = self._places.bind(Content(tensors, aliases_in(files, tensors), wants))
        if not self._is_copied:
            check_dtypes(bound, tensors)
        return bound

    def _prepare(
        self, base: Checkpoint, decoded: Decoded, mark: Mark
    ) -> tuple[Writes, Bound | None]:
        """Find the places of what a delta changes."""
        if self._load is not None:
            return loads_for(self._load, decoded, base), None
        bound = self._bound
        if bound is None or decoded.is_other:
            bound = self._bind(base.weights, decoded.tensors, mark)
        assert bound is not None
        return writes_for(bound, decoded, swaps_on_host=self._swaps_on_host), bound

    def _write(self, writes: Writes, mark: Mark, start_s: float) -> None:
        """Change the module, alone; after an error it is as it was, or nobody may read it."""
        before = self._live.mark
        with self._live.updating(start_s, writes.word_count):
            try:
                writes.write()
                self._live.mark = mark
            except BaseException:
                self._undo(writes, before, f"writing version {mark.version} failed")
                raise

    def _undo(self, writes: Writes, before: Mark | None, reason: str) -> None:
        """Take changes back, alone; where that fails, nobody may read the module."""
        try:
            writes.undo()
            self._live.mark = before
        except Exception as error:
            # The error that led here is the one that is raised.
            self._live.close(f"{reason}, and so did taking it back: {error}")

    def _take_back(self, writes: Writes, before: Mark) -> None:
        """The module was changed, and the folder's update failed."""
        try:
            if not is_same(before, self._base.mark()):
                # It went through, or will by itself: the module is where the folder goes.
                return
            with self._live.alone():
                self._undo(writes, before, "keeping the update failed")
        except ThinwireError:
            # The module holds a whole version; it is read anew where that is not the folder's.
            return

    def _fill(self, bound: Bound | None, tensors: Tensors, mark: Mark, start_s: float) -> None:
        """Write whole tensors, one after another, alone; after an error nobody may read."""
        if bound is not None:
            check_same(bound, tensors)
        with self._live.updating(start_s, 0):
            try:
                if self._load is not None:
                    LoaderWrite(self._load, {}, tensors).write()
                if bound is not None:
                    fill(bound, tensors)
                self._bound = bound
                self._live.mark = mark
            except BaseException as error:
                self._live.close(f"writing version {mark.version} failed: {error}")
                raise

    def _refill(self, before: Mark | None) -> None:
        """After an installation that failed: the module must hold what the base does, or nothing.

        Where that cannot be done now, it is when the mark is asked for next.
        """
        if self._live.mark is not None and is_same(self._live.mark, before):
            return
        try:
            if isinstance(self._base, ModuleBase):
                self.distrust("installing a version failed")
            else:
                self.mark()
        except ThinwireError:
            return

    def _bits(self, name: str, published: Published) -> np.ndarray:
        """A published tensor's bits, read from the module, which has its dtype."""
        assert self._bound is not None
        return read_bits(self._bound, name, published)
