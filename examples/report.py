"""The end of the example: the proof, the rewards, and the table of bytes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from digests import digest_of, load_folder

import thinwire
from thinwire.bench import Checkpoint, CheckpointPeer, MissingExtraError, make_peer, read_checkpoint

if TYPE_CHECKING:
    from grpo import StepRecord

COLUMNS = {
    "step": 4,
    "reward": 6,
    "staleness": 9,
    "changed %": 9,
    "bytes": 11,
    "of full": 8,
    "arc_v3": 11,
    "of arc_v3": 9,
    "rebuilt": 7,
}


@dataclass(frozen=True)
class Rebuilt:
    """A version, as a machine that knows only the store made it; `arc_bytes` 0: not measured."""

    version: thinwire.Version
    digest: str
    arc_bytes: int


@dataclass(frozen=True)
class Row:
    """A step of the closing table."""

    step: int
    reward: float
    staleness: int
    ratio: float
    publish_s: float
    refresh_s: float
    changed_percent: float
    payload_bytes: int
    raw_bytes: int
    arc_bytes: int
    is_equal: bool


def closing_report(
    records: Sequence[StepRecord], url: str, folder: Path, json_path: Path | None
) -> bool:
    """Print it; returns whether everything that was compared is equal.

    Args:
        records: Of every step; the first is of the weights that the run began with.
        url: The stream.
        folder: Where every version is rebuilt.
        json_path: Where the rows are written, if anywhere.
    """
    digests = {record.step: record.digest for record in records}
    is_sampled_right = prove_sampled(records, digests)
    print("Rebuilding every version from the store, and coding it as arc_v3 ...", flush=True)
    rebuilt = {found.version.step: found for found in rebuild(url, folder, make_arc())}
    is_complete = rebuilt.keys() == digests.keys()
    rows = [row_of(record, rebuilt[record.step]) for record in records[1:]] if is_complete else []
    is_rebuilt_right = is_complete and all(
        rebuilt[step].digest == digest for step, digest in digests.items()
    )
    print_table(rows)
    print(
        f"every version rebuilt from the store equals the trainer's weights of its step: "
        f"{'yes' if is_rebuilt_right else 'NO'} ({len(rebuilt)} of {len(records)} rebuilt)"
    )
    print_sums(rows)
    print_rewards([record.reward for record in records[1:]])
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return is_sampled_right and is_rebuilt_right


def prove_sampled(records: Sequence[StepRecord], digests: dict[int, str]) -> bool:
    """Compare what the sampler's module held, batch by batch, with what the trainer had."""
    batches = [record.batch for record in records[1:]]
    wrong = [batch for batch in batches if digests.get(batch["step"]) != batch["digest"]]
    for batch in wrong:
        print(f"batch {batch['batch']}, version {batch['version']}: NOT the weights of its step")
    used = {batch["version"] for batch in batches}
    print(
        f"\n{len(batches)} batches were sampled with {len(used)} versions; the BF16 bits in the "
        f"sampler equal the trainer's of that step: {'NO' if wrong else 'yes'} "
        f"({len(batches) - len(wrong)} of {len(batches)}, BLAKE3)",
        flush=True,
    )
    return not wrong


def make_arc() -> CheckpointPeer | None:
    """arc_v3, by Fireworks' own package; None where it is not installed."""
    try:
        return make_peer("arc_v3")
    except MissingExtraError as error:
        print(f"arc_v3 is NOT MEASURED: {error}")
        return None


def rebuild(url: str, folder: Path, arc: CheckpointPeer | None) -> Iterator[Rebuilt]:
    """Go from version to version, from the first to the last."""
    base: Checkpoint | None = None
    with thinwire.Follower(url, folder) as follower:
        head = follower.stream.tip().head
        for number in range(1, 1 + (0 if head is None else head.version)):
            version = follower.catch_up(number)
            digest = digest_of(load_folder(folder).items())
            new = checkpoint_in(folder) if arc is not None else None
            arc_bytes = 0
            if arc is not None and base is not None and new is not None:
                payload = arc.encode(base, new)
                # The header with names and checksums is left out, in its favour.
                arc_bytes = len(payload) - arc.framing_bytes(payload)
            base = new
            yield Rebuilt(version, digest, arc_bytes)


def checkpoint_in(folder: Path) -> Checkpoint:
    """A copy in memory: the folder's files change in place."""
    found = read_checkpoint(folder)
    return {name: tensor._replace(words=tensor.words.copy()) for name, tensor in found.items()}


def row_of(record: StepRecord, rebuilt: Rebuilt) -> Row:
    """A step of the run, and the version that came of it."""
    version = rebuilt.version
    return Row(
        step=record.step,
        reward=record.reward,
        staleness=record.staleness,
        ratio=record.ratio,
        publish_s=record.publish_s,
        refresh_s=record.batch["refresh_s"],
        changed_percent=100 * version.changed_count / version.word_count,
        payload_bytes=version.payload_bytes,
        raw_bytes=version.raw_bytes,
        arc_bytes=rebuilt.arc_bytes,
        is_equal=rebuilt.digest == record.digest,
    )


def print_table(rows: Sequence[Row]) -> None:
    """A line for each step."""
    print_cells(COLUMNS)
    print_cells("-" * width for width in COLUMNS.values())
    for row in rows:
        cells = (
            str(row.step),
            f"{row.reward:.3f}",
            str(row.staleness),
            f"{row.changed_percent:.3f}",
            f"{row.payload_bytes:,}",
            f"1/{row.raw_bytes / row.payload_bytes:.1f}",
            f"{row.arc_bytes:,}" if row.arc_bytes else "-",
            f"{row.payload_bytes / row.arc_bytes:.3f}" if row.arc_bytes else "-",
            "equal" if row.is_equal else "NO",
        )
        print_cells(cells)


def print_cells(cells: Iterable[str]) -> None:
    """One line of the table."""
    line = (cell.rjust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True))
    print("  ".join(line), flush=True)


def print_sums(rows: Sequence[Row]) -> None:
    """What all steps came to."""
    ours = sum(row.payload_bytes for row in rows)
    full = sum(row.raw_bytes for row in rows)
    arcs = sum(row.arc_bytes for row in rows)
    if not rows:
        return
    line = f"all steps: {ours:,} bytes; as full weights {full:,} ({full / ours:.1f} times as many)"
    if arcs:
        line += f"; as arc_v3 {arcs:,} ({arcs / ours:.2f} times as many)"
    print(line)
    blocked = statistics.median(row.publish_s for row in rows)
    refreshed = statistics.median(row.refresh_s for row in rows)
    print(
        f"publish() held up the trainer for {blocked:.3f} s a step; the sampler took "
        f"{refreshed:.3f} s to be at the newest version before a batch (medians)"
    )
    ages = [row.staleness for row in rows]
    print(f"staleness: {statistics.fmean(ages):.2f} versions on average, {max(ages)} at most")


def print_rewards(rewards: Sequence[float]) -> None:
    """The mean of the first third against that of the last."""
    third = max(1, len(rewards) // 3)
    first, last = statistics.fmean(rewards[:third]), statistics.fmean(rewards[-third:])
    print(
        f"reward: {first:.3f} over the first {third} steps, {last:.3f} over the last {third}: "
        f"{'it rose' if last > first else 'it did NOT rise'}"
    )
