"""JSON as safetensors headers and indexes need it: UTF-8, and no key twice."""

from __future__ import annotations

import json
from typing import Any


def parse_object(text: bytes) -> dict[str, Any]:
    """The table in ``text``.

    Raises:
        ValueError: It is not JSON in UTF-8, not a table, nested too deeply, or has a key twice.
    """
    try:
        # Decoded here: json.loads would guess UTF-16 from the bytes.
        fields = json.loads(text.decode(), object_pairs_hook=_distinct_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a table")  # noqa: TRY004 - documented as ValueError
    return fields


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key[:80]!r} appears twice")
        fields[key] = value
    return fields
