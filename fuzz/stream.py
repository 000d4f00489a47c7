"""Target `manifest`: every JSON object of a stream, and what a follower makes of it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec

from fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from fuzz.target import Target, require
from thinwire.errors import ThinwireError
from thinwire.follow.sink import Mark
from thinwire.follow.steps import step_of_anchor, step_of_merge, step_of_version
from thinwire.store.store import check_key
from thinwire.stream.blocks import ObjectRecord
from thinwire.stream.encoding import encode, parse, parse_hint, sign
from thinwire.stream.records import (
    Anchor,
    AnchorHint,
    Catalog,
    FileRecord,
    Head,
    Lease,
    Link,
    Manifest,
    Merge,
    MergeHint,
    Policy,
    Retired,
    Source,
    StreamRecord,
)
from thinwire.stream.signing import SigningKey
from thinwire.stream.version import Version

_ID = "0123456789abcdef" * 2
_DIGEST = "ab" * 32
_LINK = Link(6, _DIGEST)
_OBJECT = ObjectRecord(300_000, 1 << 18, [_DIGEST, "cd" * 32])
_FILE = FileRecord(size=10, block=1 << 18, blocks=[_DIGEST], name="config.json")
_SAME: dict[str, Any] = {"format": 1, "stream": _ID, "created_ms": 1_700_000_000_000}
_PLACE: dict[str, Any] = {**_SAME, "lineage": _ID, "session": _ID}
_VERSION: dict[str, Any] = {
    **_PLACE,
    "type": "version",
    "first": 1,
    "weights": _DIGEST,
    "layout": _DIGEST,
}


def _seeds() -> dict[str, bytes]:
    merge = Merge(
        type="merge",
        base=Link(2, _DIGEST),
        target=_LINK,
        weights=_DIGEST,
        layout=_DIGEST,
        shards=[_OBJECT],
        **_PLACE,
    )
    source = Source("huggingface", "org/name", "0" * 40)
    records: dict[str, msgspec.Struct] = {
        "stream": StreamRecord(type="stream", lineage=_ID, model="m", policy=Policy(), **_SAME),
        "delta": Manifest(
            kind="delta",
            version=7,
            base=_LINK,
            step=70,
            shards=[_OBJECT],
            metadata={"reward": 0.5, "tags": ["a", None, True]},
            **_VERSION,
        ),
        "anchor-version": Manifest(kind="anchor", version=1, files=[_FILE], **_VERSION),
        "reference": Manifest(
            kind="reference",
            version=1,
            shards=[_OBJECT],
            source=source,
            content=_DIGEST,
            **_VERSION,
        ),
        "end": Manifest(kind="end", version=7, base=_LINK, successor="f" * 32, **_VERSION),
        "merge": merge,
        "anchor": Anchor(
            type="anchor", target=_LINK, weights=_DIGEST, layout=_DIGEST, files=[_FILE], **_PLACE
        ),
        "catalog": Catalog(
            type="catalog",
            lineage=_ID,
            steps_from=1,
            merges=[MergeHint(2, 6, 300_000)],
            anchors=[AnchorHint(1, 10)],
            retired=[Retired("steps", 1, 4, 1_700_000_000_000)],
            **_SAME,
        ),
        "head": Head(1, _ID, 7),
        "lease": Lease(1, _ID, _ID, 7, 1800),
    }
    seeds = {name: encode(record) for name, record in records.items()}
    key = SigningKey.generate()
    signed = records["delta"]
    assert isinstance(signed, Manifest)
    return seeds | {"signed": encode(sign(signed, key))}


def _run(data: bytes) -> None:
    for signed in (StreamRecord, Manifest, Merge, Anchor, Catalog):
        try:
            record = parse(data, signed, "the input")
        except ThinwireError:
            continue
        require(encode(record) == data, "a record has two encodings")
        try:
            _use(record)
        except ThinwireError:
            continue
    for hint in (Head, Lease):
        try:
            found = parse_hint(data, hint, "the input")
        except ThinwireError:
            continue
        require(encode(found) == data, "a hint has two encodings")


def _use(record: Any) -> None:
    """What a follower does with a record that it accepted: keys stay inside, numbers bearable."""
    step = None
    if isinstance(record, Manifest) and record.kind != "end":
        step = step_of_version(record, "memory://x")
        mark = Mark.of(Version.of(record), record.stream, [])
        require(msgspec.json.decode(msgspec.json.encode(mark), type=Mark) == mark, "mark changes")
        _ = record.created_ms / 1000
    elif isinstance(record, Merge):
        step = step_of_merge(record, "memory://x")
    elif isinstance(record, Anchor):
        step = step_of_anchor(record, "memory://x")
    for wanted in [] if step is None else [*step.shards, *step.files.values()]:
        check_key(wanted.key)
        require(wanted.key.startswith(f"{record.lineage}/"), "a key leaves the lineage")
        require(".." not in wanted.key.split("/"), "a key climbs")
        require(wanted.record.size >= 0, "a negative size")


def _mutate(data: bytes, random: Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if value is None or random.random() < 0.1:
        return mutate_bytes(data, random)
    changed = mutate_json(value, random)
    if random.random() < 0.8:
        try:
            # In the one encoding, so that what comes after it is reached.
            return msgspec.json.encode(changed, order="sorted")
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, UnicodeError):
            pass
    return json_bytes(changed, random)


MANIFEST = Target("manifest", _run, _mutate, _seeds)
