"""Heads and indexes that no writer made, with digests that are right: refused by every reader."""

from __future__ import annotations

import json

import pytest

import thinwire
from thinwire.codec import container
from thinwire.errors import (
    Corrupt,
    FormatError,
    LimitExceeded,
    ThinwireError,
    Truncated,
    Unsupported,
)

from .hostile import PARTS, TABLE, Change, entry, rebuilt, repacked, tensor
from .sample_delta import PAYLOAD, READERS
from .writer import pack, zstd

PLAIN = json.dumps(PARTS.index).encode()
HUGE = 10**400
STORED = zstd.compress(PLAIN)

HEADS: dict[str, tuple[bytes, type[ThinwireError]]] = {
    "version 0": (repacked(version=0), Unsupported),
    "version 2": (repacked(version=2), Unsupported),
    "version 65535": (repacked(version=65535), Unsupported),
    "flag 1": (repacked(flags=1), Unsupported),
    "flag 32768": (repacked(flags=0x8000), Unsupported),
    "another magic": (repacked(magic=b"\x89PNG\r\n\x1a\n"), FormatError),
    "text mode": (PAYLOAD.replace(b"\r\n", b"\n"), FormatError),
    "longer than it says": (repacked(file_bytes=len(PAYLOAD) - 1), FormatError),
    "shorter than it says": (repacked(file_bytes=1 << 62), Truncated),
    "shorter than its head": (repacked(file_bytes=48), FormatError),
    "index unpacks to more": (repacked(plain_bytes=len(PLAIN) - 1), Corrupt),
    "index unpacks to less": (repacked(plain_bytes=len(PLAIN) + 1), Corrupt),
    "index of 4 GiB": (repacked(plain_bytes=(1 << 32) - 1), LimitExceeded),
    "index beyond its limit": (repacked(plain_bytes=(1 << 28) + 1), LimitExceeded),
    "index beyond its ratio": (repacked(plain_bytes=1 << 27), LimitExceeded),
    "index is no zstd": (repacked(stored=b"x" * 100), Corrupt),
    "index is empty": (repacked(stored=b""), FormatError),
    "index is cut": (repacked(stored=STORED[:-1]), Corrupt),
    "bytes follow the index": (repacked(stored=STORED + b"\0"), Corrupt),
    "two frames": (repacked(stored=STORED + zstd.compress(b"")), Corrupt),
    "a bomb": (repacked(stored=zstd.compress(bytes(1 << 24)), plain_bytes=4096), Corrupt),
    "one digest less": (pack(PARTS.index, PARTS.digests[1:], PARTS.sections), Corrupt),
    "one digest more": (pack(PARTS.index, [0, *PARTS.digests], PARTS.sections), Corrupt),
    "no digests": (pack(PARTS.index, [], PARTS.sections), Corrupt),
    "half a digest": (pack(PARTS.index, b"1234", PARTS.sections), Corrupt),
    "a section missing": (pack(*PARTS[:2], PARTS.sections[:-1]), Corrupt),
    "no sections": (pack(*PARTS[:2], b""), Corrupt),
    "bytes after the sections": (pack(*PARTS[:2], PARTS.sections + b"\0"), Corrupt),
}

PLAINS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"tensors",
    "no UTF-8": b'{"tensors":[{"name":"\xff\xfe","dtype":"U8","shape":[]}]}',
    "half a surrogate": b'{"tensors":[{"name":"\\ud800","dtype":"U8","shape":[]}]}',
    "null": b"null",
    "a list": b"[]",
    "no tensors": b"{}",
    "unknown field": b'{"tensors":[],"more":1}',
    "two documents": b'{"tensors":[]}{"tensors":[]}',
    "deep": b'{"tensors":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"tensors":[' + b'{"name":' * 50_000,
    "a NaN": b'{"tensors":[{"name":"","dtype":"U8","shape":[NaN]}]}',
    "a float": b'{"tensors":[{"name":"","dtype":"U8","shape":[0.5]}]}',
    "a large float": b'{"tensors":[{"name":"","dtype":"U8","shape":[1e400]}]}',
    "a digit bomb": b'{"tensors":[{"name":"","dtype":"U8","shape":[' + b"9" * 20_000 + b"]}]}",
    "a name of null": b'{"tensors":[{"name":null,"dtype":"U8","shape":[]}]}',
    "a NUL": b'{"tensors":[]}\0',
}

