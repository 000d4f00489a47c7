"""What a trainer holds while a version is on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Literal

from thinwire.errors import Deadline, ThinwireError
from thinwire.stream.version import Version

State = Literal["waiting", "encoding", "uploading", "committing", "committed", "skipped", "failed"]


class Ticket:
    """One publish, from the moment when the weights are captured.

    Attributes:
        step: The trainer's step.
        changed_count: Words that this rank found to differ from the last committed version.
    """

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.changed_count = 0
        self._state: State = "waiting"
        self._version: Version | None = None
        self._error: ThinwireError | None = None
        self._seconds: dict[str, float] = {}
        self._since_s = time.monotonic()
        self._is_captured = False
        self._lock = threading.Lock()
        self._done = threading.Event()

    def __repr__(self) -> str:
        return f"Ticket(step={self.step}, state={self._state!r})"

    @property
    def state(self) -> State:
        """How far it is.

        "waiting" for the background thread; then "encoding", "uploading" and "committing"; in the
        end "committed", "failed", or "skipped" where another version was still on its way.
        """
        return self._state

    @property
    def is_done(self) -> bool:
        """Whether it is committed, skipped or failed."""
        return self._done.is_set()

    @property
    def error(self) -> ThinwireError | None:
        """Why it failed."""
        return self._error

    @property
    def version(self) -> Version | None:
        """The version that it became."""
        return self._version

    @property
    def payload_bytes(self) -> int:
        """Bytes that all ranks uploaded for it; 0 until it is committed."""
        return 0 if self._version is None else self._version.payload_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of all its tensors; 0 until it is committed."""
        return 0 if self._version is None else self._version.raw_bytes

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds of each phase on this rank.

        "capture" is what publish() took, "wait" until all ranks began, then "encode", "upload" and
        "commit".
        """
        with self._lock:
            return dict(self._seconds)

    def wait(self, timeout_s: float | None = None) -> Version | None:
        """Wait until it is done.

        Returns:
            The version that it became; None: it was skipped.

        Raises:
            Deadline: It is still on its way after ``timeout_s``.
            ThinwireError: It failed. The next publish sends what this one would have sent.
        """
        if not self._done.wait(timeout_s):
            raise Deadline(
                f"step {self.step} is still {self._state} after {timeout_s:g} s",
                hint="It goes on; look at ticket.state, or at the publisher's observer",
            )
        if self._error is not None:
            raise self._error
        return self._version

    def _enter(self, state: State) -> None:
        with self._lock:
            self._note()
            self._state = state

    def _note(self) -> None:
        names = {
            "waiting": "wait" if self._is_captured else "capture",
            "encoding": "encode",
            "uploading": "upload",
            "committing": "commit",
        }
        now_s = time.monotonic()
        name = names.get(self._state)
        if name is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def _captured(self) -> None:
        with self._lock:
            self._note()
            self._is_captured = True

    def _end(
        self,
        state: State,
        version: Version | None = None,
        error: ThinwireError | None = None,
    ) -> None:
        with self._lock:
            self._note()
            self._state = state
            self._version = version
            self._error = error
        self._done.set()
