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

import torch

from thinwire.checkpoint import Checkpoint
from thinwire.engines.engine import EngineState, Policy, Timer, Update
from thinwire.engines.host import FOLDER_NAME
from thinwire.errors import EngineError, EngineUnreachable, ThinwireError
from thinwire.testing.engine_rank import MemoryRank

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
            self._ranks = [MemoryRank(copy, n, self._rank_count) for n in range(self._rank_count)]
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
        return self._read([MemoryRank(copy, n, self._rank_count) for n in range(self._rank_count)])

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

        def undo(rank: MemoryRank) -> None:
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

    def _on_ranks(self, step: str, do: Callable[[MemoryRank], None], timer: Timer) -> None:
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

    def _read(self, ranks: Iterable[MemoryRank]) -> str:
        digest = hashlib.sha256()
        for rank in ranks:
            for tensor in rank.module.buffers():
                if tensor.numel():
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
                if self._read_s:
                    time.sleep(self._read_s)
        return digest.hexdigest()[:16]

    _is_frozen = False
