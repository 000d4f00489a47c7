"""What replicas, the hub and whoever watches tell each other, as JSON.

Every text and list has a limit: both sides decode what a stranger may have sent. A newer replica
may say more than a hub knows, which passes over it. Times are unix milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_HEARTBEAT_BYTES = 32 << 10
MAX_UPDATES = 16
MAX_PHASES = 16
MAX_COUNT = 2**53 - 1  # what JavaScript's numbers hold exactly
DIGEST_CHARS = 12  # as in the labels of engines

# Where a text ends, for Python (whose $ also is before a last newline) as for everyone else.
_END = r"$(?!\n)"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}"

# What a replica, a region or an engine may be called: also safe in a URL and a metric's label.
NAME_PATTERN = rf"^{_NAME}{_END}"
OPTIONAL_NAME_PATTERN = rf"^(?:{_NAME})?{_END}"

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
OptionalName = Annotated[str, Meta(pattern=OPTIONAL_NAME_PATTERN)]
Lineage = Annotated[str, Meta(pattern=rf"^(?:[0-9a-f]{{32}})?{_END}")]
Digest = Annotated[str, Meta(pattern=rf"^(?:[0-9a-f]{{{DIGEST_CHARS}}})?{_END}")]
Code = Annotated[str, Meta(pattern=rf"^(?:[A-Za-z][A-Za-z0-9_-]{{0,63}})?{_END}")]
Text = Annotated[str, Meta(max_length=500)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
VersionNumber = Annotated[int, Meta(ge=0, le=10**12 - 1)]
Step = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

# What a replica is doing; an engine's own phases (pause, exchange ...) are named in updates.
Phase = Literal["idle", "fetch", "apply", "update", "prove"]
Kind = Literal["replica", "relay"]


class Fault(msgspec.Struct, frozen=True):
    """The last error: its code, what it says, and when (by the replica's clock)."""

    code: Code
    message: Text
    at_ms: Count


class UpdateNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """An update that a replica finished, or did not.

    Attributes:
        version: The version it went to.
        ended_ms: When it ended, by the replica's clock.
        phases: Seconds of each phase, in order.
        fetched_bytes: What crossed the network for it.
        pause_s: How long requests were held back.
        age_s: From the publisher's commit until it was served here.
        is_ok: Whether it got there.
        replica: Who; filled in by the hub.
        region: Where; filled in by the hub.
    """

    version: VersionNumber
    ended_ms: Count
    phases: Annotated[dict[Name, Seconds], Meta(max_length=MAX_PHASES)] = {}
    fetched_bytes: Count = 0
    pause_s: Seconds = 0.0
    age_s: Seconds = 0.0
    is_ok: bool = True
    replica: OptionalName = ""
    region: OptionalName = ""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a replica says of itself, every few seconds and whenever something changes.

    Attributes:
        replica: Its name, the same after a restart.
        kind: A replica, or a relay (which holds no version of its own).
        region: Where it is.
        engine: What holds the weights: "folder", "torch", "vllm", "sglang".
        lineage: That of the version it serves; empty: none.
        version: The version it serves; 0: none.
        step: The trainer's step of that version.
        digest: The beginning of its manifest's digest: a number may be published again. Empty: it
            does not say.
        is_ready: Whether it serves one whole version, and caught up with the head since it joined.
        phase: What it is doing.
        target: The version it is on the way to; 0: none.
        done_bytes: How far that is ...
        total_bytes: ... of what; 0: not known.
        phase_s: For how long.
        fetched_bytes: What crossed its network since it started.
        relayed_bytes: What of it a relay gave.
        cached_bytes: What it had, or a cache near it.
        served_bytes: A relay: what it gave to others.
        update_count: Updates since it started.
        started_ms: When it started, by its clock.
        pause_s: How long the last update held requests back.
        fault: The last error; None once an update succeeded after it.
        updates: The updates since the last heartbeat that arrived.
    """

    replica: Name
    kind: Kind = "replica"
    region: OptionalName = ""
    engine: OptionalName = ""
    lineage: Lineage = ""
    version: VersionNumber = 0
    step: Step | None = None
    digest: Digest = ""
    is_ready: bool = False
    phase: Phase = "idle"
    target: VersionNumber = 0
    done_bytes: Count = 0
    total_bytes: Count = 0
    phase_s: Seconds = 0.0
    fetched_bytes: Count = 0
    relayed_bytes: Count = 0
    cached_bytes: Count = 0
    served_bytes: Count = 0
    update_count: Count = 0
    started_ms: Count = 0
    pause_s: Seconds = 0.0
    fault: Fault | None = None
    updates: Annotated[list[UpdateNote], Meta(max_length=MAX_UPDATES)] = []


class VersionNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version, as the bucket has it: what the dashboard draws and followers are woken with.

    Attributes:
        lineage: Its lineage.
        version: Its number.
        step: The trainer's step; None: it has none, or one beyond what JavaScript holds.
        kind: "anchor", "reference" or "delta".
        created_ms: When, by the publisher's clock.
        payload_bytes: Of its shards or files.
        raw_bytes: Of all weights.
        changed_count: Words that changed.
        word_count: Words in all.
        identity: What the trainer called it (``metadata["identity"]``), or "".
        digest: The beginning of its manifest's digest.
    """

    lineage: str
    version: int
    step: int | None
    kind: str
    created_ms: int
    payload_bytes: int
    raw_bytes: int
    changed_count: int
    word_count: int
    identity: str = ""
    digest: str = ""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a heartbeat is answered with.

    Attributes:
        head: The newest version that the hub knows of: a hint. None: none was published.
        interval_s: How long to wait before the next heartbeat where nothing changes.
    """

    head: VersionNote | None
    interval_s: float


class ReplicaStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica as the hub sees it.

    Attributes:
        beat: What it said last (without its updates).
        state: "ready"; "updating": ready, and on its way to a version; "joining": not ready,
            and nothing failed; "unready": not ready, and something failed, or see ``doubt``;
            "lost": it was not heard of for a while.
        staleness_steps: The head's step less its own; versions where either has no step or they
            are of two lineages. None: it serves none, or one that the stream does not have.
        staleness_s: Since the first version that it lacks was published; 0: it lacks none.
        seen_s: Since it was last heard of.
        doubt: Why what it serves is none of the stream's versions; empty: there is no doubt.
    """

    beat: Heartbeat
    state: Literal["ready", "updating", "joining", "unready", "lost"]
    staleness_steps: int | None
    staleness_s: float | None
    seen_s: float
    doubt: str = ""


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas (not relays) are in which state."""

    ready: int = 0
    updating: int = 0
    joining: int = 0
    unready: int = 0
    lost: int = 0


class RegionStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A region: its replicas together.

    Attributes:
        region: Its name.
        counts: Its replicas by state.
        relay_count: Its relays.
        staleness_steps_p50: Of those that are not lost.
        staleness_steps_p95: The same.
        staleness_steps_max: The same.
        staleness_s_max: The same.
        fetched_bytes: What its replicas and relays took from outside since they started; what
            replicas took from relays is not among it.
        served_bytes: What its relays gave.
    """

    region: str
    counts: Counts
    relay_count: int
    staleness_steps_p50: int | None
    staleness_steps_p95: int | None
    staleness_steps_max: int | None
    staleness_s_max: float | None
    fetched_bytes: int
    served_bytes: int


class StreamStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream, as the hub sees it.

    Attributes:
        name: Its name at this hub.
        url: Where it is; holds no credential.
        model: What it says that it is of.
        head: The newest version; None: none, or none was seen yet.
        looked_s: Since the hub last read the bucket with success; None: never.
        fault: Why it does not; None: it does.
        counts: Its replicas by state.
        regions: By name.
        sent_bytes: Payload of the versions that the hub has in its history ...
        full_bytes: ... and what full checkpoints of the same versions would be.
    """

    name: str
    url: str
    model: str
    head: VersionNote | None
    looked_s: float | None
    fault: Fault | None
    counts: Counts
    regions: list[RegionStatus]
    sent_bytes: int
    full_bytes: int
