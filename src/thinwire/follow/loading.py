"""A step's delta from the store: fetched, opened, its weights checked against the manifest."""

from __future__ import annotations

import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

from thinwire.codec.container import HEADER, Head
from thinwire.codec.delta import Delta
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.selection import head_bytes, needed_ranges, parse_partial_head
from thinwire.errors import LimitExceeded, Unavailable
from thinwire.follow.fetch import Fetcher, Wanted
from thinwire.follow.selection import Selection, is_held
from thinwire.follow.steps import Outcome, Step, check_outcome
from thinwire.stream.blocks import blocks_of

# What is left free on the disk.
_SPARE_BYTES = 64 << 20


def check_room(folder: Path, needed_bytes: int, limit_bytes: int | None, what: str) -> None:
    """Refuse to fetch more than a version can reasonably need, or than the disk can hold.

    Raises:
        LimitExceeded: More than ``limit_bytes``.
        Unavailable: More than is free.
    """
    if limit_bytes is not None and needed_bytes > limit_bytes:
        raise LimitExceeded(
            f"{what} names {needed_bytes} bytes to fetch; at most {limit_bytes} can be meant",
            hint="Do not trust it: a delta is never much larger than the model",
        )
    free = shutil.disk_usage(folder).free
    if needed_bytes + _SPARE_BYTES > free:
        raise Unavailable(
            f"{what} needs {needed_bytes} bytes in {folder} and {_SPARE_BYTES} to spare, where "
            f"{free} are free",
            hint="Free some space",
        )


def load_delta(
    step: Step,
    fetcher: Fetcher,
    scratch: Path,
    *,
    base_weights: str | None,
    selection: Selection,
) -> DeltaSet:
    """Fetch the shards of a step and open them.

    Args:
        step: What to fetch.
        fetcher: How.
        scratch: A folder for what is too large for memory; files are unlinked once mapped.
        base_weights: The digest of the weights that it is going to be applied to.
        selection: The tensors that are wanted: only the blocks that they need are fetched.

    Raises:
        FormatError: A shard is not what the manifest says.
        StoreError: It cannot be fetched.
    """
    with ExitStack() as stack:
        if selection.is_all:
            opened = [stack.enter_context(_open_whole(w, fetcher, scratch)) for w in step.shards]
            deltas = DeltaSet(opened)
            outcome = Outcome.of_delta(deltas)
        else:
            heads = []
            opened = []
            for wanted in step.shards:
                head, delta = _open_part(wanted, fetcher, scratch, selection)
                heads.append(head)
                opened.append(stack.enter_context(delta))
            deltas = DeltaSet(opened)
            outcome = Outcome.of_heads(heads)
        check_outcome(outcome, step, base_weights)
        stack.pop_all()
    return deltas


def _open_whole(wanted: Wanted, fetcher: Fetcher, scratch: Path) -> Delta:
    if fetcher.is_small(wanted.record):
        return Delta.open(fetcher.bytes_of(wanted))
    path = scratch / secrets.token_hex(8)
    try:
        fetcher.into_file(wanted, path)
        return Delta.open(path)
    finally:
        path.unlink(missing_ok=True)


def _open_part(
    wanted: Wanted, fetcher: Fetcher, scratch: Path, selection: Selection
) -> tuple[Head, Delta]:
    path = scratch / secrets.token_hex(8)
    record = wanted.record
    fetched: set[int] = set()

    def fetch(ranges: list[tuple[int, int]]) -> None:
        missing = set(blocks_of(record, ranges)) - fetched
        fetcher.into_file(wanted, path, missing)
        fetched.update(missing)

    def first(count: int) -> bytes:
        fetch([(0, min(count, record.size))])
        with path.open("rb") as file:
            return file.read(count)

    try:
        head = parse_partial_head(first(head_bytes(first(HEADER.size))), record.size)
        tensors = head.index.tensors
        chosen = [t.name for t in tensors if is_held(t.name, t.dtype, t.shape, selection)]
        names, ranges = needed_ranges(head, chosen)
        fetch(ranges)
        return head, Delta.open(path, only=names, check_trailer=False)
    finally:
        path.unlink(missing_ok=True)
