"""An inference engine in memory: what a driver is tested against, faults included.

It holds real parameters on several ranks, and answers requests by reading all of them, slowly: a
request that met two versions shows.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.engines.engine import EngineState, Policy, Timer, Update
from thinwire.engines.host import FOLDER_NAME, places_path
from thinwire.engines.places import read_places
from thinwire.errors import EngineDetached, EngineError, EngineUnreachable, ThinwireError
from thinwire.torch.attached import AttachedModel
from thinwire.torch.index_map import Int64s
from thinwire.torch.live import named_tensors, torch_dtype
from thinwire.torch.ways import Loader, Staged

STEPS = (
    "state",
    "meet",
    "attach",
    "stage",
    "pause",
    "apply",
    "undo",
    "empty_caches",
    "set_label",
    "resume",
    "prove",
)
# Those that every rank takes part in.
RANK_STEPS = ("attach", "stage", "apply", "undo", "prove")
START_LABEL = "default"

When = Literal["before", "after", "some"]


@dataclass
class Fault:
    """What goes wrong, once or several times.

    Attributes:
        step: The method.
        when: "before" anything was done, "after" all was, or once "some" ranks have done it.
        error: What is raised.
        times: How often; each call of the step counts once.
        skip: How many calls go well before.
    """

    step: str
    when: When
    error: ThinwireError
    times: int = 1
    skip: int = 0


class Token(NamedTuple):
    """One step of a generation: the label during it, and a digest of every weight it read."""

    label: str
    digest: str


class Aborted(Exception):
    """The request was ended by a pause."""


class _Shard(torch.nn.Module):
    """A rank's share: rows of each tensor, matrices transposed."""

    def __init__(self, copy: Checkpoint, rank: int, rank_count: int) -> None:
        super().__init__()
        self._rank, self._rank_count = rank, rank_count
        self._numbers = {name: number for number, name in enumerate(copy.tensors)}
        for name, stored in copy.tensors.items():
            value = self._cut(torch.zeros(stored.shape, dtype=torch_dtype(stored.dtype)))
            self.register_buffer(f"p{self._numbers[name]}", value.contiguous().clone())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(self.named_buffers())
        for name, value in weights:
            held[f"p{self._numbers[name]}"].copy_(self._cut(value))

    def _cut(self, value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0 or value.shape[0] < self._rank_count:
            return value
        part = value.tensor_split(self._rank_count)[self._rank]
        return part.t() if part.dim() == 2 else part


class _Rank:
    """What runs in one worker."""

    def __init__(self, copy: Checkpoint, rank: int, rank_count: int) -> None:
        self.module = _Shard(copy, rank, rank_count)
        self.module.load_weights(_values(copy))
        self._identity = f"memory {rank} of {rank_count}"
        self._attached: AttachedModel | None = None
        self._label = ""
        self._staged: tuple[Update, Staged, Checkpoint] | None = None
        self._applied: tuple[str, str, Staged] | None = None

    def attach(self, update: Update) -> None:
        self._label, self._staged, self._applied = "", None, None
        copy = Checkpoint.open(update.folder, ignore_subfolders=True)
        attached = AttachedModel(
            named_tensors(self.module),
            Loader(identity=self._identity, load=self.module.load_weights),
            update.folder / FOLDER_NAME / "maps",
            # Tiny models are loaded whole sooner than changed: which cannot be taken back.
            ("map",),
        )
        attached.attach(copy)
        if attached.differing_count(copy):
            raise EngineError("words differ after attaching")
        self._attached, self._label = attached, update.label

    def stage(self, update: Update) -> None:
        self._staged = None
        if self._attached is None or not self._label:
            raise EngineDetached("this rank was not attached, or was started again")
        if update.base and update.base != self._label:
            raise EngineDetached(f"the update starts from {update.base}, not from {self._label}")
        copy = Checkpoint.open(update.folder, ignore_subfolders=True)
        places = _places(update) if update.base else None
        self._staged = update, self._attached.stage(copy, places), copy

    def apply(self, update: Update) -> None:
        if self._staged is None or self._staged[0].token != update.token:
            raise EngineError("this update was not staged on this rank")
        assert self._attached is not None
        _, staged, copy = self._staged
        self._applied = (update.token, self._label, staged)
        self._staged, self._label = None, ""
        self._attached.apply(staged, copy)
        self._label = update.label

    def has_applied(self, update: Update) -> bool:
        return self._applied is not None and self._applied[0] == update.token

    def undo(self, update: Update) -> None:
        if self._applied is None or self._applied[0] != update.token:
            if not self._label:
                raise EngineError("what this rank holds is not known")
            return
        assert self._attached is not None
        _, before, staged = self._applied
        if not self._attached.undo(staged):
            raise EngineError("this update cannot be taken back")
        self._label, self._applied = before, None

    def prove(self, update: Update) -> bool | None:
        if self._attached is None or self._label != update.label:
            raise EngineDetached(f"this rank holds {self._label or 'no known version'}")
        copy = Checkpoint.open(update.folder, ignore_subfolders=True)
        count = self._attached.differing_count(copy)
        return None if count is None else count == 0


class MemoryEngine:
    """Serves a checkpoint folder's model. See :class:`thinwire.engines.engine.Engine`.

    Args:
        folder: What it is started from, every time.
        rank_count: Ranks.
        read_s: The time between two parameters of a forward pass.

    Attributes:
        log: The steps that were taken, in order.
        faults: What is to go wrong.
        is_answering: Whether it can be reached.
        misdeeds: What a driver did that no driver may.
        on_step: Called with each step's name before it begins.
    """

    name = "memory"

    def __init__(self, folder: Path, *, rank_count: int = 2, read_s: float = 0.0) -> None:
        self._start_folder = folder
        self._rank_count = rank_count
        self._read_s = read_s
        self._changed = threading.Condition()
        self._forward_count = 0
        self._request_count = 0
        self._abort_count = 0
        self._numbers = itertools.count(1)
        self.log: list[str] = []
        self.faults: list[Fault] = []
        self.is_answering = True
        self.misdeeds: list[str] = []
        self.on_step: Callable[[str], None] = lambda step: None
        self.caches_emptied_count = 0
        self.restart()

    def restart(self) -> None:
        """End and start again: from the folder, with no label, answering requests."""
        with self._changed:
            copy = Checkpoint.open(self._start_folder, ignore_subfolders=True)
            self._ranks = [_Rank(copy, n, self._rank_count) for n in range(self._rank_count)]
            self.identity = f"start {next(self._numbers)}"
            self.label = START_LABEL
            self.is_paused = False
            self._abort_count += 1
            self._changed.notify_all()

    # What clients do.

    def generate(self, token_count: int = 1) -> list[Token]:
        """Answer a request.

        Raises:
            Aborted: A pause, or a restart, ended it.
        """
        tokens: list[Token] = []
        with self._changed:
            while self.is_paused:
                self._changed.wait(0.1)
            self._request_count += 1
            begun = self._abort_count
        try:
            for _ in range(token_count):
                with self._changed:
                    while self._is_frozen and begun == self._abort_count:
                        self._changed.wait(0.1)
                    if begun != self._abort_count:
                        raise Aborted
                    self._forward_count += 1
                    label, ranks = self.label, self._ranks
                try:
                    tokens.append(Token(label, self._read(ranks)))
                finally:
                    with self._changed:
                        self._forward_count -= 1
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._request_count -= 1
                self._changed.notify_all()
        return tokens

    def digest_now(self) -> str:
        """The digest of all weights as they are."""
        return self._read(self._ranks)

    def digest_of(self, folder: Path) -> str:
        """The digest that a fresh load of a checkpoint folder has."""
        copy = Checkpoint.open(folder, ignore_subfolders=True)
        return self._read([_Rank(copy, n, self._rank_count) for n in range(self._rank_count)])

    # What a driver does.

    def check_policy(self, policy: Policy) -> None:
        """As the protocol says: it carries out every policy."""

    def meet(self, update: Update, timer: Timer) -> None:
        """As the protocol says."""
        with self._step("meet", timer):
            if not (update.folder / FOLDER_NAME).is_dir():
                raise EngineError(f"{update.folder} is no host's copy here")

    def state(self, timer: Timer) -> EngineState:
        """As the protocol says."""
        with self._step("state", timer):
            return EngineState(self.identity, self.label, self.is_paused)

    def attach(self, update: Update, timer: Timer) -> None:
        """As the protocol says."""
        self._on_ranks("attach", lambda rank: rank.attach(update), timer)

    def stage(self, update: Update, timer: Timer) -> None:
        """As the protocol says."""
        self._on_ranks("stage", lambda rank: rank.stage(update), timer)

    def pause(self, policy: Policy, timer: Timer) -> None:
        """As the protocol says: to "keep" waits for forward passes, to "wait" for requests."""
        with self._step("pause", timer), self._changed:
            self._is_frozen = policy.pause != "wait"
            self.is_paused = True
            if policy.pause == "abort":
                self._abort_count += 1
                self._changed.notify_all()
            try:
                while self._forward_count if policy.pause == "keep" else self._request_count:
                    self._changed.wait(min(0.05, timer.left_s()))
            finally:
                self._is_frozen = True

    def apply(self, update: Update, timer: Timer) -> None:
        """As the protocol says."""
        self._on_ranks("apply", lambda rank: rank.apply(update), timer)

    def undo(self, update: Update, timer: Timer) -> bool:
        """As the protocol says."""
        is_done = True

        def undo(rank: _Rank) -> None:
            nonlocal is_done
            if rank.has_applied(update):
                self._must_be_paused("undo")
            try:
                rank.undo(update)
            except EngineError:
                is_done = False

        self._on_ranks("undo", undo, timer)
        return is_done

    def empty_caches(self, policy: Policy, timer: Timer) -> None:
        """As the protocol says."""
        with self._step("empty_caches", timer):
            self.caches_emptied_count += 1

    def set_label(self, label: str, timer: Timer) -> None:
        """As the protocol says."""
        with self._step("set_label", timer), self._changed:
            self.label = label

    def resume(self, timer: Timer) -> None:
        """As the protocol says."""
        with self._step("resume", timer), self._changed:
            self.is_paused = self._is_frozen = False
            self._changed.notify_all()

    def prove(self, update: Update, timer: Timer) -> bool | None:
        """As the protocol says."""
        found: list[bool | None] = []
        self._on_ranks("prove", lambda rank: found.append(rank.prove(update)), timer)
        return None if None in found else all(found)

    def _on_ranks(self, step: str, do: Callable[[_Rank], None], timer: Timer) -> None:
        if step in ("attach", "apply"):
            self._must_be_paused(step)
        with self._step(step, timer) as fault:
            for number, rank in enumerate(self._ranks):
                do(rank)
                if fault is not None and fault.when == "some" and number == 0:
                    raise fault.error

    @contextmanager
    def _step(self, step: str, timer: Timer) -> Iterator[Fault | None]:
        self.on_step(step)
        timer.left_s()
        if not self.is_answering:
            raise EngineUnreachable("the engine does not answer")
        self.log.append(step)
        fault = self._strike(step)
        if fault is not None and fault.when == "before":
            raise fault.error
        yield fault
        if fault is not None:
            raise fault.error

    def _strike(self, step: str) -> Fault | None:
        for fault in self.faults:
            if fault.step == step and fault.times:
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _must_be_paused(self, step: str) -> None:
        if not self.is_paused:
            self.misdeeds.append(f"{step} while requests run")

    def _read(self, ranks: Iterable[_Rank]) -> str:
        digest = hashlib.sha256()
        for rank in ranks:
            for tensor in rank.module.buffers():
                if tensor.numel():
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
                if self._read_s:
                    time.sleep(self._read_s)
        return digest.hexdigest()[:16]

    _is_frozen = False


def _values(copy: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name, stored in copy.tensors.items():
        value = torch.zeros(stored.shape, dtype=torch_dtype(stored.dtype))
        if value.numel():
            value.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(stored.data.copy()))
        yield name, value


def _places(update: Update) -> dict[str, Int64s | None]:
    found: dict[str, Int64s | None] = {}
    for name, first, positions in read_places(places_path(update.folder, update.token)):
        if positions is None:
            found[name] = None
            continue
        earlier = found.get(name, np.empty(0, np.int64))
        if earlier is not None:
            found[name] = np.union1d(earlier, positions.astype(np.int64) + first)
    return found
