"""How ranks go on from the head of a stream: each takes its baseline from a copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.checkpoint import Checkpoint
from thinwire.codec.digest import tensor_digest
from thinwire.codec.write import SameTensor
from thinwire.errors import TensorMismatch
from thinwire.follow import Follower, Stream
from thinwire.follow.reference import check_content, local_copy
from thinwire.publish.attempt import Carried
from thinwire.publish.baseline import Baseline, check_same
from thinwire.publish.meeting import on_all
from thinwire.publish.ranks import Ranks
from thinwire.publish.settings import Settings
from thinwire.publish.source import kept_attachments
from thinwire.publish.units import Plan
from thinwire.stream.records import Link, Manifest


def resume(
    stream: Stream,
    ranks: Ranks,
    hosts: Sequence[str],
    lineage: str,
    link: Link,
    baseline: Baseline,
    folder: Path,
    settings: Settings,
) -> tuple[Manifest, Carried]:
    """Fill the baseline from a copy of the head, of which each host makes one.

    Args:
        stream: The stream.
        ranks: The line to the other ranks, all of which do this.
        hosts: Where each rank runs.
        lineage: The head's.
        link: The head.
        baseline: This rank's.
        folder: This rank's scratch; the copy is kept in that of a host's first rank.
        settings: What the trainer asks for.

    Returns:
        The head, and on rank 0 what its deltas carry besides the trainer's tensors.

    Raises:
        ThinwireError: On every rank, whichever it was that failed.
    """
    first = hosts.index(hosts[ranks.rank])

    def prepare() -> tuple[Manifest, str]:
        manifest = stream.require(lineage, link)
        is_first = first == ranks.rank
        return manifest, str(_copy_of(manifest, stream, folder, settings)) if is_first else ""

    def fill() -> Carried:
        checkpoint = Checkpoint.open(path, ignore_subfolders=True)
        kept = check_copy(baseline.plan, settings, checkpoint)
        baseline.fill(checkpoint)
        baseline.digest_owned()
        return _carried(checkpoint, kept) if ranks.rank == 0 else Carried()

    manifest, own = on_all(ranks, prepare)
    path = ranks.share(own.encode())[first].decode()
    return manifest, on_all(ranks, fill)


def check_copy(plan: Plan, settings: Settings, checkpoint: Checkpoint) -> list[str]:
    """Raise unless a checkpoint is of the trainer's model; returns what the trainer lacks.

    Raises:
        TensorMismatch: It is not.
    """
    check_same(plan, checkpoint)
    published = {spread.name for spread in plan.spreads}
    kept = [name for name in checkpoint.tensors if name not in published]
    for name in kept:
        if not settings.may_lack(name):
            raise TensorMismatch(
                f"tensor {name!r} of the stream is not published here",
                hint="Publish all tensors, or leave it out on purpose with exclude=[...]: then "
                "it stays as it is. Names are mapped with rename=",
                tensor=name,
            )
    return kept


def _copy_of(manifest: Manifest, stream: Stream, folder: Path, settings: Settings) -> Path:
    """A folder on this host that holds a version, proved."""
    copy = settings.copy_folder()
    if manifest.kind == "reference" and manifest.source is not None:
        path = local_copy(manifest.source, copy)
        check_content(Checkpoint.open(path, ignore_subfolders=True), manifest.content)
        return path
    head = folder / "head"
    with Follower(stream, head, base=copy, accept_new_lineages=True, lease=False) as follower:
        follower.check_known()
        follower.bring_to(manifest)
        follower.prove()
    return head


def _carried(checkpoint: Checkpoint, kept: Sequence[str]) -> Carried:
    tensors = [(name, checkpoint.tensors[name]) for name in kept]
    same = [
        SameTensor(name, t.dtype, tuple(t.shape), tensor_digest(t.dtype, t.data))
        for name, t in tensors
    ]
    return Carried(same, kept_attachments(checkpoint))
