"""Whether a hosted deployment's next snapshot is full or incremental: decisions only, no I/O.

Fireworks and CoreWeave have one rule in common. An incremental snapshot is the difference from the
snapshot that the deployment serves, so it may follow only one that every replica has acknowledged,
of the same tensors and dtypes; and a full one comes first, after each failure, and from time to
time, so that a replica that starts anew has a short chain to walk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from thinwire.checkpoint.file_names import name_fault
from thinwire.errors import InvalidArgument

FULL_EVERY = 25
"""Every this many snapshots one is full. Fireworks advises 20 to 30."""

MAX_IDENTITY_CHARS = 128
"""The longest identity: CoreWeave's limit, the narrower of the two."""

Reason = Literal["first", "failure", "layout", "cadence", "incremental"]


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """What the next snapshot is.

    Attributes:
        identity: Its name, and its folder's in the bucket.
        base: The snapshot that it is the difference from (``previous_snapshot_identity``); None:
            it is full.
        layout: Of its tensors, as given.
        reason: Why it is what it is: "first" - nothing is acknowledged; "failure" - the one before
            may be half loaded; "layout" - dtypes, shapes or names changed; "cadence" - it is time
            for a full one; "incremental".
    """

    identity: str
    base: str | None
    layout: str
    reason: Reason

    @property
    def is_full(self) -> bool:
        """Whether it holds all weights."""
        return self.base is None


@dataclass(frozen=True, kw_only=True)
class SnapshotChain:
    """What a deployment is known to serve; kept by the sender, from one snapshot to the next.

    Attributes:
        acknowledged: The last snapshot that every replica served; empty: none is known.
        layout: Of its tensors: any text that differs where a name, dtype or shape does.
        deltas_since_full: Incremental snapshots since the last full one.
        has_failed: Whether something was sent after ``acknowledged`` that did not come to an end.
    """

    acknowledged: str = ""
    layout: str = ""
    deltas_since_full: int = 0
    has_failed: bool = False

    def plan(
        self,
        identity: str,
        layout: str,
        *,
        full_every: int = FULL_EVERY,
        max_deltas: int | None = None,
    ) -> SnapshotPlan:
        """Decide what the next snapshot is.

        Args:
            identity: Its name: one that was not used before.
            layout: Of its tensors.
            full_every: Every this many snapshots one is full; 1: all are.
            max_deltas: The longest chain that the deployment takes; None: as ``full_every`` says.

        Raises:
            InvalidArgument: The identity is no single path segment, or is the acknowledged one; or
                a number is out of range.
        """
        check_identity(identity)
        if identity == self.acknowledged:
            raise InvalidArgument(
                f"the identity {identity!r} is that of the snapshot served now",
                hint="Give every snapshot a new identity",
                identity=identity,
            )
        if full_every < 1 or (max_deltas is not None and max_deltas < 0):
            raise InvalidArgument(
                f"full_every is {full_every} and max_deltas {max_deltas}",
                hint="Give a full_every of at least 1 and a max_deltas of at least 0",
            )
        longest = full_every - 1 if max_deltas is None else min(full_every - 1, max_deltas)
        reason: Reason = "incremental"
        if not self.acknowledged:
            reason = "first"
        elif self.has_failed:
            reason = "failure"
        elif layout != self.layout:
            reason = "layout"
        elif self.deltas_since_full >= longest:
            reason = "cadence"
        base = self.acknowledged if reason == "incremental" else None
        return SnapshotPlan(identity=identity, base=base, layout=layout, reason=reason)

    def after(self, plan: SnapshotPlan) -> SnapshotChain:
        """What is known once every replica serves the plan's snapshot."""
        return SnapshotChain(
            acknowledged=plan.identity,
            layout=plan.layout,
            deltas_since_full=0 if plan.is_full else self.deltas_since_full + 1,
        )

    def after_failure(self) -> SnapshotChain:
        """What is known once a snapshot failed, or nobody knows whether it did."""
        return replace(self, has_failed=True)


def check_identity(identity: str) -> None:
    """Refuse what is no snapshot's name: it becomes a folder in a bucket and a part of URLs.

    Raises:
        InvalidArgument: As said.
    """
    fault = name_fault(identity)
    if fault is None and len(identity) > MAX_IDENTITY_CHARS:
        fault = f"is longer than {MAX_IDENTITY_CHARS} characters"
    if fault is None and (identity != identity.strip() or not identity.isprintable()):
        fault = "has a space at an end, or characters that cannot be printed"
    if fault is not None:
        raise InvalidArgument(
            f"the snapshot's identity {identity[:80]!r} {fault}",
            hint="Give one plain path segment, such as step-000123",
        )
