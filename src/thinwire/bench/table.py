"""Render a report: for a terminal (rich) and as Markdown, from the same cells."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from thinwire.bench.report import Report, Row, Speed

HEADINGS = (
    "row",
    "payload % of raw",
    "bits per change",
    "encode MB/s",
    "decode MB/s",
    "decode_into MB/s",
    "times arc_v3",
)

_NONE = "-"


def cells(report: Report) -> list[tuple[str, ...]]:
    """One tuple of texts per row, in the order of HEADINGS. Speeds are per core."""
    return [_row_cells(row) for row in report.rows]


def used_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the columns where some row has something to say, and the first."""
    return used_columns(HEADINGS, cells(report))


def used_columns(
    headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The table without columns that are empty, the first one apart."""
    columns = [
        column
        for column in range(len(headings))
        if column == 0 or any(row[column] != _NONE for row in rows)
    ]
    return [headings[column] for column in columns], [[row[c] for c in columns] for row in rows]


def caption(report: Report) -> str:
    """What the numbers are of, in one sentence a line."""
    steps = "step" if report.step_count == 1 else "steps"
    lines = [
        f"Mean over {report.step_count} {steps} of {report.tensor_count} tensors, "
        f"{report.raw_bytes / 1e6:.1f} MB raw, {report.changed_percent:.3f} % changed.",
        "MB/s: raw megabytes a CPU second, all threads counted; "
        f"median of {report.repetition_count} a step.",
        f"Bound: positions {report.bound.positions_percent:.4f}, "
        f"direction {report.bound.direction_percent:.4f}, "
        f"size {report.bound.size_percent:.4f} % of raw.",
    ]
    unframed = [
        row.name
        for row in report.rows
        if row.file_percent and row.file_percent != row.payload_percent
    ]
    if unframed:
        lines.append(f"File headers are not counted for {', '.join(unframed)}; all else is.")
    lines += [f"Row {name} is {note}." for name, note in report.notes.items()]
    lines += [f"No row {name}: {reason}" for name, reason in report.skipped.items()]
    return "\n".join(lines)


def to_rich(report: Report) -> Table:
    """A table for a terminal; rich.print() shows it."""
    # Text keeps rich from reading a [bracket] of a name or reason as markup.
    table = Table(caption=Text(caption(report)), caption_justify="left")
    headings, rows = used_cells(report)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column == 0 else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def to_markdown(report: Report) -> str:
    """A Markdown table with its caption below; ends with a newline."""
    table = markdown_table(*used_cells(report))
    return table + "\n" + "  \n".join(caption(report).splitlines()) + "\n"


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left; ends with a newline."""
    lines = [
        _markdown_line(headings),
        _markdown_line(["---" if column == 0 else "---:" for column in range(len(headings))]),
        *(_markdown_line(row) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _row_cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        _number(row.payload_percent, 4),
        _number(row.bits_per_change, 2),
        _speed(row.encode),
        _speed(row.decode),
        _speed(row.decode_into),
        _number(row.times_reference, 3),
    )


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _speed(speed: Speed | None) -> str:
    return _NONE if speed is None else f"{speed.cpu_mb_s:.0f}"


def _markdown_line(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
