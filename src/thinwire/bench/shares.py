"""Rows against the limits: bytes over the bound, speeds over memcpy's and arc_v3's."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.bench.report import BOUND_ROW, MEMCPY_ROW, REFERENCE_ROW, Report, Row, Speed
from thinwire.bench.table import used_columns

HEADINGS = (
    "row",
    "payload / bound",
    "sections / bound",
    "encode / memcpy",
    "decode / memcpy",
    "decode_into / memcpy",
    "encode / arc_v3",
    "decode / arc_v3",
)


@dataclass(frozen=True)
class Shares:
    """One row's ratios; None where a side is missing.

    ``section_of_bound`` counts the coded weights alone, without index and digests. Speeds are raw
    bytes a CPU second, so they are per core.
    """

    name: str
    payload_of_bound: float | None
    section_of_bound: float | None
    encode_of_memcpy: float | None
    decode_of_memcpy: float | None
    decode_into_of_memcpy: float | None
    encode_of_reference: float | None
    decode_of_reference: float | None


def shares_of(report: Report) -> list[Shares]:
    """The ratios of every row that is not itself a limit."""
    rows = {row.name: row for row in report.rows}
    bound, memcpy = rows[BOUND_ROW], rows[MEMCPY_ROW]
    reference = rows.get(REFERENCE_ROW, Row(REFERENCE_ROW))
    return [
        Shares(
            name=row.name,
            payload_of_bound=_ratio(row.payload_percent, bound.payload_percent),
            section_of_bound=_ratio(row.section_percent, bound.payload_percent),
            encode_of_memcpy=_ratio(_rate(row.encode), _rate(memcpy.encode)),
            decode_of_memcpy=_ratio(_rate(row.decode), _rate(memcpy.decode)),
            decode_into_of_memcpy=_ratio(_rate(row.decode_into), _rate(memcpy.decode)),
            encode_of_reference=_ratio(_rate(row.encode), _rate(reference.encode)),
            decode_of_reference=_ratio(_rate(row.decode), _rate(reference.decode)),
        )
        for row in report.rows
        if row.name not in (BOUND_ROW, MEMCPY_ROW)
    ]


def share_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table of ratios, without empty columns."""
    rows = [
        [
            shares.name,
            _text(shares.payload_of_bound, 3),
            _text(shares.section_of_bound, 3),
            _text(shares.encode_of_memcpy, 3),
            _text(shares.decode_of_memcpy, 3),
            _text(shares.decode_into_of_memcpy, 3),
            _text(shares.encode_of_reference, 1),
            _text(shares.decode_of_reference, 1),
        ]
        for shares in shares_of(report)
    ]
    return used_columns(HEADINGS, rows)


def _rate(speed: Speed | None) -> float | None:
    return None if speed is None else speed.cpu_mb_s


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
