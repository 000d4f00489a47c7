"""The tables that ``thinwire inspect`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.cli.output import NONE, percent, print_table, printable
from thinwire.cli.step_counts import StepCounts, octave_label
from thinwire.codec.api import Inspection
from thinwire.codec.container import TRAILER
from thinwire.codec.delta import TensorEntry
from thinwire.codec.dtypes import dtype_named

HEADINGS = ["tensor", "kind", "dtype", "shape", "codec", "changed %", "bytes", "bits/change"]
STEP_HEADINGS = ["up %", "1 step %", "2-3 %", "4 and more %"]
TEXT_COLUMNS = 5


def print_inspection(
    delta: Path,
    found: Inspection,
    steps: Mapping[str, StepCounts] | None,
    top: int | None = None,
) -> None:
    """Print everything; ``steps`` by tensor where a base was given, ``top`` tensors if not all."""
    print(
        f"{printable(str(delta))}: format {found.version}, {found.file_bytes:,} bytes, "
        f"{percent(found.file_bytes, found.raw_bytes)} % of {found.raw_bytes:,} raw "
        f"({index_bytes(found):,} are index and digests)\n"
    )
    _print_tensors(found, steps, top)
    _print_steps(found, steps)
    if found.attachments:
        rows = [
            [a.name, a.kind, f"{a.size:,}", f"{a.stored_bytes:,}" if a.is_carried else NONE]
            for a in found.attachments
        ]
        print('\nOther files; those without bytes in the delta equal the base\'s ("-"):')
        print_table(["file", "kind", "bytes", "in the delta"], rows, left=2)
    if found.tables:
        print("\nRate tables; each chunk names one and moves its rates up or down as a whole:")
        rows = [
            [
                f"{number} {table.dtype}",
                f"{table.top} and above",
                f"{_rate_percent(table.rate[0]):.4f}",
                f"{max(map(_rate_percent, table.rate)):.4f}",
            ]
            for number, table in enumerate(found.tables)
        ]
        print_table(["table", "first class: field", "its change %", "highest change %"], rows)


def index_bytes(found: Inspection) -> int:
    """Bytes of header, index and digests: what is before the sections."""
    attached_bytes = sum(attachment.stored_bytes for attachment in found.attachments)
    return found.file_bytes - _section_bytes(found) - attached_bytes - TRAILER.size


def word_count(entry: TensorEntry) -> int:
    """Words of a tensor: what is compared, coded and counted."""
    return entry.byte_count // dtype_named(entry.dtype).word_bytes


def groups_of(found: Inspection) -> list[list[TensorEntry]]:
    """The small tensors of each group."""
    members: list[list[TensorEntry]] = [[] for _ in found.group_bytes]
    for entry in found.tensors:
        if entry.group is not None:
            members[entry.group].append(entry)
    return members


def _rate_percent(code: int) -> float:
    """The change rate that a table's byte stands for: odds of 2**-((code - 56) / 8)."""
    odds: float = 2.0 ** ((56 - code) / 8)
    return 100 * odds / (1 + odds)


def _section_bytes(found: Inspection) -> int:
    """Payload bytes of all tensors."""
    return sum(entry.payload_bytes for entry in found.tensors) + sum(found.group_bytes)


def _largest(entries: Sequence[TensorEntry], top: int | None) -> Sequence[TensorEntry]:
    """The entries with the most payload bytes, largest first; for None all, in their order."""
    if top is None:
        return entries
    return sorted(entries, key=lambda entry: entry.payload_bytes, reverse=True)[:top]


def _print_tensors(
    found: Inspection, steps: Mapping[str, StepCounts] | None, top: int | None
) -> None:
    shown = _largest(found.tensors, top)
    headings = HEADINGS if steps is None else [*HEADINGS, *STEP_HEADINGS]
    rows = [
        [
            entry.name or "(the array)",
            entry.kind,
            entry.dtype,
            "x".join(map(str, entry.shape)) or "scalar",
            "+".join(entry.methods) or NONE,
            percent(entry.changed_count, word_count(entry)) if entry.kind == "delta" else NONE,
            f"{entry.payload_bytes:,}" if entry.group is None else f"group {entry.group}",
            _bits(entry.payload_bytes, entry.changed_count),
            *([] if steps is None else _step_cells(steps.get(entry.name))),
        ]
        for entry in shown
    ]
    if hidden_count := len(found.tensors) - len(shown):
        rest = f"... and {hidden_count} more tensor" + ("" if hidden_count == 1 else "s")
        rows.append([rest, *[""] * (len(headings) - 1)])
    for number, members in enumerate(groups_of(found)):
        changed_count = sum(entry.changed_count for entry in members)
        size = found.group_bytes[number]
        rows.append(
            [
                f"(group {number}: {_counted(members)})",
                "group",
                members[0].dtype if members else NONE,
                NONE,
                NONE,
                percent(changed_count, sum(map(word_count, members))),
                f"{size:,}",
                _bits(size, changed_count),
                *_sum_cells(steps, [entry.name for entry in members]),
            ]
        )
    section_bytes = _section_bytes(found)
    total = [
        f"total: {_counted(found.tensors)}",
        *[NONE] * (TEXT_COLUMNS - 1),
        percent(found.changed_count, found.word_count),
        f"{section_bytes:,}",
        _bits(section_bytes, found.changed_count),
        *_sum_cells(steps, [entry.name for entry in found.tensors]),
    ]
    print_table(headings, rows, total=total, left=TEXT_COLUMNS)


def _counted(entries: Sequence[TensorEntry]) -> str:
    return f"{len(entries)} tensor" + ("" if len(entries) == 1 else "s")


def _bits(byte_count: int, changed_count: int) -> str:
    return f"{8 * byte_count / changed_count:.2f}" if byte_count and changed_count else NONE


def _step_cells(counts: StepCounts | None) -> list[str]:
    if counts is None or not counts.total:
        return [NONE] * len(STEP_HEADINGS)
    parts = [sum(counts.up), counts.of_octaves(0, 1), counts.of_octaves(1, 2), counts.of_octaves(2)]
    return [percent(part, counts.total, digits=1) for part in parts]


def _sum_cells(steps: Mapping[str, StepCounts] | None, names: Sequence[str]) -> list[str]:
    if steps is None:
        return []
    return _step_cells(_summed([steps[name] for name in names if name in steps]))


def _summed(counts: Sequence[StepCounts]) -> StepCounts:
    def total(rows: Sequence[list[int]]) -> list[int]:
        octaves = max(map(len, rows), default=0)
        return [sum(row[octave] for row in rows if octave < len(row)) for octave in range(octaves)]

    return StepCounts(total([c.down for c in counts]), total([c.up for c in counts]))


def _print_steps(found: Inspection, steps: Mapping[str, StepCounts] | None) -> None:
    counts = StepCounts(*found.steps) if steps is None else _summed(list(steps.values()))
    if not counts.total:
        return
    print("\nSizes of the changes in steps, from one value to the next one of the dtype:")
    rows = []
    for octave in range(max(len(counts.down), len(counts.up))):
        down, up = (sum(row[octave : octave + 1]) for row in counts)
        share = percent(down + up, counts.total, digits=2)
        rows.append([octave_label(octave), f"{down:,}", f"{up:,}", share])
    print_table(["steps", "down", "up", "share %"], rows)
