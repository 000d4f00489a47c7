"""Records have one spelling; everything else is refused, by the right error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import (
    Corrupt,
    FormatError,
    InvalidArgument,
    LimitExceeded,
    SignatureInvalid,
    StreamError,
    Unsupported,
)
from thinwire.stream.encoding import (
    MAX_METADATA_BYTES,
    MAX_SHARDS,
    digest_of_record,
    encode,
    link_of,
    parse,
    parse_hint,
    plain_metadata,
    sign,
)
from thinwire.stream.records import (
    Anchor,
    FileRecord,
    Link,
    Manifest,
    Merge,
    Policy,
    Source,
    StreamRecord,
)
from thinwire.stream.signing import SigningKey
from thinwire.stream.version import Version

from .records import HINTS, METADATA, SIGNED, manifests

KEY = SigningKey.generate()
ID, DIGEST = "0123456789abcdef" * 2, "0123456789abcdef" * 4
PART = {"size": 5, "block": 1 << 18, "blocks": [DIGEST]}


def respelled(data: bytes, **options: Any) -> bytes:
    return json.dumps(json.loads(data), **{"separators": (",", ":"), **options}).encode()


@settings(deadline=None)
@given(SIGNED, st.booleans())
def test_signed_records_come_back(record: Any, is_signed: bool) -> None:
    record = sign(record, KEY if is_signed else None)
    data = encode(record)
    assert parse(data, type(record), "it") == record
    assert encode(parse(data, type(record), "it", [KEY.public] if is_signed else [])) == data


@settings(deadline=None)
@given(HINTS)
def test_hints_come_back(record: Any) -> None:
    assert parse_hint(encode(record), type(record), "it") == record


@settings(deadline=None)
@given(SIGNED)
def test_any_other_spelling_is_refused(record: Any) -> None:
    data = encode(record)
    keys = [*json.loads(data)]
    backwards = {key: json.loads(data)[key] for key in reversed(keys)}
    spellings = [
        json.dumps(backwards, separators=(",", ":"), ensure_ascii=False).encode(),
        respelled(data, separators=(", ", ": "), ensure_ascii=False),
        data + b"\n",
        b" " + data,
        data.replace(b'"format":1', b'"format":1.0'),
        data.replace(b'"format":1', b'"format":1,"format":1'),
        data.replace(b'"format"', b'"\\u0066ormat"'),
        data[:-1] + b',"signature":""}',
        data[:-1],
        data + data,
        b"\xef\xbb\xbf" + data,
    ]
    for spelling in spellings:
        with pytest.raises(Corrupt):
            parse(spelling, type(record), "it")


@settings(deadline=None)
@given(SIGNED, st.data())
def test_any_change_is_refused_or_seen(record: Any, data: st.DataObject) -> None:
    """A changed byte of a signed record is an error; of an unsigned one never another kind."""
    good = bytearray(encode(sign(record, KEY)))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((FormatError, SignatureInvalid)):
        parse(bytes(good), type(record), "it", [KEY.public])


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_noise(data: bytes) -> None:
    for cls in (Manifest, Merge, Anchor, StreamRecord):
        with pytest.raises(FormatError):
            parse(data, cls, "it")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000, "", "null", "[]", '{"format":1e999}']
)
def test_monsters(text: str) -> None:
    with pytest.raises(FormatError):
        parse(text.encode(), Manifest, "it")


def version(**changes: Any) -> dict[str, Any]:
    """The fields of a sound step delta."""
    fields = {
        "format": 1,
        "type": "version",
        "stream": ID,
        "created_ms": 0,
        "kind": "delta",
        "lineage": ID,
        "first": 1,
        "version": 2,
        "session": ID,
        "base": {"version": 1, "manifest": DIGEST},
        "weights": DIGEST,
        "layout": DIGEST,
        "shards": [PART],
    } | changes
    return {key: value for key, value in fields.items() if value is not None}


def parsed(fields: dict[str, Any], cls: type[Any] = Manifest) -> Any:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return parse(text.encode(), cls, "it")


FILE = PART | {"name": "model.safetensors"}
FIRST = {"version": 1, "base": None, "shards": None}
ANCHOR = FIRST | {"kind": "anchor", "files": [FILE]}
REFERENCE = {
    "kind": "reference",
    "version": 1,
    "base": None,
    "content": DIGEST,
    "source": {"kind": "huggingface", "name": "a/b", "revision": "c"},
}
END = {"kind": "end", "shards": None, "weights": None, "layout": None, "successor": ID[::-1]}


@pytest.mark.parametrize("changes", [{}, ANCHOR, REFERENCE, END, {"shards": [PART] * MAX_SHARDS}])
def test_sound_versions(changes: dict[str, Any]) -> None:
    parsed(version(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"unknown": 1},
        {"type": "merge"},
        {"type": "x" * 10_000},
        {"kind": "full"},
        {"kind": "anchor"},
        {"kind": "reference"},
        {"format": 0},
        {"format": -1},
        {"format": True},
        {"format": "1"},
        {"stream": "x"},
        {"lineage": "../" + ID[3:]},
        {"session": "/" * 32},
        {"version": 0, "base": {"version": -1, "manifest": DIGEST}},
        {"version": "2"},
        {"version": 2.5},
        {"version": 10**12, "base": {"version": 10**12 - 1, "manifest": DIGEST}},
        {"first": 3},
        {"first": 0},
        {"base": None},
        {"base": {"version": 2, "manifest": DIGEST}},
        {"base": {"version": 1, "manifest": "x"}},
        {"base": {"version": 1, "manifest": DIGEST, "more": 1}},
        {"previous": ID},
        {"weights": "x"},
        {"weights": None},
        {"layout": None},
        {"layout": "x"},
        {"raw_bytes": -1},
        {"changed_count": -1},
        {"shards": None},
        {"shards": [PART | {"size": -1}]},
        {"shards": [PART | {"block": 3}]},
        {"shards": [PART | {"more": 3}]},
        {"shards": [PART] * (MAX_SHARDS + 1)},
        {"files": [FILE]},
        {"successor": ID},
        {"source": {"kind": "folder", "name": "x"}},
        {"signature": "x"},
        {"signer": DIGEST},
        {"step": 1.5},
        {"step": 2**70},
        {"created_ms": 10**400},
        {"raw_bytes": 10**400},
        {"metadata": [1]},
        {"metadata": {"a": "x" * MAX_METADATA_BYTES}},
        ANCHOR | {"files": []},
        ANCHOR | {"kind": "delta"},
        ANCHOR | {"base": {"version": 1, "manifest": DIGEST}},
        ANCHOR | {"previous": ID},
        ANCHOR | {"base": {"version": 2, "manifest": DIGEST}, "previous": ID},
        ANCHOR | {"base": {"version": 1, "manifest": DIGEST}, "previous": "x"},
        ANCHOR | {"files": [PART | {"name": 5}]},
        REFERENCE | {"content": None},
        REFERENCE | {"source": None},
        REFERENCE | {"source": {"kind": "http", "name": "x"}},
        REFERENCE | {"source": {"kind": "folder", "name": "x" * 1025}},
        REFERENCE | {"source": {"kind": "folder", "name": "x\n" * 10_000}},
        REFERENCE | {"source": {"kind": "huggingface", "name": "x", "revision": "x" * 10_000}},
        END | {"successor": None},
        END | {"successor": "x"},
        END | {"shards": [PART]},
        END | {"first": 2},
        END | {"successor": ID},
    ],
    ids=lambda changes: " ".join(changes)[:60],
)
def test_versions_that_contradict_themselves(changes: dict[str, Any]) -> None:
    with pytest.raises((FormatError, SignatureInvalid)) as caught:
        parsed(version(**changes))
    assert len(str(caught.value)) < 1000


MERGE = {
    "format": 1,
    "type": "merge",
    "stream": ID,
    "created_ms": 0,
    "lineage": ID,
    "session": ID,
    "base": {"version": 1, "manifest": DIGEST},
    "target": {"version": 5, "manifest": DIGEST},
    "weights": DIGEST,
    "layout": DIGEST,
    "shards": [PART],
}
LATER_ANCHOR = {key: MERGE[key] for key in MERGE if key not in ("base", "shards")}
LATER_ANCHOR |= {"type": "anchor", "files": [FILE]}


@pytest.mark.parametrize(
    ("cls", "fields", "changes"),
    [
        (Merge, MERGE, {"base": {"version": 5, "manifest": DIGEST}}),
        (Merge, MERGE, {"base": {"version": 0, "manifest": DIGEST}}),
        (Merge, MERGE, {"target": {"version": 10**12, "manifest": DIGEST}}),
        (Merge, MERGE, {"shards": []}),
        (Merge, MERGE, {"weights": ""}),
        (Merge, MERGE, {"layout": ""}),
        (Anchor, LATER_ANCHOR, {"layout": ""}),
        (Merge, MERGE, {"type": "version"}),
        (Merge, MERGE, {"lineage": "x"}),
        (Anchor, LATER_ANCHOR, {"files": []}),
        (Anchor, LATER_ANCHOR, {"target": {"version": 1, "manifest": ""}}),
        (Anchor, LATER_ANCHOR, {"session": ""}),
    ],
)
def test_merges_and_anchors(cls: type, fields: dict[str, Any], changes: dict[str, Any]) -> None:
    parsed(fields, cls)
    with pytest.raises(FormatError):
        parsed(fields | changes, cls)


@pytest.mark.parametrize(
    "policy",
    [
        {"anchor_every": -1},
        {"merge_levels": [1]},
        {"merge_levels": [4, 4]},
        {"merge_levels": [4, 6]},
        {"merge_levels": [2**n for n in range(1, 19)]},
        {"merge_levels": [0]},
        {"keep_versions": -1},
        {"keep_age_s": -1},
        {"grace_s": -1},
        {"grace_s": 1.5},
        {"unknown": 1},
    ],
)
def test_policies_that_make_no_sense(policy: dict[str, Any]) -> None:
    sound = msgspec.structs.asdict(Policy())
    fields = {"format": 1, "type": "stream", "stream": ID, "created_ms": 0, "lineage": ID}
    parsed(fields | {"policy": sound}, StreamRecord)
    with pytest.raises(FormatError):
        parsed(fields | {"policy": sound | policy}, StreamRecord)


@pytest.mark.parametrize("missing", [None, *msgspec.structs.asdict(Policy())])
def test_a_policy_is_written_whole(missing: str | None) -> None:
    policy = msgspec.structs.asdict(Policy())
    policy.pop(missing, None)
    fields = {"format": 1, "type": "stream", "stream": ID, "created_ms": 0, "lineage": ID}
    with pytest.raises(FormatError):
        parsed(fields | ({} if missing is None else {"policy": policy}), StreamRecord)


def test_newer_formats_say_so() -> None:
    for cls in (Manifest, Merge, Anchor, StreamRecord):
        with pytest.raises(Unsupported, match="Upgrade"):
            parse(b'{"anything":[1],"format":2}', cls, "it")


def test_default_values_are_left_out() -> None:
    """Part of the format, so defaults can never change."""
    record = StreamRecord(
        format=1, type="stream", stream=ID, created_ms=7, lineage=ID, policy=Policy()
    )
    policy = (
        b'{"accept_new_lineages":false,"anchor_every":0,"grace_s":3600,"keep_age_s":86400,'
        b'"keep_versions":1000,"merge_levels":[4,16,64,256,1024]}'
    )
    assert encode(record) == (
        b'{"created_ms":7,"format":1,"lineage":"%s","policy":%s,"stream":"%s","type":"stream"}'
        % (ID.encode(), policy, ID.encode())
    )


@given(manifests())
def test_links_and_signatures_cover_the_whole_record(record: Manifest) -> None:
    signed = sign(record, KEY)
    assert link_of(signed) == Link(record.version, digest_of_record(signed))
    assert digest_of_record(signed) != digest_of_record(record)
    changed = msgspec.structs.replace(signed, created_ms=record.created_ms + 1)
    with pytest.raises(SignatureInvalid):
        parse(encode(changed), Manifest, "it")


def test_a_signature_does_not_carry_over_to_another_kind_of_record() -> None:
    """What is signed begins with the type: no record can be taken for another."""
    merge = parsed(MERGE, Merge)
    signed = sign(merge, KEY)
    bare = encode(msgspec.structs.replace(signed, signature=""))
    other = msgspec.structs.replace(signed, signature=KEY.sign(b"thinwire version\n" + bare))
    parse(encode(signed), Merge, "it", [KEY.public])
    with pytest.raises(SignatureInvalid):
        parse(encode(other), Merge, "it", [KEY.public])


@given(METADATA)
def test_metadata_that_is_json(metadata: dict[str, Any]) -> None:
    plain_metadata(metadata)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        (1, 2),
        b"bytes",
        {1: 2},
        object(),
        {1},
        "\ud800",
        "x" * MAX_METADATA_BYTES,
    ],
    ids=lambda value: type(value).__name__,
)
def test_metadata_that_is_not(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        plain_metadata({"a": value})


def test_metadata_without_end() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(InvalidArgument):
        plain_metadata(loop)


def test_errors_are_of_the_stated_kinds() -> None:
    with pytest.raises(LimitExceeded):
        parsed(version(shards=[PART] * (MAX_SHARDS + 1)))
    with pytest.raises(LimitExceeded):
        parsed(version(metadata={"a": "x" * MAX_METADATA_BYTES}))
    with pytest.raises(Corrupt, match="a 'merge' where a 'version' belongs"):
        parsed(version(type="merge"))
    assert issubclass(SignatureInvalid, StreamError)


@given(manifests("delta"))
def test_what_callers_are_told(manifest: Manifest) -> None:
    version = Version.of(manifest)
    assert version.manifest == digest_of_record(manifest)
    assert version.payload_bytes == sum(shard.size for shard in manifest.shards)
    assert (version.version, version.step) == (manifest.version, manifest.step)


def test_payload_counts_files_and_shards() -> None:
    file = FileRecord(5, 1 << 18, [DIGEST], "x")
    manifest = parsed(version(**ANCHOR))
    assert manifest.payload_bytes == 5
    assert msgspec.structs.replace(manifest, files=[file, file]).payload_bytes == 10
    assert Source("folder", "x") == msgspec.json.decode(
        b'{"kind":"folder","name":"x"}', type=Source
    )
