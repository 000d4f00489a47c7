"""Writes the JSON Schemas of a stream's records beside this file: python docs/schema/make.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from thinwire.follow import Mark
from thinwire.stream.records import (
    FORMAT,
    Anchor,
    Catalog,
    Head,
    Lease,
    Manifest,
    Merge,
    Policy,
    StreamRecord,
)

# What is read from the bucket, by the name of its file here; a mark lies in a follower's folder.
RECORDS: dict[str, type[msgspec.Struct]] = {
    "stream": StreamRecord,
    "version": Manifest,
    "merge": Merge,
    "anchor": Anchor,
    "catalog": Catalog,
    "head": Head,
    "lease": Lease,
    "mark": Mark,
}
_TYPES = {cls.__name__: cls.TYPE for cls in (StreamRecord, Manifest, Merge, Anchor, Catalog)}
# Written with every field, so that it has one spelling too.
_WHOLE = {Policy.__name__}


def schema_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a record: what its fields are; docs/stream.md says what they may hold."""
    schema = msgspec.json.schema(cls)
    for name, definition in schema["$defs"].items():
        fields = definition["properties"]
        if "format" in fields:
            fields["format"] = {"const": FORMAT}
        if name in _TYPES:
            fields["type"] = {"const": _TYPES[name]}
        if name in _WHOLE:
            definition["required"] = list(fields)
            for field in fields.values():
                field.pop("default")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def files() -> dict[str, str]:
    """The text of each file."""
    return {
        f"{name}.json": json.dumps(schema_of(cls), indent=1, ensure_ascii=False) + "\n"
        for name, cls in RECORDS.items()
    }


if __name__ == "__main__":
    for name, text in files().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
