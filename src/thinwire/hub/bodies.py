"""What goes to and from a hub besides :mod:`thinwire.report.messages`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from thinwire.report.messages import (
    Counts,
    Lineage,
    ReplicaStatus,
    StreamStatus,
    UpdateNote,
    VersionNote,
    VersionNumber,
)

MAX_SIGNAL_BYTES = 4 << 10
MAX_FACADE_BYTES = 64 << 10

Identity = Annotated[str, Meta(min_length=1, max_length=128)]


class Health(msgspec.Struct, frozen=True):
    """That the hub answers."""

    status: str


class Streams(msgspec.Struct, frozen=True):
    """All streams, by name."""

    streams: list[StreamStatus]


class Versions(msgspec.Struct, frozen=True):
    """Versions, newest first."""

    versions: list[VersionNote]


class Replicas(msgspec.Struct, frozen=True):
    """Replicas by name; ``next`` is to be given as ``after``, None: there are no more."""

    replicas: list[ReplicaStatus]
    next: str | None
    counts: Counts


class Readiness(msgspec.Struct, frozen=True):
    """Whether replicas are ready, and why."""

    is_ready: bool
    reason: str
    ready_count: int
    count: int


class Updates(msgspec.Struct, frozen=True):
    """Updates, newest first."""

    updates: list[UpdateNote]


class Signal(msgspec.Struct, frozen=True):
    """That a version was committed: a hint to look."""

    lineage: Lineage = ""
    version: VersionNumber = 0


class Snapshot(msgspec.Struct, frozen=True):
    """Fireworks' signal. Where weights come from is the stream's; the rest is checked and left."""

    identity: Identity
    incremental_snapshot_metadata: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    reset_prompt_cache: Any = None


class SnapshotHint(msgspec.Struct, frozen=True):
    """Fireworks' hint: a file of a snapshot is there."""

    identity: Identity


class LoadingState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a replica is doing, in Fireworks' words."""

    stage: str
    target_snapshot_identity: str | None = None
    error: str = ""


class LoadedReplica(msgspec.Struct, frozen=True):
    """A replica, in Fireworks' words."""

    replica_id: str
    readiness: bool
    current_snapshot_identity: str | None
    loading_state: LoadingState
    loaded_adapters: list[str]


class LoadedReplicas(msgspec.Struct, frozen=True):
    """All replicas, in Fireworks' words."""

    replicas: list[LoadedReplica]
