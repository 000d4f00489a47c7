"""What goes to stdout: one JSON object, or tables that suit a terminal or a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "-"


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object in ASCII."""
    # Contexts of errors may hold paths and the like.
    print(json.dumps(content, indent=1, default=str), flush=True)


def print_json_line(content: Mapping[str, Any]) -> None:
    """Print one JSON object in ASCII on one line, at once: one of several."""
    print(json.dumps(content, default=str), flush=True)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: Sequence[str] | None = None,
    left: int = 1,
) -> None:
    """Print a table: drawn on a terminal, aligned columns of plain text elsewhere.

    The first ``left`` columns hold text and are aligned to the left, the others to the right.
    ``total`` is a last row, set apart.
    """
    texts = [[printable(cell) for cell in row] for row in rows]
    last = None if total is None else [printable(cell) for cell in total]
    if sys.stdout.isatty():
        _print_drawn(headings, texts, last, left)
    else:
        _print_aligned(headings, texts if last is None else [*texts, last], left)


def printable(text: str) -> str:
    """The text with what is not printable escaped: names in a delta may hold control sequences."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def percent(part: float, whole: float, digits: int = 4) -> str:
    """A share in %, without the sign; "-" of nothing."""
    return f"{100 * part / whole:.{digits}f}" if whole else NONE


def duration(seconds: float) -> str:
    """A time for people, in its two largest units: ``2h 5m``."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def _print_drawn(
    headings: Sequence[str], rows: list[list[str]], total: list[str] | None, left: int
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        # Text keeps rich from reading a [bracket] in a name as markup.
        table.add_row(*(Text(cell) for cell in row))
    if total is not None:
        table.add_section()
        table.add_row(*(Text(cell) for cell in total))
    Console().print(table)


def _print_aligned(headings: Sequence[str], rows: list[list[str]], left: int) -> None:
    lines = [list(headings), *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(headings))]
    for line in lines:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    sys.stdout.flush()
