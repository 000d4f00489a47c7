"""One update of an engine, step by step, and what follows when a step fails.

What takes long happens while the engine serves. Inside the pause there is the change of the
weights, the cache policy and the label, and nothing else. Whatever fails, the engine ends at one
whole version or does not serve::

    stage -> pause -> apply -> caches -> label -> resume
                        |         |        |
                        +---------+--------+--> undo -> resume                       (as before)
                                                  |
                                                  +--> attach -> caches -> label -> resume
                                                          |
                                                          +--> not ready: stays paused
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from thinwire.engines.engine import NOT_KNOWN, Engine, Policy, Timer, Update, label_of
from thinwire.errors import (
    EngineDetached,
    EngineError,
    EngineNotReady,
    TensorMismatch,
    ThinwireError,
)
from thinwire.stream.version import Version

_LOG = logging.getLogger("thinwire")

_RESUME_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the steps of an update may take, in seconds.

    Attributes:
        ask: A question that the engine answers at once.
        stage: Preparing an update while the engine serves.
        pause: Until nothing runs any more; with ``pause="wait"`` that is the longest generation.
        apply: Changing the weights, or taking that back.
        attach: Bringing an engine of which nothing is known to a version, index map included.
        prove: Comparing what the serving engine holds.
    """

    ask: float = 10.0
    stage: float = 600.0
    pause: float = 60.0
    apply: float = 60.0
    attach: float = 1800.0
    prove: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine serves a version.

    Attributes:
        version: The version.
        label: What the engine reports.
        phases: Seconds of each step, in the order in which they were taken.
        pause_s: From the pause to the resumption.
        cache: The cache policy that was carried out.
        is_proved: Whether all that the engine holds was compared with the version; None: it does
            not show all of it.
        way: "changes": the changed words alone; "attach": all words; "proved": it was there.
        changed_count: Changed words that the update named; 0: all were compared.
    """

    version: Version
    label: str
    phases: dict[str, float] = field(default_factory=dict)
    pause_s: float
    cache: str
    is_proved: bool | None = None
    way: str
    changed_count: int = 0

    def with_proof(self, is_proved: bool | None, seconds: float) -> Served:
        """The same, proved."""
        phases = {**self.phases, "prove": seconds}
        return replace(self, is_proved=is_proved, phases=phases)


class Walk:
    """Walks one engine through updates.

    Args:
        engine: The engine.
        policy: What happens to requests and caches.
        deadlines: How long steps may take.
        marker: A file that is there while the engine is paused by us: whoever comes after a crash
            must know that.
    """

    def __init__(self, engine: Engine, policy: Policy, deadlines: Deadlines, marker: Path) -> None:
        self._engine = engine
        self._policy = policy
        self._deadlines = deadlines
        self._marker = marker
        # Whether a call of ours to pause may still be on its way, though nobody waits for it.
        self._is_pause_late = False

    def timer(self, step: str) -> Timer:
        """A timer for one step."""
        timeout_s: float = getattr(self._deadlines, step)
        return Timer(timeout_s, f"the engine's {step} step")

    def is_ours(self) -> bool:
        """Whether it was us who paused the engine, in this process or one before."""
        return self._marker.exists()

    def resume(self, version: Version) -> None:
        """Let an engine run that holds ``version``, and was paused by us.

        Raises:
            EngineNotReady: It does not.
        """
        self._resume(version)

    def to(self, update: Update, before: Version | None) -> Served:
        """Bring the engine to a version.

        Args:
            update: Where to.
            before: What it serves; None: not known.

        Raises:
            EngineNotReady: It is at no version that is known; it is paused as far as it does what
                it is told.
            EngineError: It serves what it served before.
        """
        phases = Phases()
        way = "attach"
        if before is not None:
            way = self._stage(update, phases)
        if way == "attach":
            with phases("meet"):
                self._engine.meet(update, self.timer("ask"))
        with phases("pause"):
            self._pause(before)
        with phases.total():
            way = self._change(update, way, before, phases)
            with phases("resume"):
                self._resume(update.version)
        return Served(
            version=update.version,
            label=update.label,
            phases=phases.seconds,
            pause_s=phases.seconds["pause"] + phases.total_s,
            cache=self._policy.cache,
            way=way,
            changed_count=update.changed_count,
        )

    def hold(self) -> None:
        """Pause an engine that serves something wrong, as far as it does what it is told."""
        with suppress(ThinwireError):
            self._mark()
            self._engine.pause(self._policy, self.timer("pause"))

    def _stage(self, update: Update, phases: Phases) -> str:
        try:
            with phases("stage"):
                self._engine.stage(update, self.timer("stage"))
        except (EngineDetached, TensorMismatch) as error:
            _LOG.info("the engine must be attached: %s", error)
            return "attach"
        return "changes"

    def _pause(self, before: Version | None) -> None:
        self._mark()
        try:
            self._engine.pause(self._policy, self.timer("pause"))
            self._is_pause_late = False
        except ThinwireError as error:
            # Nothing was changed; but it may be paused by now, or be paused later on.
            self._is_pause_late = True
            if before is None:
                raise
            try:
                self._resume(before)
            except EngineNotReady:
                raise EngineNotReady(error.message, hint=error.hint) from error
            raise

    def _change(self, update: Update, way: str, before: Version | None, phases: Phases) -> str:
        """What happens inside the pause; returns the way that was taken.

        Raises:
            EngineError: The engine serves what it served before.
            EngineNotReady: It does not.
        """
        try:
            if way == "attach":
                self._attach(update, phases)
            else:
                with phases("apply"):
                    self._engine.apply(update, self.timer("apply"))
            self._finish(update, phases)
        except ThinwireError as error:
            return self._mend(update, way, before, phases, error)
        return way

    def _attach(self, update: Update, phases: Phases) -> None:
        with phases("attach"):
            # Whoever resumes it in the middle must not have answers labelled as of a version.
            self._engine.set_label(NOT_KNOWN, self.timer("ask"))
            self._engine.attach(update, self.timer("attach"))

    def _finish(self, update: Update, phases: Phases) -> None:
        if self._policy.cache != "keep":
            with phases("caches"):
                self._engine.empty_caches(self._policy, self.timer("pause"))
        with phases("label"):
            self._engine.set_label(update.label, self.timer("ask"))

    def _mend(
        self,
        update: Update,
        way: str,
        before: Version | None,
        phases: Phases,
        error: ThinwireError,
    ) -> str:
        """End a failed change: as before, or at the version after all, or not ready."""
        if way == "changes" and before is not None and self._undo(update):
            try:
                self._engine.set_label(label_of(before), self.timer("ask"))
                self._resume(before)
            except ThinwireError as second:
                raise EngineNotReady(second.message, hint=second.hint) from error
            raise EngineError(
                f"the engine did not take version {update.version.version}, it serves version "
                f"{before.version} as before: {error.message}",
                hint=error.hint or "It is tried again",
                version=update.version.version,
            ) from error
        if way == "changes":
            with suppress(ThinwireError):
                # It may have been started again, and run.
                self._engine.pause(self._policy, self.timer("pause"))
                self._attach(update, phases)
                self._finish(update, phases)
                _LOG.warning("the engine took version %d whole", update.version.version)
                return "attach"
        raise EngineNotReady(
            f"the engine did not take version {update.version.version}, and what it holds is not "
            f"known: {error.message}",
            hint=error.hint or "It is tried again; where that does not help, restart the engine",
            version=update.version.version,
        ) from error

    def _undo(self, update: Update) -> bool:
        try:
            return self._engine.undo(update, self.timer("apply"))
        except ThinwireError as error:
            _LOG.warning("the update was not taken back: %s", error)
            return False

    def _resume(self, version: Version) -> None:
        """Let requests run. From here on the weights must not be touched without another pause.

        Raises:
            EngineNotReady: It does not.
        """
        last: ThinwireError | None = None
        for _ in range(_RESUME_TRIES):
            try:
                self._engine.resume(self.timer("ask"))
                break
            except ThinwireError as error:
                last = error
            # It may have done so, and the answer have been lost.
            with suppress(ThinwireError):
                if not self._engine.state(self.timer("ask")).is_paused:
                    break
        else:
            assert last is not None
            raise EngineNotReady(
                f"the engine is at version {version.version} and does not resume: {last.message}",
                hint=last.hint or "It is tried again",
                version=version.version,
            ) from last
        if not self._is_pause_late:
            self._marker.unlink(missing_ok=True)

    def _mark(self) -> None:
        try:
            self._marker.touch()
        except OSError as error:
            raise EngineError(
                f"{self._marker} cannot be written: {error.strerror}; the engine was not paused",
                hint="The host's copy must lie on a disk with room",
            ) from error


class Phases:
    """Times steps as they are taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.total_s = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time one step."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s

    @contextmanager
    def total(self) -> Iterator[None]:
        """Time several together."""
        start_s = time.perf_counter()
        yield
        self.total_s = time.perf_counter() - start_s
