"""What a driver asks of an inference server: the steps of an update, one method for each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from thinwire.errors import Deadline, InvalidArgument
from thinwire.stream.version import Version

PauseMode = Literal["keep", "wait", "abort"]
CachePolicy = Literal["keep", "reset", "new-sessions"]

NOT_KNOWN = "thinwire-not-known"
"""The label of an engine while its weights are of no version."""

PAUSE_MODES: tuple[PauseMode, ...] = ("keep", "wait", "abort")
CACHE_POLICIES: tuple[CachePolicy, ...] = ("keep", "reset", "new-sessions")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What happens to requests and to their caches around an update.

    Attributes:
        cache: "keep": the prefix and KV caches stay, filled by older weights. "reset": they are
            emptied, and what requests in flight had in them is computed again. "new-sessions":
            requests in flight end under the version that they began with, then the caches are
            emptied: what begins later never meets keys of older weights. Needs ``pause="wait"``.
        pause: What happens to requests in flight: "keep" freezes them, "wait" lets them end,
            "abort" ends them.
    """

    cache: CachePolicy
    pause: PauseMode = "keep"

    def __post_init__(self) -> None:
        """Refuse what is unknown, or does not go together.

        Raises:
            InvalidArgument: As said.
        """
        if self.cache not in CACHE_POLICIES:
            raise InvalidArgument(
                f"the cache policy is {self.cache!r}",
                hint='Say what becomes of the KV cache: "keep", "reset" or "new-sessions"',
            )
        if self.pause not in PAUSE_MODES:
            raise InvalidArgument(
                f"the pause mode is {self.pause!r}", hint='Give "keep", "wait" or "abort"'
            )
        if self.cache == "new-sessions" and self.pause != "wait":
            raise InvalidArgument(
                "new-sessions lets requests in flight end first, so it needs the pause mode wait",
                hint='Give pause="wait" (--pause wait), or another cache policy',
            )


class EngineState(NamedTuple):
    """What an engine says of itself.

    Attributes:
        identity: Differs for every start of the engine: after a restart its weights are unknown.
        label: The weight version that it reports.
        is_paused: Whether it holds requests back, or sleeps.
    """

    identity: str
    label: str
    is_paused: bool


@dataclass(frozen=True, kw_only=True)
class Update:
    """One way of an engine from what it serves to a version.

    Attributes:
        version: Where it leads.
        folder: The host's copy of the model, which is at ``version`` already and stays so
            meanwhile.
        token: Names this update, and its file of changed words (:mod:`thinwire.engines.places`):
            ``folder/.thinwire-engine/updates/TOKEN.places``. Letters and digits only.
        base: The label of what the changes start from; empty: anything may differ.
        changed_count: Words that the file names, an upper bound.
    """

    version: Version
    folder: Path
    token: str
    base: str
    changed_count: int

    @property
    def label(self) -> str:
        """What the engine reports once it serves the version."""
        return label_of(self.version)


def label_of(version: Version) -> str:
    """A version's label: its number, and the beginning of its manifest's digest.

    A number alone would not tell the versions of two streams apart.
    """
    return f"{version.version}-{version.manifest[:12]}"


class Timer:
    """How much is left of the time that a step may take."""

    def __init__(self, timeout_s: float, doing: str) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._doing = doing

    def left_s(self) -> float:
        """Seconds that are left.

        Raises:
            Deadline: None are.
        """
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise Deadline(
                f"{self._doing} took longer than {self._timeout_s:g} s",
                hint="Look into the engine's log; a larger deadline can be given",
            )
        return left_s


class Engine(Protocol):
    """An inference server, as a driver walks it from version to version.

    Every method ends within its timer's time or raises. What fails is a
    :class:`thinwire.errors.ThinwireError`; after one, the driver decides what to do.
    """

    name: str

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that the engine cannot carry out.

        Raises:
            InvalidArgument: As said.
        """

    def meet(self, update: Update, timer: Timer) -> None:
        """Make sure, while it serves, that the engine can be attached; before its first pause.

        Raises:
            EngineError: It cannot, such as where it does not see the host's copy.
        """

    def state(self, timer: Timer) -> EngineState:
        """Ask the engine what it is and what it serves.

        Raises:
            EngineError: It cannot be reached.
        """

    def attach(self, update: Update, timer: Timer) -> None:
        """Bring a paused engine, of which nothing is known, to ``update``'s version, and prove it.

        Raises:
            EngineError: It did not get there; its weights may be anything.
        """

    def stage(self, update: Update, timer: Timer) -> None:
        """Prepare an update while the engine serves; its weights are not touched.

        Raises:
            EngineDetached: It is not at what the update starts from.
            EngineError: It did not work out; nothing was changed.
        """

    def pause(self, policy: Policy, timer: Timer) -> None:
        """Hold requests back; returns when nothing runs."""

    def apply(self, update: Update, timer: Timer) -> None:
        """Change the weights of the paused engine.

        Raises:
            EngineError: It did not; all, some or none of the weights are changed.
        """

    def undo(self, update: Update, timer: Timer) -> bool:
        """Take a failed update back, on every rank.

        Returns:
            Whether the engine has exactly the weights that it had before; False: it cannot tell.
        """

    def empty_caches(self, policy: Policy, timer: Timer) -> None:
        """Empty the paused engine's prefix, KV and encoder caches, of requests in flight too."""

    def set_label(self, label: str, timer: Timer) -> None:
        """Have the engine report ``label`` as its weight version."""

    def resume(self, timer: Timer) -> None:
        """Let requests run again."""

    def prove(self, update: Update, timer: Timer) -> bool | None:
        """Compare what the serving engine holds with the version, as far as it can be seen.

        Returns:
            Whether they are equal; None: the engine does not show all of its weights.

        Raises:
            EngineDetached: The engine says itself that it holds something else.
        """
