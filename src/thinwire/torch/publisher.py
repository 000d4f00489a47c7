"""Publishing from a torch trainer without stalling its step."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from thinwire.checkpoint.disk import os_errors
from thinwire.checkpoint.lock import locked
from thinwire.codec.chunk import Spec
from thinwire.errors import Deadline, InvalidArgument, ThinwireError
from thinwire.follow import Stream, open_stream
from thinwire.publish.making import Facts
from thinwire.publish.meeting import on_all
from thinwire.publish.publisher import facts_of
from thinwire.publish.rank_publisher import Captured, RankPublisher
from thinwire.publish.ranks import Fault
from thinwire.publish.settings import Settings
from thinwire.stream.blocks import digest_of
from thinwire.stream.events import Observer
from thinwire.stream.version import Version
from thinwire.torch import at_exit
from thinwire.torch.agreement import Agreement, WhenBusy
from thinwire.torch.baseline_memory import BaselineMemory, allocator
from thinwire.torch.device_diff import DeviceDiffMode
from thinwire.torch.files import Files, check_weights_name, small_files
from thinwire.torch.publish_thread import PublishThread
from thinwire.torch.rank_capture import RankCapture
from thinwire.torch.ranks import ranks_of
from thinwire.torch.state import (
    ModelState,
    Rename,
    Selection,
    Source,
    StateFn,
    check_dtypes,
    holdings_of,
)
from thinwire.torch.ticket import Ticket

_LOG = logging.getLogger("thinwire")
# How long a thread may take to end once it was told to.
_GIVE_UP_S = 5.0
# How long a version is waited for where training failed.
_FAILING_S = 10.0


class TorchPublisher:
    """Publishes a model's weights step after step, behind the training that goes on.

    :meth:`publish` compares the bits of the weights with the last *committed* version and keeps
    only what differs; a background thread encodes, uploads and commits it. So any optimizer, any
    number of steps between two publishes, and skipped or failed publishes are right by
    construction: the next delta always spans everything since the last version that exists.

    In a ``torch.distributed`` job every rank makes a publisher and calls :meth:`publish`; each
    compares, encodes and uploads what it holds (FSDP2, tensor parallel and both, replicas once),
    and rank 0 commits. Followers see ordinary tensors. A trainer that is restarted, also with
    another number of ranks, goes on from the head of the stream.

    Args:
        model: The module, or a function that returns tensors by name (ordinary ones or DTensors).
        stream: The stream, or its URL. It is made, if there is none.
        folder: Scratch of this rank; after a restart, the first rank of each host also keeps a
            copy of the head there, which makes the next restart quick. None: a temporary one.
        dtype: What floating-point tensors are published as, rounded to nearest even. "auto": FP32
            and FP64 as BF16, others as they are; None: all as they are. Buffers, whole numbers
            and one-byte floats stay as they are in any case.
        dtypes: Other dtypes by patterns of published names; the first that fits counts. None as
            a dtype: as it is.
        include: Patterns of published names to publish; none: all.
        exclude: Patterns of published names to leave out. In a stream that has them they stay as
            they are.
        buffers: Publish persistent buffers, too.
        rename: Maps a tensor's name to its published one, or to None to leave it out.
        tied: Names that are left out since they share the weights of another published name.
            Shared memory is found without. Both are compared at every publish.
        files: Small files of the first version, beside config.json and generation_config.json of
            a Hugging Face model: a folder, or contents by name.
        reference: Begin the stream without uploading it: both sides have this model,
            ``hf://ORG/NAME@REVISION`` or a folder. Only the first version ever is made so.
        base: Where the copy of a stream is here that begins by reference.
        weights_name: The name of the weights file of the first version, where it is one.
        new_lineage: Begin a new lineage with the next version: for a restart from older weights.
        baseline: Where the last committed version is kept: "memory", pinned where there is a
            GPU, or "disk", a memory-mapped file in ``folder``.
        when_busy: What to do while another version is on its way: "latest" skips, and the next
            one that is not skipped has it all; "block" waits.
        deadline_s: How long to wait for another rank, and with "block" for the version before.
        memory_limit_bytes: What captured changes may take in memory; more of them go to a file.
        device_diff: Whether changes are looked for on the GPU on which the weights lie, at the cost
            of as much of its memory as is published: "auto" where that memory is free and it was
            faster when both ways were tried, "on" also where it was not, "off".
        workers: Threads for encoding.
        spec: What to ask of the encoder.
        maintain: Let a thread of rank 0 make anchors and merged deltas, unless a
            ``thinwire maintain`` runs.
        work_dir: Where that thread keeps its copies of the model; None: inside ``folder``.
        observer: Told of every event, on rank 0; on any rank of a GPU that is not asked for changes
            any more.
        group: The process group; None: all ranks of the job, or this process where there is none;
            False: this process alone, whatever the job is.

    Raises:
        UnsafeStore: The store does not honour put-if-absent.
        TensorMismatch: The model is not the stream's: names, dtypes, shapes or replicas.
        LineageChanged: A new lineage was begun and has no version yet.
        Unavailable: ``folder`` belongs to a stream that is not there: its store is away.
        Deadline: Another rank did not come.
        ThinwireError: On every rank, whichever it was that failed.
    """

    def __init__(
        self,
        model: nn.Module | StateFn,
        stream: Stream | str | os.PathLike[str],
        *,
        folder: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | Literal["auto"] | None = "auto",
        dtypes: Mapping[str, torch.dtype | None] | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        buffers: bool = False,
        rename: Rename | None = None,
        tied: Mapping[str, str] | None = None,
        files: Files | None = None,
        reference: str | None = None,
        base: str | os.PathLike[str] | None = None,
        weights_name: str = "model.safetensors",
        new_lineage: bool = False,
        baseline: BaselineMemory = "memory",
        when_busy: WhenBusy = "latest",
        deadline_s: float = 600.0,
        memory_limit_bytes: int = 128 << 20,
        device_diff: DeviceDiffMode = "auto",
        workers: int = 1,
        spec: Spec | None = None,
        maintain: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
        observer: Observer | None = None,
        group: Any = None,
    ) -> None:
        _check_choices(baseline, when_busy, device_diff)
        check_weights_name(weights_name)
        selection = Selection(
            dtype, dict(dtypes or {}), include, exclude, buffers, rename, dict(tied or {})
        )
        check_dtypes(selection)
        self._state = ModelState(model, selection)
        self._when_busy = when_busy
        self._deadline_s = deadline_s
        self._count = 0
        self._is_skipped = False
        self._is_closed = False
        with ExitStack() as stack:
            if folder is None:
                folder = tempfile.mkdtemp(prefix="thinwire-")
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._ranks = ranks_of(group, deadline_s)
            stack.callback(self._ranks.close)
            self._agreement = Agreement(self._ranks, deadline_s)

            def prepare() -> tuple[list[Source], Stream, dict[str, bytes]]:
                opened = stream if isinstance(stream, Stream) else open_stream(stream)
                published = "" if dtype is None else str(dtype).removeprefix("torch.")
                return self._state.sources(), opened, small_files(model, files, published)

            sources, opened, small = on_all(self._ranks, prepare)
            # Of each stream its own: an adapter's may use the folder of the model's.
            self._rank_folder = (
                Path(folder) / digest_of(opened.url.encode())[:16] / f"rank{self._ranks.rank}"
            )
            stack.enter_context(on_all(self._ranks, lambda: _own(self._rank_folder)))
            settings = Settings(
                new_lineage=new_lineage,
                reference=reference or "",
                base=base,
                files=small,
                weights_name=weights_name,
                metadata=self._state.tied,
                may_lack=lambda name: not selection.wants(name),
                spec=spec or Spec(),
                workers=workers,
                maintain=maintain,
                work_dir=None if work_dir is None else Path(work_dir),
            )
            self._publisher = RankPublisher(
                opened,
                self._ranks,
                self._rank_folder,
                holdings_of(sources),
                settings,
                allocate=allocator(baseline, self._rank_folder),
                observer=observer,
            )
            stack.callback(self._publisher.close)
            self._capture = RankCapture(
                self._publisher,
                sources,
                self._rank_folder,
                memory_limit_bytes=memory_limit_bytes,
                device_diff=device_diff,
                observer=observer,
            )
            stack.callback(self._capture.close)
            self._thread = PublishThread(self._publisher, deadline_s)
            self._closing = stack.pop_all()
        at_exit.close_at_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # Training failed here, and other ranks wait to hear of it.
        with suppress(ThinwireError):
            self.close(min(_FAILING_S, self._deadline_s))

    @property
    def head(self) -> Version | None:
        """The newest version that this publisher knows of; None: nothing was published yet."""
        head = self._publisher.head
        return None if head is None else Version.of(head)

    @property
    def baseline_bytes(self) -> int:
        """Bytes of this rank's share of the last committed version."""
        return self._publisher.baseline.byte_count

    @property
    def device_choices(self) -> Mapping[str, str]:
        """By GPU of this rank: whether changes are found there ("device: ...") or not, and why."""
        return self._capture.device_choices

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that are not published since they share the weights of another one."""
        return dict(self._state.tied)

    def publish(
        self,
        step: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
        when_busy: WhenBusy | None = None,
    ) -> Ticket:
        """Capture the weights as they are now; they become the next version in the background.

        Call it between two optimizer steps, on every rank. Once it returns, training may go on.

        Args:
            step: The trainer's step: the same on every rank, which is how a rank that missed a
                call is found out.
            metadata: JSON that travels along, such as rewards; that of rank 0 counts.
            tensors: The tensors, instead of those of the model: the same ones by name, in any
                order. They are drawn one by one, and each may be gone once the next is drawn. Of a
                publish that is skipped none is drawn.
            when_busy: For this once: "block" for the last step, so that it is not skipped. That
                of rank 0 counts.

        Raises:
            TensorMismatch: The model changed by names, dtypes, shapes or sharding, or tied weights
                differ.
            Deadline: Another rank did not come; or with "block" the version before is not done.
            InvalidArgument: The publisher was closed.
        """
        if self._is_closed:
            raise InvalidArgument("this publisher was closed", hint="Open another one")
        busy = when_busy or self._when_busy
        if busy not in ("latest", "block"):
            raise InvalidArgument(f"when_busy is {busy!r}", hint='It is "latest" or "block"')
        # Counted on every rank, whatever goes wrong: ranks must not mix up two calls.
        self._count += 1
        ticket = Ticket(step)
        topic = f"{self._count}"
        must_mend = self._publisher.must_mend
        go = self._agreement.go(topic, step, self._thread.ticket, busy, must_mend)
        if go.fault is not None:
            raise go.fault.error()
        if go.is_skipped:
            ticket._end("skipped")
            self._is_skipped = True
            return ticket
        self._is_skipped = False
        self._thread.finish()
        self._capture.settle()
        draw = iter(() if tensors is None else tensors)
        try:
            self._publisher.check_usable()
            facts = facts_of(step, metadata)
            self._agreement.check_step(go, facts.step, self.head)
            sources: Iterable[Source]
            sources = self._state.sources() if tensors is None else self._state.drawn(draw)
            captured, ticket.changed_count = self._capture.take(sources, facts)
        except BaseException as error:
            # Where ranks gather the tensors together, all of them must be drawn here, too.
            if isinstance(error, Exception):
                with suppress(Exception):
                    deque(draw, maxlen=0)
            # The other ranks are told so; the caller gets the error itself.
            if self._ranks.size > 1:
                fault = Captured(Fault.of(error), Facts(None, {}))
                self._thread.start(topic, go.line, fault, ticket, self)
            raise
        self._thread.start(topic, go.line, captured, ticket, self)
        return ticket

    def wait(self, timeout_s: float | None = None) -> Version | None:
        """Wait for the version that is on its way; returns the head.

        Raises:
            Deadline: It is still on its way after ``timeout_s``.
            ThinwireError: It failed.
        """
        if self._thread.ticket is not None:
            self._thread.ticket.wait(timeout_s)
        return self.head

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the version that is on its way, then let go of everything.

        Args:
            timeout_s: How long to wait; None: ``deadline_s``.

        Raises:
            Deadline: It was still on its way; it may or may not come to be.
        """
        if self._is_closed:
            return
        self._is_closed = True
        at_exit.forget(self)
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        ticket = self._thread.ticket
        self._thread.join(limit_s)
        is_given_up = ticket is not None and not ticket.is_done
        state = "" if ticket is None else ticket.state
        self._closing.close()
        if ticket is not None and is_given_up:
            self._thread.join(_GIVE_UP_S)
            raise Deadline(
                f"step {ticket.step} is given up: it was {state} after {limit_s:g} s",
                hint="A publisher that is opened again goes on from the head of the stream",
            )
        if self._is_skipped:
            _LOG.warning('the last publish was skipped: publish(..., when_busy="block") is not')
        if ticket is not None and ticket.error is not None:
            _LOG.warning("the last publish failed: %s", ticket.error)

    def _at_exit(self) -> None:
        """A process that ends without :meth:`close`: its last version is waited for."""
        ticket = self._thread.ticket
        if ticket is not None and not ticket.is_done:
            _LOG.warning("waiting for the version of step %s; close the publisher", ticket.step)
        with suppress(ThinwireError):
            self.close()


def _check_choices(baseline: str, when_busy: str, device_diff: str) -> None:
    if baseline not in ("memory", "disk") or when_busy not in ("latest", "block"):
        raise InvalidArgument(
            f"baseline is {baseline!r}, when_busy is {when_busy!r}",
            hint='baseline is "memory" or "disk", when_busy "latest" or "block"',
        )
    if device_diff not in ("auto", "on", "off"):
        raise InvalidArgument(f"device_diff is {device_diff!r}", hint='It is "auto", "on" or "off"')


def _own(folder: Path) -> ExitStack:
    """A rank's folder, for one publisher alone."""
    with os_errors("cannot make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    stack.enter_context(locked(folder / ".thinwire-lock"))
    return stack
