"""Keeps an inference engine at the newest version of a stream: when to walk it, and when to wait.

The steps of one update are in :mod:`thinwire.engines.walk`. Here is what goes on around them: the
stream is followed into the host's copy, the engine is looked at all the time, and whatever fails is
told and tried again, while the engine serves what it serves.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from thinwire.engines.engine import Engine, EngineState, Policy, Update, label_of
from thinwire.engines.host import HostCopy
from thinwire.engines.patience import Patience, wait_s
from thinwire.engines.readiness import Readiness
from thinwire.engines.telling import Teller
from thinwire.engines.walk import Deadlines, Served, Walk
from thinwire.errors import (
    Deadline,
    EngineDetached,
    EngineError,
    EngineNotReady,
    ThinwireError,
)
from thinwire.follow import Follower, Stream
from thinwire.stream.events import Observer
from thinwire.stream.version import Version

__all__ = ["Deadlines", "Driver", "Served"]

_LOG = logging.getLogger("thinwire")

_LABEL = re.compile(r"[0-9]+-[0-9a-f]{12}\Z")
# An engine that is busy answers late: only after so many looks without an answer it is not ready.
_MAX_MISSES = 3


class Driver:
    """Keeps one engine at the newest version of a stream. Use it as a context manager.

    Args:
        stream: The stream, or its URL.
        engine: The engine, such as :class:`thinwire.engines.vllm.VLLM`.
        folder: The host's copy of the model; empty, missing, or made by thinwire. On a local file
            system: ranks map its files.
        policy: What happens to requests and caches. There is no default: stale keys are a choice.
        deadlines: How long steps may take.
        on_ready: Told whether the engine may be sent requests, whenever that changes, and again at
            each look that finds it so; in any thread. What it raises is logged.
        observer: Told of every event of the stream, and of every update of the engine.
        workers: Threads that decode; None: one for each processor, at most 8.
        follower_options: More of what :class:`thinwire.Follower` takes, such as ``cache_dir``.

    Raises:
        InvalidArgument: The engine cannot carry the policy out, or the folder will not do.
        BaseUnusable: Another follower uses the folder.
    """

    def __init__(
        self,
        stream: Stream | str | os.PathLike[str],
        engine: Engine,
        folder: str | os.PathLike[str],
        *,
        policy: Policy,
        deadlines: Deadlines | None = None,
        on_ready: Callable[[bool], None] | None = None,
        observer: Observer | None = None,
        workers: int | None = None,
        **follower_options: Any,
    ) -> None:
        engine.check_policy(policy)
        self.engine = engine
        self.host = HostCopy(folder, workers=workers)
        self._walk = Walk(engine, policy, deadlines or Deadlines(), self.host.pause_marker)
        self._served: Version | None = None
        # Whether something was seen since that makes a proof necessary before it counts.
        self._is_suspect = False
        self._unproved: Served | None = None
        self._patience = Patience()
        self._refusal_count = 0
        self._rival = ""  # the label that somebody else gave the engine
        self._rival_count = 0
        self._miss_count = 0
        self._lock = threading.Lock()  # held by whoever asks the engine something
        self._is_stopped = threading.Event()
        self.follower = Follower(stream, self.host, observer=observer, **follower_options)
        self._teller = Teller(observer, engine.name, self.follower.stream.url)
        self._readiness = Readiness(on_ready)

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
        self.stop()
        self.follower.close()

    def stop(self) -> None:
        """End :meth:`run` after the step that runs. From any thread, or a signal handler."""
        self._is_stopped.set()
        self.follower.stop()

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves one whole version of the stream, as far as is known."""
        return bool(self._readiness)

    @property
    def served(self) -> Version | None:
        """The version that the engine was last brought to; None: not known to be at any."""
        return self._served

    def run(self, *, poll_s: float = 1.0, look_s: float = 1.0) -> Iterator[Served]:
        """Yield each version that the engine was brought to, until :meth:`stop`.

        A failure is told to the observer and tried again later; the engine serves what it served,
        or is not ready. An engine that was started again is brought to the version again. One that
        somebody else paused, or put to sleep, is left alone until it runs.

        Args:
            poll_s: The shortest time between two looks at the stream.
            look_s: The time between two looks at the engine, also while something is fetched.

        Raises:
            ThinwireError: The stream cannot be followed, and was not since the start.
        """
        is_ended = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(look_s, is_ended), name="thinwire-watch", daemon=True
        )
        watcher.start()
        self._greet()
        try:
            while not self._is_stopped.is_set():
                try:
                    yield from self._follow(poll_s, look_s)
                except ThinwireError as error:
                    if self.follower.version() is None:
                        raise
                    # The engine serves something right: that must not end with the stream.
                    self._teller.refused(error)
                    yield from self._look_after(look_s)
        finally:
            is_ended.set()
            watcher.join()

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
            Deadline: A step took too long; it serves what it served before.
            InvalidArgument: The host's copy does not hold that version.
        """
        with self._lock:
            try:
                served = self._bring_to(version)
            except EngineNotReady:
                self._served = None
                self._readiness.set(False)
                raise
            except EngineError:
                # It serves as before; whether it does is proved when it is needed.
                self._is_suspect = True
                raise
        if served is not None:
            self._teller.updated(served)
        return served

    def _greet(self) -> None:
        """Say at once, not after a long fetch, that the engine is not where it should be."""
        try:
            with self._lock:
                self._state()
        except ThinwireError as error:
            self._failed(None, error, 0.0)

    def _follow(self, poll_s: float, look_s: float) -> Iterator[Served]:
        for _ in self.follower.watch(poll_s=poll_s, idle_s=look_s):
            self._refusal_count = 0
            yield from self._try()

    def _look_after(self, look_s: float) -> Iterator[Served]:
        """While the stream cannot be followed, keep the engine at what the host's copy holds."""
        self._refusal_count += 1
        end_s = time.monotonic() + wait_s(self._refusal_count)
        while time.monotonic() < end_s and not self._is_stopped.wait(look_s):
            yield from self._try()

    def _try(self) -> Iterator[Served]:
        if not self._patience.is_due:
            return
        # Not what the follower yielded: a way of several steps may have ended in between.
        held = self.follower.version()
        if held is None:
            return
        try:
            served = self.bring_to(held)
        except ThinwireError as error:
            self._failed(held, error, self._patience.failed(error))
            return
        self._patience.succeeded()
        if served is not None:
            yield served

    def _bring_to(self, version: Version) -> Served | None:
        update = self.host.update_to(version)
        state = self._state()
        if state.is_paused and not self._walk.is_ours():
            self._is_suspect = True
            self._readiness.set(False)
            raise EngineError(
                f"the {self.engine.name} engine is paused or asleep, and not by this driver",
                hint="It is left alone; it is looked at again once it runs",
            )
        served = self._served
        if state.is_paused and served is not None and state.label == label_of(served):
            # A call of ours that came late, or an answer to resume that was a lie.
            self._walk.resume(served)
            self._is_suspect = True
            state = state._replace(is_paused=False)
        is_there = state.label == update.label and not state.is_paused
        if is_there and not self._is_known(version):
            # After a restart of this process, or a doubt: what it says is proved, while it serves.
            found = self._proved(update)
            if found is not None:
                return found
        if is_there and self._is_known(version):
            self._readiness.set(True)
            return None
        before = self._served
        is_known = before is not None and state.label == label_of(before) and not state.is_paused
        if not is_known:
            self._served = None
            self._readiness.set(False)
        if before is not None and state.label != label_of(before):
            self._note_rival(state.label)
        if self._rival:
            self._meet_rival()
        return self._walk_to(update)

    def _walk_to(self, update: Update) -> Served:
        """Bring the engine there, from wherever it is.

        Raises:
            ThinwireError: It did not get there.
        """
        version = update.version
        self._teller.began("update", version)
        try:
            found = self._walk.to(update, self._served)
        except EngineError as error:
            if type(error) is EngineError and update.base:
                # Whatever was noted down may be at fault: all words can be compared instead.
                self.host.forget_changes()
            raise
        self._served, self._is_suspect = version, True
        self.host.served(version)
        self._unproved = found
        proved = self._proved(update)
        if proved is None:
            raise EngineNotReady(
                f"after the update the engine does not hold version {version.version}",
                hint="It is brought there again, all words of it",
                version=version.version,
            )
        return proved

    def _note_rival(self, label: str) -> None:
        if _LABEL.match(label):
            self._rival = label

    def _meet_rival(self) -> None:
        """Say that somebody else drives the engine, and wait longer each time before taking it.

        Raises:
            EngineError: As said.
        """
        label, self._rival = self._rival, ""
        self._rival_count += 1
        self._patience.expect(self._rival_count)
        raise EngineError(
            f"somebody else brought the {self.engine.name} engine to {label}",
            hint="Two drivers take it from each other: stop one of them",
        )

    def _is_known(self, version: Version) -> bool:
        served = self._served
        return served is not None and served.manifest == version.manifest and not self._is_suspect

    def _proved(self, update: Update) -> Served | None:
        """Have the serving engine prove that it is at a version; None: it is not.

        Raises:
            EngineError: It cannot be asked; nothing is known then.
        """
        version = update.version
        self._teller.began("prove", version)
        start_s = time.perf_counter()
        try:
            is_proved = self.engine.prove(update, self._walk.timer("prove"))
        except EngineDetached as error:
            _LOG.warning("the engine is not at version %d: %s", version.version, error)
            is_proved = False
        is_ours = self._unproved is not None and self._unproved.version == version
        if is_proved is False or (is_proved is None and not is_ours):
            self._served, self._unproved = None, None
            self._readiness.set(False)
            if is_proved is False:
                self._walk.hold()
            return None
        if self._walk.is_ours():
            # A driver that died in a pause left the mark; some engines do not say that they wait.
            self._walk.resume(version)
        self._served, self._is_suspect = version, False
        self.host.served(version)
        served, self._unproved = self._unproved, None
        self._readiness.set(True)
        if served is None or not is_ours:
            served = Served(
                version=version, label=update.label, pause_s=0.0, cache="keep", way="proved"
            )
        seconds = time.perf_counter() - start_s
        return served.with_proof(is_proved, seconds)

    def _watch(self, look_s: float, is_ended: threading.Event) -> None:
        """Look at the engine, whatever else is being done, so that ready is never long a lie."""
        while not is_ended.wait(look_s):
            if not self._lock.acquire(blocking=False):
                continue  # it is being asked something anyway
            try:
                self._look()
            finally:
                self._lock.release()

    def _look(self) -> None:
        served = self._served
        if served is None:
            return
        try:
            state = self._state()
        except ThinwireError:
            return
        if state.label != label_of(served):
            self._note_rival(state.label)
            self._served = None
            self._readiness.set(False)
        elif state.is_paused:
            self._is_suspect = True
            self._readiness.set(False)
        else:
            self._readiness.confirm()

    def _state(self) -> EngineState:
        """Ask the engine. Busy it answers late, which is not wrong; for long, it is gone.

        Raises:
            ThinwireError: It does not answer.
        """
        try:
            state = self.engine.state(self._walk.timer("ask"))
        except ThinwireError as error:
            self._miss_count += 1
            if self._miss_count >= _MAX_MISSES or not isinstance(error, Deadline):
                self._is_suspect = True
                self._readiness.set(False)
            raise
        self._miss_count = 0
        return state

    def _failed(self, version: Version | None, error: ThinwireError, retry_s: float) -> None:
        self._teller.failed(
            version, error, is_ready=self.is_ready, served=self._served, retry_s=retry_s
        )
