"""What a Fireworks deployment says of its replicas, and what that means for a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from thinwire.errors import EngineError, LimitExceeded
from thinwire.interop.hot_load_calls import MAX_REPLICAS, Progress, listed, shown


class Adapter(NamedTuple):
    """A LoRA adapter that a replica holds, or is to hold.

    Attributes:
        identity: Its snapshot.
        status: "loaded", or another word.
    """

    identity: str
    status: str


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica, as it describes itself.

    Attributes:
        name: Its id where it gives one, else its place in the answer.
        is_ready: Whether it takes requests.
        identity: The snapshot that it serves; None: the model that it started with.
        stage: What it does, in the service's words; "" where it does not say.
        target: What it loads.
        error: What went wrong with that, as far as it says.
        adapters: LoRA adapters.
    """

    name: str
    is_ready: bool
    identity: str | None
    stage: str
    target: str | None
    error: str
    adapters: tuple[Adapter, ...] = ()

    def serves(self, identity: str) -> bool:
        """Whether it takes requests with this snapshot's weights."""
        return self.is_ready and (
            self.identity == identity or Adapter(identity, "loaded") in self.adapters
        )

    def has_failed(self, identity: str) -> bool:
        """Whether it gave this snapshot up. An older snapshot's failure is not its."""
        return self.stage == "error" and self.target == identity and not self.serves(identity)

    def mentions(self, identity: str) -> bool:
        """Whether it was told of this snapshot."""
        held = {self.identity, self.target, *(adapter.identity for adapter in self.adapters)}
        return identity in held

    def __str__(self) -> str:
        ready = "ready" if self.is_ready else "not ready"
        text = f"{self.name}: {ready} at {self.identity!r}, stage {self.stage!r}"
        text += f", loading {self.target!r}" if self.target is not None else ""
        return shown(f"{text} ({self.error})" if self.error else text)


class _LoadingState(msgspec.Struct):
    stage: str | None = None
    target_snapshot_identity: str | None = None
    error: Any = None
    message: Any = None


class _Adapter(msgspec.Struct):
    identity: str = ""
    status: str = ""


class _Replica(msgspec.Struct):
    readiness: bool | None = None
    current_snapshot_identity: str | None = None
    loading_state: _LoadingState | None = None
    loaded_adapters: list[_Adapter] | None = None
    replica_id: str | int | None = None


class StatusAnswer(msgspec.Struct):
    """The answer to a question for the status; fields that are not read are left out."""

    replicas: list[_Replica]


def replicas_of(answer: StatusAnswer, deployment: str) -> tuple[Replica, ...]:
    """The replicas of an answer.

    Raises:
        LimitExceeded: It lists more than a named limit allows.
    """
    found = answer.replicas
    adapter_count = sum(len(one.loaded_adapters or ()) for one in found)
    if max(len(found), adapter_count) > MAX_REPLICAS:
        raise LimitExceeded(
            f"{deployment} lists {len(found)} replicas with {adapter_count} adapters",
            hint=f"At most {MAX_REPLICAS} of each are taken",
        )
    return tuple(_described(place, one) for place, one in enumerate(found))


def _described(place: int, said: _Replica) -> Replica:
    state = said.loading_state or _LoadingState()
    name = f"replica {place}" if said.replica_id is None else shown(said.replica_id)
    return Replica(
        name=name,
        is_ready=said.readiness is True,
        identity=said.current_snapshot_identity,
        stage=shown(state.stage or ""),
        target=state.target_snapshot_identity,
        error=shown(state.error or state.message or ""),
        adapters=tuple(Adapter(one.identity, one.status) for one in said.loaded_adapters or ()),
    )


def progress_of(
    identity: str, replicas: tuple[Replica, ...], replica_count: int | None, most_listed: int
) -> Progress:
    """How many serve a snapshot.

    Raises:
        EngineError: So many gave it up that it will never be enough.
    """
    serving = [one for one in replicas if one.serves(identity)]
    behind = [one for one in replicas if not one.serves(identity)]
    failed = [one for one in behind if one.has_failed(identity)]
    needed = replica_count or max(len(replicas), 1)
    context = {
        "identity": identity,
        "serving_count": len(serving),
        "listed_count": len(replicas),
        "behind": [(one.name, one.identity, one.stage) for one in behind[:MAX_REPLICAS]],
    }
    if len(serving) >= needed:
        return Progress(True, "", context)
    if failed and len(replicas) - len(failed) < needed:
        raise EngineError(
            f"the snapshot {identity!r} was given up: {listed([str(one) for one in failed])}",
            hint="Send a full snapshot under a new identity",
            **context,
        )
    away = f", of {most_listed} seen before" if most_listed > len(replicas) else ""
    text = f"{len(serving)} of {len(replicas)} replicas serve it{away}, and {needed} must"
    return Progress(
        False, "; ".join(filter(None, [text, listed([str(one) for one in behind])])), context
    )
