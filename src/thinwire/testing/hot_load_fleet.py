"""Replicas that load snapshots as a hosted deployment's do: the inner half of a test server.

What a snapshot's files are is not known here. A ``load`` function, given by the test, really
applies one to what a replica holds, so that the replica's bits can be looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

IDLE, DOWNLOADING, LOADING, FAILED = "idle", "downloading", "loading", "error"


class Snapshot(NamedTuple):
    """A snapshot that was announced.

    Attributes:
        identity: Its name.
        base: The snapshot that it is the difference from; None: it is full.
        compression_format: How, in the service's words.
        checksum_format: The same.
    """

    identity: str
    base: str | None = None
    compression_format: str = ""
    checksum_format: str = ""


Load = Callable[[Snapshot, Any], Any]
"""Takes a snapshot and what a replica holds, and gives what it holds then. What it raises is a
failed load: the replica keeps what it had."""


@dataclass
class Replica:
    """One replica.

    Attributes:
        name: Its name.
        held: What ``load`` made; None: nothing yet.
        identity: The snapshot that it serves; None: the model that it started with.
        target: The snapshot that it loads, or failed to.
        stage: What it does.
        error: Why its load failed.
        waiting: Snapshots to load, one after the other.
    """

    name: str
    held: Any = None
    identity: str | None = None
    target: str | None = None
    stage: str = IDLE
    error: str = ""
    waiting: list[Snapshot] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests: always, but for the moment of the swap."""
        return self.stage != LOADING

    def is_at(self, identity: str) -> bool:
        """Whether it serves a snapshot and is done with loading it."""
        return self.identity == identity and self.stage == IDLE


class Fleet:
    """The replicas of one deployment, and the ledger of their snapshots.

    Attributes:
        replicas: By name, in their order.
        ledger: Every snapshot that was announced, by identity, in their order.
        failures: By a replica's name: its next load fails with this message.
        stuck: Names of replicas that go no further.
        stages: What stages are called, where another word is to be shown.

    Args:
        names: The replicas' names.
        load: Applies a snapshot; None: only names are kept.
    """

    def __init__(self, names: Iterable[str] = ("a", "b"), load: Load | None = None) -> None:
        self.replicas = {name: Replica(name) for name in names}
        self.ledger: dict[str, Snapshot] = {}
        self.failures: dict[str, str] = {}
        self.stuck: set[str] = set()
        self.stages: dict[str, str] = {}
        self._load = load

    def current(self) -> str | None:
        """The snapshot that every replica serves; None: there is not one."""
        served = {one.identity for one in self.replicas.values()}
        return served.pop() if len(served) == 1 else None

    def is_loading(self) -> bool:
        """Whether a replica has something to load."""
        return any(one.waiting for one in self.replicas.values())

    def chain(self, identity: str) -> list[Snapshot]:
        """The snapshots from a full one to this one, as they must be loaded."""
        found: list[Snapshot] = []
        wanted: str | None = identity
        while wanted is not None:
            found.insert(0, self.ledger[wanted])
            wanted = found[0].base
        return found

    def start(self, snapshot: Snapshot) -> None:
        """Have every replica load a snapshot, in place of what it was loading."""
        self.ledger[snapshot.identity] = snapshot
        for replica in self.replicas.values():
            self._aim(replica, [snapshot])

    def add(self, name: str) -> None:
        """A replica that starts anew: it loads the newest snapshot's whole chain."""
        replica = self.replicas[name] = Replica(name)
        if self.ledger:
            self._aim(replica, self.chain(next(reversed(self.ledger))))

    def remove(self, name: str) -> None:
        """A replica that is gone, with what it held."""
        del self.replicas[name]

    def step(self) -> None:
        """Every replica goes one stage further."""
        for replica in self.replicas.values():
            if replica.name in self.stuck or not replica.waiting:
                continue
            if replica.stage == DOWNLOADING:
                replica.stage = LOADING
            elif replica.stage == LOADING:
                self._finish(replica)

    def _aim(self, replica: Replica, snapshots: list[Snapshot]) -> None:
        replica.waiting = list(snapshots)
        replica.target, replica.stage, replica.error = snapshots[-1].identity, DOWNLOADING, ""

    def _finish(self, replica: Replica) -> None:
        """Load everything that waits, all or nothing."""
        held, failure = replica.held, self.failures.pop(replica.name, None)
        try:
            if failure is not None:
                raise RuntimeError(failure)  # noqa: TRY301 - as if the load had raised it
            if self._load is not None:
                for snapshot in replica.waiting:
                    held = self._load(snapshot, held)
        except Exception as error:
            replica.stage, replica.error = FAILED, f"{type(error).__name__}: {error}"
        else:
            replica.held, replica.identity = held, replica.target
            replica.stage = IDLE
        replica.waiting = []
