"""Walks an inference engine from version to version of a stream.

What takes long happens while the engine serves: fetching, decoding and verifying into the host's
copy, then staging. Inside the pause there is the change of the weights, the cache policy and the
label, and nothing else. Whatever fails, the engine ends at one whole version or does not serve::

    stage -> pause -> apply -> caches -> label -> resume -> prove
                        |         |        |        |
                        +---------+--------+--------+--> undo -> resume      (as before)
                                                           |
                                                           +--> attach -> caches -> label -> resume
                                                                   |
                                                                   +--> not ready: stays paused
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from thinwire.engines.engine import Engine, Policy, Timer, Update, label_of
from thinwire.engines.host import HostCopy
from thinwire.errors import (
    ApplyError,
    EngineError,
    EngineNotReady,
    EngineUnreachable,
    FormatError,
    ThinwireError,
)
from thinwire.follow import Follower, Stream
from thinwire.stream.events import EngineFailed, EngineUpdated, Observer, Observers
from thinwire.stream.version import Version

_LOG = logging.getLogger("thinwire")

_MAX_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the steps of an update may take, in seconds.

    Attributes:
        ask: A question that the engine answers at once.
        stage: Preparing an update while the engine serves.
        pause: Until nothing runs any more; with ``pause="wait"`` that is the longest generation.
        apply: Changing the weights, or taking that back.
        attach: Bringing an engine of which nothing is known to a version, index map included.
    """

    ask: float = 10.0
    stage: float = 600.0
    pause: float = 60.0
    apply: float = 60.0
    attach: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine serves a version.

    Attributes:
        version: The version.
        label: What the engine reports.
        phases: Seconds of each step, in the order in which they were taken.
        pause_s: From the pause to the resumption.
        cache: The cache policy that was carried out.
        is_proved: Whether what the engine holds was compared with the version; None: it shows
            nothing.
        way: "changes": the changed words alone; "attach": all words.
    """

    version: Version
    label: str
    phases: dict[str, float] = field(default_factory=dict)
    pause_s: float
    cache: str
    is_proved: bool | None
    way: str


class Driver:
    """Keeps one engine at the newest version of a stream. Use it as a context manager.

    Args:
        stream: The stream, or its URL.
        engine: The engine, such as :class:`thinwire.engines.vllm.VLLM`.
        folder: The host's copy of the model; empty, missing, or made by thinwire.
        policy: What happens to requests and caches. There is no default: stale keys are a choice.
        deadlines: How long steps may take.
        on_ready: Told whether the engine may be sent requests, whenever that changes.
        observer: Told of every event of the stream, and of every update of the engine.
        follower_options: More of what :class:`thinwire.Follower` takes, such as ``cache_dir``.

    Raises:
        BaseUnusable: Another follower uses the folder.
    """

    def __init__(
        self,
        stream: Stream | str | os.PathLike[str],
        engine: Engine,
        folder: str | os.PathLike[str],
        *,
        policy: Policy,
        deadlines: Deadlines = Deadlines(),
        on_ready: Callable[[bool], None] | None = None,
        observer: Observer | None = None,
        **follower_options: Any,
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.deadlines = deadlines
        self.host = HostCopy(folder)
        self._observers = Observers(observer)
        self._on_ready = on_ready
        self._is_ready: bool | None = None
        self._served: Version | None = None
        self._identity: str | None = None
        self._failure_count = 0
        self._next_try_s = 0.0
        self.follower = Follower(stream, self.host, observer=observer, **follower_options)
        self._set_ready(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop following. The engine goes on serving what it has."""
        self.follower.close()

    def stop(self) -> None:
        """End :meth:`run` after the step that runs. From any thread, or a signal handler."""
        self.follower.stop()

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves one whole version of the stream, as far as is known."""
        return bool(self._is_ready)

    @property
    def served(self) -> Version | None:
        """The version that the engine was last brought to; None: not known to be at any."""
        return self._served

    def run(self, *, poll_s: float = 1.0, look_s: float = 1.0) -> Iterator[Served]:
        """Yield each version that the engine was brought to, until :meth:`stop`.

        A failure is told to the observer and tried again later; the engine serves what it served,
        or is not ready. An engine that was started again is brought to the version again.

        Args:
            poll_s: The shortest time between two looks at the stream.
            look_s: The time between two looks at the engine.

        Raises:
            ThinwireError: The stream cannot be followed any more.
        """
        held = self.follower.version()
        for found in self.follower.watch(poll_s=poll_s, idle_s=look_s):
            held = found or held
            if held is None or time.monotonic() < self._next_try_s:
                continue
            try:
                served = self.bring_to(held)
            except ThinwireError as error:
                self._failed(held, error)
                continue
            self._failure_count = 0
            if served is not None:
                yield served

    def bring_to(self, version: Version) -> Served | None:
        """Bring the engine to what the host's copy holds.

        Args:
            version: What the host's copy holds.

        Returns:
            What was done; None: the engine is there already.

        Raises:
            EngineError: It did not get there; it serves what it served before.
            EngineUnreachable: It does not answer.
            EngineNotReady: It is at no version that is known, and holds requests back as far as
                it does what it is told.
        """
        try:
            known = self._look()
        except ThinwireError:
            self._set_ready(False)
            raise
        if known and self._served is not None and self._served.manifest == version.manifest:
            self._set_ready(True)
            return None
        update = self.host.update_to(version)
        phases = _Phases()
        way = "changes" if known else "attach"
        if known:
            try:
                with phases("stage"):
                    self.engine.stage(update, self._timer("stage"))
            except EngineUnreachable:
                raise
            except (EngineError, ApplyError, FormatError) as error:
                _LOG.info("staging was refused: %s", error)
                way = "attach"
        if way == "attach":
            self._set_ready(False)
        with phases("pause"):
            self._pause()
        self._change(update, way, phases)
        pause_s = phases.since("pause")
        self._served = version
        self.host.served(version)
        with phases("prove"):
            is_proved = self._prove(update, way)
        self._set_ready(True)
        served = Served(
            version=version,
            label=update.label,
            phases=phases.seconds,
            pause_s=pause_s,
            cache=self.policy.cache,
            is_proved=is_proved,
            way=way,
        )
        self._tell(served, update)
        return served

    def _look(self) -> bool:
        """Whether the engine is the one that was brought to a version, and still says so."""
        state = self.engine.state(self._timer("ask"))
        is_same = self._served is not None and state.label == label_of(self._served)
        is_known = is_same and state.identity == self._identity and not state.is_paused
        if not is_known:
            # It was started again, or somebody else changed its weights or paused it.
            self._served = None
            self._set_ready(False)
        self._identity = state.identity
        return is_known

    def _pause(self) -> None:
        try:
            self.engine.pause(self.policy, self._timer("pause"))
        except ThinwireError:
            # Nothing was changed; but it may be paused by now.
            self._resume_if_known()
            raise

    def _change(self, update: Update, way: str, phases: _Phases) -> None:
        """What happens inside the pause."""
        try:
            if way == "attach":
                with phases("attach"):
                    self.engine.attach(update, self._timer("attach"))
            else:
                with phases("apply"):
                    self.engine.apply(update, self._timer("apply"))
            self._finish(update, phases)
        except ThinwireError as error:
            self._mend(update, way, phases, error)
        with phases("resume"):
            self._resume(update)

    def _finish(self, update: Update, phases: _Phases) -> None:
        if self.policy.cache != "keep":
            with phases("caches"):
                self.engine.empty_caches(self.policy, self._timer("pause"))
        with phases("label"):
            self.engine.set_label(update.label, self._timer("ask"))

    def _resume(self, update: Update) -> None:
        """Let requests run. From here on the weights must not be touched without another pause.

        Raises:
            EngineNotReady: It does not.
        """
        timer = self._timer("ask")
        try:
            self.engine.resume(timer)
        except ThinwireError as error:
            # It may have done so, and the answer have been lost.
            with suppress(ThinwireError):
                if not self.engine.state(timer).is_paused:
                    return
            self._served = None
            self._set_ready(False)
            raise EngineNotReady(
                f"the engine is at version {update.version.version} and does not resume: "
                f"{error.message}",
                hint=error.hint or "It is tried again",
                version=update.version.version,
            ) from error

    def _mend(self, update: Update, way: str, phases: _Phases, error: ThinwireError) -> None:
        """End a failed change: as before, or at the version after all, or not ready.

        Raises:
            EngineError: The engine serves what it served before, or is not ready.
        """
        before = self._served
        if way == "changes" and before is not None and self._undo(update, before):
            raise EngineError(
                f"the engine did not take version {update.version.version}, it serves version "
                f"{before.version} as before: {error.message}",
                hint=error.hint or "It is tried again",
                version=update.version.version,
            ) from error
        self._served = None
        self._set_ready(False)
        if way == "changes":
            with suppress(ThinwireError):
                with phases("attach"):
                    self.engine.attach(update, self._timer("attach"))
                self._finish(update, phases)
                _LOG.warning("the engine took version %d whole", update.version.version)
                return
        raise EngineNotReady(
            f"the engine did not take version {update.version.version}, and what it holds is not "
            f"known: {error.message}",
            hint=error.hint or "It is tried again; where that does not help, restart the engine",
            version=update.version.version,
        ) from error

    def _undo(self, update: Update, before: Version) -> bool:
        """Have the engine serve what it served before; False: it may not."""
        try:
            if not self.engine.undo(update, self._timer("apply")):
                return False
            # The caches may hold keys of the new weights by now, if requests ran.
            self.engine.set_label(label_of(before), self._timer("ask"))
            self.engine.resume(self._timer("ask"))
        except ThinwireError:
            return False
        return True

    def _prove(self, update: Update, way: str) -> bool | None:
        """Compare; where something else is served, stop that.

        Raises:
            EngineNotReady: It is not what was published.
        """
        try:
            is_proved = self.engine.prove(update, self._timer("stage"))
        except ThinwireError as error:
            _LOG.warning("what the engine holds could not be compared: %s", error)
            return None
        if is_proved is not False:
            return is_proved
        self._served = None
        self._set_ready(False)
        with suppress(ThinwireError):
            self.engine.pause(self.policy, self._timer("pause"))
        raise EngineNotReady(
            f"after the {'change' if way == 'changes' else 'attachment'} the engine does not hold "
            f"version {update.version.version}",
            hint="It is brought there again, all words of it",
            version=update.version.version,
        )

    def _resume_if_known(self) -> None:
        if self._served is not None:
            with suppress(ThinwireError):
                self.engine.resume(self._timer("ask"))

    def _failed(self, version: Version, error: ThinwireError) -> None:
        self._failure_count += 1
        wait_s = min(2.0 ** (self._failure_count - 1), _MAX_WAIT_S)
        self._next_try_s = time.monotonic() + wait_s
        self._observers.on_event(
            EngineFailed(
                url=self.follower.stream.url,
                lineage=version.lineage,
                version=version.version,
                engine=self.engine.name,
                code=error.code,
                reason=str(error),
                is_ready=self.is_ready,
                served=None if self._served is None else self._served.version,
                retry_s=wait_s,
            )
        )

    def _tell(self, served: Served, update: Update) -> None:
        self._observers.on_event(
            EngineUpdated(
                url=self.follower.stream.url,
                lineage=served.version.lineage,
                version=served.version.version,
                engine=self.engine.name,
                label=served.label,
                way=served.way,
                changed_count=update.changed_count,
                phases=dict(served.phases),
                pause_s=served.pause_s,
                cache=served.cache,
                is_proved=served.is_proved,
                age_s=time.time() - served.version.created_ms / 1000,
            )
        )

    def _set_ready(self, is_ready: bool) -> None:
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            if self._on_ready is not None:
                self._on_ready(is_ready)

    def _timer(self, step: str) -> Timer:
        timeout_s: float = getattr(self.deadlines, step)
        return Timer(timeout_s, f"the engine's {step} step")


class _Phases:
    """Times steps as they are taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        self._begun.setdefault(name, start_s)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s

    def since(self, name: str) -> float:
        """Seconds since a step began."""
        return time.perf_counter() - self._begun[name]