INDEXES: dict[str, tuple[Change, type[ThinwireError]]] = {
    "negative dimension": (tensor("weights", shape=[-30, -30]), FormatError),
    "rank 33": (tensor("weights", shape=[1] * 33), LimitExceeded),
    "huge shape": (tensor("weights", shape=[1 << 62, 1 << 62]), LimitExceeded),
    "huge number": (tensor("weights", shape=[HUGE]), FormatError),
    "2**48 words and one": (tensor("removed", shape=[(1 << 47) + 1]), LimitExceeded),
    "another size": (tensor("large", shape=[1 << 21]), Corrupt),
    "part of a byte": (tensor("removed", dtype="F4", shape=[3]), FormatError),
    "unknown dtype": (tensor("weights", dtype="F128"), Unsupported),
    "unknown kind": (tensor("weights", kind="link"), Corrupt),
    "unknown field": (tensor("weights", offset=0), Corrupt),
    "no name": (tensor("weights", name=None), Corrupt),
    "long name": (tensor("weights", name="x" * 1025), LimitExceeded),
    "long name in UTF-8": (tensor("weights", name="\u20ac" * 342), LimitExceeded),
    "duplicate name": (tensor("weights", name="bias"), Corrupt),
    "negative change": (tensor("weights", changed=-1), Corrupt),
    "more changes than words": (tensor("weights", changed=901), Corrupt),
    "huge changes": (tensor("weights", changed=HUGE), Corrupt),
    "negative size": (tensor("large", sizes=[-1]), Corrupt),
    "huge size": (tensor("large", sizes=[HUGE]), FormatError),
    "2**64 bytes": (tensor("large", sizes=[1 << 64]), Corrupt),
    "no size": (tensor("large", sizes=[]), Corrupt),
    "two sizes": (tensor("large", sizes=[6, 6]), Corrupt),
    "same with a section": (tensor("frozen.large", sizes=[0]), Corrupt),
    "removed with a section": (tensor("removed", sizes=[0]), Corrupt),
    "full with an empty section": (tensor("added", sizes=[0]), Corrupt),
    "full in a group": (tensor("added", group=0), Corrupt),
    "removed in a group": (tensor("removed", group=0), Corrupt),
    "in a group and a section": (tensor("large", group=0), Corrupt),
    "group out of range": (tensor("weights", group=9), Corrupt),
    "negative group": (tensor("weights", group=-1), Corrupt),
    "huge group": (tensor("weights", group=HUGE), Corrupt),
    "group of two dtypes": (tensor("weights", group=1), Corrupt),
    "group too large": (tensor("frozen", shape=[1 << 20]), LimitExceeded),
    "group of unknown dtype": (entry("groups", 0, dtype="F128"), FormatError),
    "group of another dtype": (entry("groups", 0, dtype="F16"), Corrupt),
    "group of negative size": (entry("groups", 0, size=-1), Corrupt),
    "group too long": (entry("groups", 0, size=100), Corrupt),
    "table of unknown dtype": (entry("tables", 0, dtype="F128"), Unsupported),
    "table beyond the field": (entry("tables", 0, top=256), Corrupt),
    "table of negative top": (entry("tables", 0, top=-1), Corrupt),
    "short table": (entry("tables", 0, rate=[0] * 31), Corrupt),
    "long table": (entry("tables", 0, one=[0] * 33), Corrupt),
    "rate beyond a byte": (entry("tables", 0, rate=[256] * 32), Corrupt),
    "negative rate": (entry("tables", 0, one=[-1] * 32), Corrupt),
    "129 tables": (lambda index: index["tables"].extend([TABLE] * 129), LimitExceeded),
    "huge attachment": (entry("attachments", 0, size=(1 << 30) + 1), LimitExceeded),
    "negative attachment": (entry("attachments", 0, size=-1), LimitExceeded),
    "attachment of negative section": (entry("attachments", 0, stored=-1), FormatError),
    "attachment too long": (entry("attachments", 0, stored=10_000), Corrupt),
    "attachment without section": (entry("attachments", 0, stored=None), Corrupt),
    "duplicate attachment": (entry("attachments", 0, name="config.json"), Corrupt),
    "one row of steps": (lambda index: index["steps"].pop(), Corrupt),
    "negative steps": (lambda index: index["steps"][0].append(-1), Corrupt),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str) -> None:
    assert_refused(*HEADS[name])


@pytest.mark.parametrize("name", PLAINS)
def test_indexes_that_are_none(name: str) -> None:
    assert_refused(pack(PLAINS[name], [], b""), FormatError)


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name: str) -> None:
    change, error = INDEXES[name]
    assert_refused(rebuilt(change), error)


def assert_refused(payload: bytes, error: type[ThinwireError]) -> None:
    """Before a tensor is looked at, by every reader."""
    for read in (thinwire.inspect, *READERS):
        with pytest.raises(error):
            read(payload)


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_TENSORS", 4), ("MAX_TABLES", 0), ("MAX_GROUP_WORDS", 100)]
)
def test_limits_are_those_that_are_named(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(container, limit, value)
    with pytest.raises(LimitExceeded):
        thinwire.inspect(PAYLOAD)
