"""What CoreWeave's hot-load API answers, and what that means for a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from thinwire.errors import EngineError
from thinwire.interop.hot_load_calls import Progress, listed, shown

INCREMENTAL = "SNAPSHOT_TYPE_INCREMENTAL"

_COMPLETED = "HOT_LOAD_STATE_COMPLETED"
_ENDED_BADLY = ("HOT_LOAD_STATE_FAILED", "HOT_LOAD_STATE_CANCELED")
_SHOWN_CONDITIONS = 100


@dataclass(frozen=True, kw_only=True)
class HotLoadOperation:
    """One hot-load, as the service describes it.

    Attributes:
        id: Its id.
        deployment_id: The deployment's.
        identity: The snapshot's.
        base: The snapshot that it is the difference from; None: it is full.
        state: As the service calls it, such as "HOT_LOAD_STATE_IN_PROGRESS".
        problems: What it says of its conditions, as far as it says something.
        chain: Identities of the snapshots that are loaded one after the other, oldest first.
    """

    id: str
    deployment_id: str
    identity: str
    base: str | None
    state: str
    problems: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CoreWeaveReplica:
    """One replica of a hot-load.

    Attributes:
        name: Its zone and name, or its place in the answer.
        state: As the service calls it.
        identity: The snapshot that it serves.
    """

    name: str
    state: str
    identity: str | None

    def serves(self, identity: str) -> bool:
        """Whether it serves this snapshot."""
        # The pages say READY; other enums of this API have their name in front.
        is_ready = self.state == "READY" or self.state.endswith("_STATE_READY")
        return is_ready and self.identity == identity

    def __str__(self) -> str:
        return f"{self.name}: {self.state!r} at {shown(repr(self.identity))}"


class _Incremental(msgspec.Struct, rename="camel"):
    previous_snapshot_identity: str = ""


class _Snapshot(msgspec.Struct, rename="camel"):
    identity: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    id: str
    identity: str
    deployment_id: str = ""
    type: str = ""
    incremental_snapshot_metadata: _Incremental | None = None
    snapshot_chain: list[_Snapshot] | None = None


class _Condition(msgspec.Struct, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct, rename="camel"):
    state: str = ""
    conditions: list[_Condition] | None = None


class _HotLoad(msgspec.Struct, rename="camel"):
    spec: _Spec
    status: _State | None = None


class HotLoadAnswer(msgspec.Struct, rename="camel"):
    """An operation, as sent; fields that are not read are left out."""

    hot_load: _HotLoad


class ReplicaFields(msgspec.Struct, rename="camel"):
    """A replica, as sent."""

    state: str = ""
    current_snapshot_identity: str | None = None
    zone: str = ""
    name: str = ""


class ReplicaPage(msgspec.Struct, rename="camel"):
    """A page of replicas, as sent."""

    replicas: list[ReplicaFields] | None = None
    next_page_token: str = ""


def operation_of(answer: HotLoadAnswer) -> HotLoadOperation:
    """The operation that an answer describes."""
    spec, status = answer.hot_load.spec, answer.hot_load.status or _State()
    base = None
    if spec.type == INCREMENTAL and spec.incremental_snapshot_metadata is not None:
        base = spec.incremental_snapshot_metadata.previous_snapshot_identity
    return HotLoadOperation(
        id=spec.id,
        deployment_id=spec.deployment_id,
        identity=spec.identity,
        base=base,
        state=shown(status.state),
        problems=tuple(
            shown(f"{one.type} {one.status} {one.reason}: {one.message}")
            for one in (status.conditions or ())[:_SHOWN_CONDITIONS]
            if one.message
        ),
        chain=tuple(one.identity for one in spec.snapshot_chain or ()),
    )


def replicas_of(said: list[ReplicaFields]) -> tuple[CoreWeaveReplica, ...]:
    """The replicas of an answer's pages."""
    return tuple(_described(place, one) for place, one in enumerate(said))


def _described(place: int, said: ReplicaFields) -> CoreWeaveReplica:
    name = "/".join(filter(None, [said.zone, said.name])) or f"replica {place}"
    return CoreWeaveReplica(
        name=shown(name), state=shown(said.state), identity=said.current_snapshot_identity
    )


def raise_if_over(operation: HotLoadOperation) -> None:
    """Refuse an operation that has failed.

    Raises:
        EngineError: As said.
    """
    if operation.state in _ENDED_BADLY:
        said = listed(list(operation.problems)) or "it says no more"
        raise EngineError(
            f"loading {operation.identity!r} ended in {operation.state}: {said}",
            hint="Send a full snapshot under a new identity",
            identity=operation.identity,
            state=operation.state,
        )


def progress_of(
    operation: HotLoadOperation, replicas: tuple[CoreWeaveReplica, ...], replica_count: int | None
) -> Progress:
    """How many replicas serve a snapshot."""
    identity = operation.identity
    behind = [one for one in replicas if not one.serves(identity)]
    serving_count = len(replicas) - len(behind)
    if replica_count is None:
        is_done = operation.state == _COMPLETED and bool(replicas) and not behind
    else:
        is_done = serving_count >= replica_count
    text = f"it is in {operation.state!r}, {serving_count} of {len(replicas)} replicas serve it"
    context = {
        "identity": identity,
        "state": operation.state,
        "serving_count": serving_count,
        "listed_count": len(replicas),
        "behind": [(one.name, one.identity, one.state) for one in behind],
    }
    return Progress(
        is_done, "; ".join(filter(None, [text, listed([str(one) for one in behind])])), context
    )
