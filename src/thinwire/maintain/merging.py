"""Merged deltas: one object for what many step deltas did.

A delta is coded given its base, so merging without the base's weights is not possible: the versions
at both ends are rebuilt, and the one is diffed against the other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from thinwire.checkpoint.diff import collect_attachments, pair_tensors
from thinwire.errors import AlreadyExists, NotFound
from thinwire.follow import Mark, Stream
from thinwire.follow.steps import Outcome
from thinwire.maintain.trails import Trail
from thinwire.maintain.upload import put_files, shard_keys, write_shards
from thinwire.stream import keys
from thinwire.stream.encoding import encode, seal
from thinwire.stream.records import FORMAT, Merge


def due_merges(
    first: int,
    head: int,
    steps_from: int,
    levels: Collection[int],
    existing: Collection[tuple[int, int]],
) -> list[tuple[int, int]]:
    """The merged deltas that a lineage should have and has not, in the order to make them.

    A level of n has merges from first to first + n, on to first + 2 n, and so on.
    """
    due = []
    for level in levels:
        begin = first + -(-max(0, steps_from - first) // level) * level
        due += [(base, base + level) for base in range(begin, head - level + 1, level)]
    missing = [pair for pair in due if pair not in existing]
    # By their end; the narrow ones first, because the wide ones are then cheaper to get to.
    return sorted(missing, key=lambda pair: (pair[1], pair[1] - pair[0]))


def make_merge(
    stream: Stream,
    old: Trail,
    new: Trail,
    give_way: Callable[[], None],
    *,
    workers: int,
) -> Merge | None:
    """Make the merged delta between the versions that two copies hold; moves the old one on.

    Returns:
        The merged delta; None where another maintainer had made it meanwhile.

    Raises:
        ThinwireError: Nothing was made.
    """
    begin, end = _mark_of(old), _mark_of(new)
    base, target = old.sink.checkpoint(), new.sink.checkpoint()
    session = secrets.token_hex(16)
    shards = write_shards(
        old.sink.scratch(),
        pair_tensors(base, target),
        collect_attachments(base, target),
        spec=None,
        workers=workers,
        on_bytes=lambda _: give_way(),
    )
    try:
        with shards.open() as delta:
            outcome = Outcome.of_delta(delta)
            is_right = (outcome.weights, outcome.layout) == (end.weights, end.layout)
            if not is_right or not outcome.starts_from(begin.weights):
                # Someone changed a copy: mended here, made next time.
                old.follower.prove()
                new.follower.prove()
                return None
            merge = Merge(
                format=FORMAT,
                type=Merge.TYPE,
                stream=end.stream,
                created_ms=time.time_ns() // 1_000_000,
                lineage=end.lineage,
                session=session,
                base=begin.link,
                target=end.link,
                weights=end.weights,
                layout=end.layout,
                shards=shards.records,
            )
            merge, data = seal(merge, stream.signing_key)
            is_ours = _commit(stream, merge, data, shards.paths)
            old.sink.apply(delta, end)
    finally:
        shards.remove()
    return merge if is_ours else None


def _commit(stream: Stream, merge: Merge, data: bytes, paths: list[Path]) -> bool:
    base, version = merge.base.version, merge.target.version
    names = shard_keys(merge.lineage, base, version, merge.session, merge.shards)
    put_files(stream.store, list(zip(names, paths, strict=True)))
    try:
        stream.store.put_if_absent(keys.merge(merge.lineage, base, version), data)
    except AlreadyExists:
        found = stream.merge(merge.lineage, base, version)
        if found is None or encode(found) != data:
            stream.store.delete(names)
            return False
    keep_if_whole(stream, keys.merge(merge.lineage, base, version), names)
    return True


def keep_if_whole(stream: Stream, manifest: str, names: Sequence[str]) -> None:
    """Take a manifest back if what it names was taken for orphans before it was committed.

    That happens to a maintainer that was suspended for longer than the policy's ``grace_s``.

    Raises:
        NotFound: It was so.
    """
    try:
        for name in names:
            stream.store.get_range(name, 0, 0)
    except NotFound:
        stream.store.delete([manifest])
        raise


def _mark_of(trail: Trail) -> Mark:
    mark = trail.sink.mark()
    assert mark is not None
    return mark
