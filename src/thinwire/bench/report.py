"""What a bench run found, as plain frozen records that turn into JSON.

Units: ``percent`` is of the raw bytes of the new checkpoint; ``mb_s`` is a million raw bytes (not
payload bytes) a second. ``cpu`` speeds divide by the CPU seconds of all threads of the process, so
they are per core whatever a peer starts and whatever else the machine does; ``wall`` by the clock.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

BOUND_ROW = "class-conditional bound"
MEMCPY_ROW = "memcpy"
REFERENCE_ROW = "arc_v3"
OUR_ROW = "thinwire"


@dataclass(frozen=True)
class Speed:
    """Medians over all repetitions of all steps."""

    cpu_mb_s: float
    wall_mb_s: float


@dataclass(frozen=True)
class Row:
    """One format, means over the steps; None where a column does not apply.

    ``payload_percent`` leaves out the file's framing where the peer's class says so;
    ``file_percent`` counts every byte, ``section_percent`` only the coded weights, where the peer
    can tell. ``times_reference`` is the payload over arc_v3's.
    """

    name: str
    payload_percent: float | None = None
    file_percent: float | None = None
    bits_per_change: float | None = None
    times_reference: float | None = None
    encode: Speed | None = None
    decode: Speed | None = None
    decode_into: Speed | None = None
    step_payload_bytes: tuple[int, ...] = ()
    section_percent: float | None = None


@dataclass(frozen=True)
class BoundParts:
    """The class-conditional bound's parts, in % of raw, means over the steps."""

    positions_percent: float
    direction_percent: float
    size_percent: float


@dataclass(frozen=True)
class Report:
    """One bench run. ``rows`` start with the bound and end with memcpy.

    ``skipped`` maps the rows that could not be made to the reason; ``notes`` says of others what a
    reader must know.
    """

    rows: tuple[Row, ...]
    bound: BoundParts
    step_count: int
    tensor_count: int
    raw_bytes: int
    changed_percent: float
    repetition_count: int
    machine: dict[str, str]
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def row(self, name: str) -> Row:
        """The row of that name. Raises KeyError when there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def to_json(self) -> str:
        """The whole report as one JSON object, with the field names as keys."""
        return json.dumps(dataclasses.asdict(self), indent=1)
