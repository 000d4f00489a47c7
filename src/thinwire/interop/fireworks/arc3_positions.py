"""Where elements changed, as an arc_v3 payload says it: rising positions, checked while read."""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.checkpoint.disk import ByteArray
from thinwire.errors import Truncated, Unsupported
from thinwire.interop.fireworks.arc3_fields import Fields, Numbers
from thinwire.interop.fireworks.layout import rows_of

CHUNK = 1 << 20
"""So many changes are worked on at once, in 64 bits; all of them are held in fewer."""

_WIDTHS = (1, 2, 4, 8)


def _number_type(limit: int) -> type[np.signedinteger[Any]]:
    """What holds numbers below a limit."""
    return np.int32 if limit < 1 << 31 else np.int64


def read_rising(fields: Fields, limit: int) -> Numbers:
    """Rising numbers below ``limit``, from the differences between them.

    Raises:
        FormatError: They do not rise, or go beyond the limit.
    """
    steps = fields.numbers(fields.number("count", limit))
    rising = np.empty(steps.size, _number_type(limit))
    _sum_steps(steps, rising, limit, fields)
    return rising


def _sum_steps(steps: Numbers, sums: Numbers, limit: int, fields: Fields) -> None:
    """Running sums of steps; the first may be none, each other must be one up."""
    reached = 0
    for start in range(0, steps.size, CHUNK):
        part = steps[start : start + CHUNK].astype(np.int64)
        _check_steps(part, np.zeros(int(start == 0), np.int64), limit, fields)
        part[0] += reached
        np.cumsum(part, out=part)
        # No step is larger than the limit, so a sum that wraps around was seen beyond it before.
        if int(part.min()) < 0 or int(part.max()) >= limit:
            raise fields.fault(f"a position lies beyond {limit}")
        reached = int(part[-1])
        sums[start : start + CHUNK] = part


def _check_steps(differences: Numbers, starts: Numbers, limit: int, fields: Fields) -> None:
    """Every difference but the first of a run must be a step up, and none beyond the limit."""
    is_wrong = differences < 1
    is_wrong[starts] = differences[starts] < 0
    if is_wrong.any() or (differences >= max(limit, 1)).any():
        raise fields.fault("positions do not rise, or lie beyond the tensor")


def read_indices(fields: Fields, word_count: int, shape: tuple[int, ...]) -> Numbers:
    """The positions of all changes, rising, in either of the two ways that they are written.

    Raises:
        FormatError: They do not rise, or leave the tensor, or are not as many as is said.
    """
    kind = fields.text("kind") if "kind" in fields.table else "flat"
    if kind == "flat":
        return read_rising(fields, word_count)
    if kind != "row":
        raise fields.fault(f"its indices are of the kind {kind[:40]!r}", Unsupported)
    row_count, row_width = rows_of(shape)
    if (fields.number("n_rows", row_count), fields.number("row_width", row_width)) != (
        row_count,
        row_width,
    ):
        raise fields.fault(f"its rows are not the {row_count} of {row_width} that its shape has")
    return _read_rows(fields, row_count, row_width)


def _read_rows(fields: Fields, row_count: int, row_width: int) -> Numbers:
    width, data = fields.item_bytes("count_dtype"), fields.data("data")
    at = row_count * width
    if data.size < at:
        raise fields.fault("its indices end among the rows' counts", Truncated)
    counts = data[:at].view(f"<u{width}")
    if (counts > row_width).any():
        raise fields.fault(f"a row of {row_width} elements has more changes than that")
    rows = np.flatnonzero(counts).astype(_number_type(row_count))
    lengths = counts[rows].astype(_number_type(row_width + 1))
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.empty(int(ends[-1]) if rows.size else 0, _number_type(row_count * row_width))
    first = 0
    while first < rows.size:
        start = int(ends[first] - lengths[first])
        # As many whole rows as are worked on at once, or one larger row.
        last = max(int(np.searchsorted(ends, start + CHUNK, "right")), first + 1)
        out = positions[start : int(ends[last - 1])]
        at = _read_row_group(
            fields, data, at, rows[first:last], lengths[first:last], row_width, out
        )
        first = last
    if at != data.size:
        raise fields.fault(f"its indices take {at} bytes of {data.size}")
    return positions


def _read_row_group(
    fields: Fields,
    data: ByteArray,
    at: int,
    rows: Numbers,
    lengths: Numbers,
    row_width: int,
    positions: Numbers,
) -> int:
    """The positions of the changes in some rows; returns where the next row's numbers begin."""
    # Only what lies before a row says where it is, so its widths are found one by one.
    widths = np.empty(rows.size, np.int64)
    heads = np.empty(rows.size, np.int64)
    raw = data.data
    for number, length in enumerate(lengths.tolist()):
        if at >= len(raw) or raw[at] not in _WIDTHS:
            raise fields.fault("its indices end early, or a row's numbers have no known width")
        widths[number] = raw[at]
        heads[number] = at + 1
        at += 1 + length * raw[at]
        if at > len(raw):
            raise fields.fault(f"its indices take {at} bytes of {len(raw)}")
    if rows.size == 1:
        steps = data[int(heads[0]) : at].view(f"<u{int(widths[0])}")
        _sum_steps(steps, positions, row_width, fields)
        positions += int(rows[0]) * row_width
        return at
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    width_of = np.repeat(widths, lengths)
    places = np.arange(width_of.size) * width_of + np.repeat(heads - starts * widths, lengths)
    differences = np.zeros(width_of.size, np.int64)
    for number in range(int(widths.max())):
        has_byte = width_of > number
        differences[has_byte] |= data[places[has_byte] + number].astype(np.int64) << (8 * number)
    _check_steps(differences, starts, row_width, fields)
    running = np.cumsum(differences)
    columns = running - np.repeat(running[starts] - differences[starts], lengths)
    if int(columns.min()) < 0 or int(columns.max()) >= row_width:
        raise fields.fault(f"a position lies beyond a row of {row_width}")
    positions[:] = columns + np.repeat(rows.astype(np.int64) * row_width, lengths)
    return at
