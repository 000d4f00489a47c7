"""The sample's parts, and containers made of them with an index that someone changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from .sample_delta import PAYLOAD
from .writer import pack, unpack

PARTS = unpack(PAYLOAD)
Change = Callable[[dict[str, Any]], None]


def number_of(name: str) -> int:
    """Where a tensor stands in the index."""
    return [tensor["name"] for tensor in PARTS.index["tensors"]].index(name)


def tensor(name: str, /, **fields: Any) -> Change:
    """A change of some fields of one tensor; None removes a field."""

    def change(index: dict[str, Any]) -> None:
        record = index["tensors"][number_of(name)]
        record.update(fields)
        for field in [field for field, value in fields.items() if value is None]:
            del record[field]

    return change


def entry(where: str, number: int, /, **fields: Any) -> Change:
    """A change of some fields of one table, group or attachment."""
    return lambda index: index[where][number].update(fields)


def rebuilt(change: Change) -> bytes:
    """The sample with another index."""
    index = copy.deepcopy(PARTS.index)
    change(index)
    return pack(index, PARTS.digests, PARTS.sections)


def repacked(**options: Any) -> bytes:
    """The sample with another header."""
    return pack(*PARTS, **options)


TABLE = {"dtype": "BF16", "top": 0, "rate": [0] * 32, "one": [0] * 32}
