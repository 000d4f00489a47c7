"""docs/stream.md suffices: a follower written from it alone rebuilds what the library publishes.

The library is a black box here, but for its encoding of records, which both must agree on.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import Corrupt, ThinwireError
from thinwire.follow import Follower, open_stream
from thinwire.publish import Publisher
from thinwire.stream import encoding
from thinwire.stream.records import Catalog, Manifest, Policy, StreamRecord
from thinwire.stream.signing import SigningKey

from . import making, records
from .making import Made
from .reader import Model, Reader, digest_of
from .records import MissingError, RefusedError


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Version 1 is an anchor; 4 is one too; merges of 2 and 4 versions; all signed."""
    root = tmp_path_factory.mktemp("signed")
    return making.make_stream(root, key=SigningKey.generate(), anchor_every=3)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three versions, one merge, an anchor of the last."""
    root = tmp_path_factory.mktemp("short")
    return making.make_stream(
        root, key=SigningKey.generate(), versions=3, levels=[2], anchor_every=2
    )


@pytest.fixture
def copied(short: Made, tmp_path: Path) -> Made:
    """The same, to be damaged."""
    shutil.copytree(short.bucket, tmp_path / "bucket")
    return Made(tmp_path / "bucket", short.key, short.contents)


def opened(made: Made) -> Reader:
    return Reader(made.bucket, made.pinned)


def lineage_of(made: Made) -> Path:
    """The folder of the first lineage."""
    record = json.loads((made.bucket / "stream.json").read_bytes())
    return made.bucket / str(record["lineage"])


@pytest.mark.parametrize("by", ["steps", "merges", "anchor"])
def test_every_version_by_every_way(signed: Made, by: str) -> None:
    found = opened(signed)
    head = found.head()
    assert head is not None
    history = found.history(head)
    assert [m["version"] for m in history] == [1, 2, 3, 4, 5, 6]
    for manifest in history:
        assert found.rebuild(manifest, by).contents() == signed.contents[manifest["version"]]


def test_the_stream_has_what_is_tested(signed: Made) -> None:
    catalog = opened(signed).catalog(lineage_of(signed).name)
    pairs = [(hint["base"], hint["version"]) for hint in catalog["merges"]]
    assert pairs == [(1, 3), (1, 5), (3, 5)]
    assert [hint["version"] for hint in catalog["anchors"]] == [1, 6]


def test_without_hints(copied: Made) -> None:
    (copied.bucket / "head.json").unlink()
    (lineage_of(copied) / "catalog.json").unlink()
    head = opened(copied).head()
    assert head is not None
    assert head["version"] == 3
    assert opened(copied).rebuild(head).contents() == copied.contents[3]


def test_a_stale_hint(copied: Made) -> None:
    hint = {"format": 1, "lineage": lineage_of(copied).name, "version": 1}
    (copied.bucket / "head.json").write_bytes(records.canonical(hint))
    head = opened(copied).head()
    assert head is not None
    assert head["version"] == 3


def test_a_new_lineage_and_a_reference(tmp_path: Path) -> None:
    arrays = making.first_arrays()
    files = making.files_of(arrays)
    copy = making.write(tmp_path / "copy", files)
    bucket = str(tmp_path / "bucket")
    key = SigningKey.generate()
    stream = open_stream(bucket, signing_key=key, policy=Policy())
    contents = {1: files}
    with Publisher(stream, tmp_path / "a", maintain=False, base=copy) as publisher:
        publisher.publish_reference(str(copy), copy=copy)
        for version in (2, 3):
            arrays = making.stepped(arrays, version)
            contents[version] = making.files_of(arrays)
            publisher.publish(making.write(tmp_path / "new", contents[version]))
    stream = open_stream(bucket, signing_key=key)
    with Publisher(
        stream, tmp_path / "a", maintain=False, base=copy, new_lineage=True
    ) as publisher:
        for version in (4, 5):
            arrays = making.stepped(arrays, 10 + version)
            contents[version] = making.files_of(arrays)
            publisher.publish(making.write(tmp_path / "new", contents[version]))
    found = Reader(tmp_path / "bucket", [key.public])
    head = found.head()
    assert head is not None
    history = found.history(head)
    assert [m["version"] for m in history] == [1, 2, 3, 4, 5]
    assert len({m["lineage"] for m in history}) == 2
    for manifest in history:
        model = found.rebuild(manifest, copy=Model.of(files))
        assert model.contents() == contents[manifest["version"]]
    other = Model.of(making.files_of(making.stepped(making.first_arrays(), 99)))
    with pytest.raises(RefusedError, match="no copy, or another one"):
        found.rebuild(history[1], copy=other)
    # The hint of a reader that was away for long names the old lineage.
    hint = {"format": 1, "lineage": history[0]["lineage"], "version": 1}
    (tmp_path / "bucket" / "head.json").write_bytes(records.canonical(hint))
    assert found.head() == head


def test_tensors_come_go_and_take_another_shape(tmp_path: Path) -> None:
    arrays = making.first_arrays()
    bucket = tmp_path / "bucket"
    contents = {}
    with Publisher(open_stream(str(bucket)), tmp_path / "p", maintain=False) as publisher:
        for version in range(1, 5):
            if version == 2:
                arrays["norm"] = np.arange(40, dtype="<u2").reshape(8, 5)
            if version == 3:
                taken = arrays.pop("layers.1.weight")
            if version == 4:
                arrays = {"layers.1.weight": taken} | making.stepped(arrays, 4)
            contents[version] = {"model.safetensors": making.safetensors(arrays)}
            publisher.publish(making.write(tmp_path / "new", contents[version]))
    found = Reader(bucket)
    head = found.head()
    assert head is not None
    for manifest in found.history(head):
        assert found.rebuild(manifest).contents() == contents[manifest["version"]]


def objects(made: Made, pattern: str) -> list[Path]:
    return sorted(path for path in made.bucket.glob(pattern) if path.is_file())


def everything(made: Made) -> None:
    """Use all that a stream has."""
    found = opened(made)
    head = found.head()
    assert head is not None
    for manifest in found.history(head):
        for by in ("steps", "anchor"):
            found.rebuild(manifest, by)
    for hint in found.catalog(head["lineage"])["merges"]:
        merge = found.merge(head["lineage"], hint["base"], hint["version"])
        base = found.require(head["lineage"], merge["base"])
        found.merged(found.rebuild(base, "steps"), merge)


@pytest.mark.parametrize(
    "pattern",
    [
        "stream.json",
        "*/manifests/*",
        "*/deltas/*/*",
        "*/merges/*",
        "*/anchors/*.json",
        "*/anchors/*/*",
    ],
)
def test_changed_objects_are_refused(copied: Made, pattern: str) -> None:
    found = objects(copied, pattern)
    assert found
    for path in found:
        data = path.read_bytes()
        at = len(data) // 2
        for changed in (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:-1]):
            path.write_bytes(changed)
            with pytest.raises(RefusedError):
                everything(copied)
        path.write_bytes(data)
    everything(copied)


def test_a_missing_object_is_missing(copied: Made) -> None:
    shard = objects(copied, "*/deltas/000000000002-000000000003/*")[0]
    shard.unlink()
    found = opened(copied)
    head = found.head()
    assert head is not None
    with pytest.raises(MissingError):
        found.rebuild(head, "steps")
    # There is an anchor.
    assert found.rebuild(head, "anchor").contents() == copied.contents[3]


def test_what_is_in_another_place_is_refused(copied: Made) -> None:
    manifests = objects(copied, "*/manifests/*")
    second, third = manifests[1].read_bytes(), manifests[2].read_bytes()
    manifests[2].write_bytes(second)
    with pytest.raises(RefusedError, match="of another version"):
        everything(copied)
    manifests[2].write_bytes(third)
    (copied.bucket / "stream.json").write_bytes(second)
    with pytest.raises(RefusedError):
        opened(copied)


def test_strangers_are_refused(signed: Made) -> None:
    with pytest.raises(RefusedError, match="signed by a stranger"):
        Reader(signed.bucket, [SigningKey.generate().public])


def test_unsigned_records_pass_only_where_nobody_is_pinned(tmp_path: Path) -> None:
    made = making.make_stream(tmp_path, versions=2)
    head = opened(made).head()
    assert head is not None
    assert opened(made).rebuild(head).contents() == made.contents[2]
    with pytest.raises(RefusedError, match="not signed"):
        Reader(made.bucket, [SigningKey.generate().public])


# Canonical JSON: both agree on every value, and on what else they refuse.

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_both_write_the_same(value: dict[str, Any]) -> None:
    manifest = Manifest(
        format=1,
        type="version",
        stream="",
        created_ms=0,
        kind="anchor",
        lineage="",
        first=1,
        version=1,
        session="",
        metadata={"value": value},
    )
    assert records.canonical({"value": value}) in encoding.encode(manifest)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (100.0, "100.0"),
        (1e-5, "0.00001"),
        (9.999e-6, "9.999e-6"),
        (-0.0, "-0.0"),
        (1e15, "1000000000000000.0"),
        (9999999999999998.0, "9999999999999998.0"),
        (1e16, "1e16"),
        (1.5e-7, "1.5e-7"),
        (1.2345678901234568e17, "1.2345678901234568e17"),
        (5e-324, "5e-324"),
        (math.pi, "3.141592653589793"),
    ],
)
def test_doubles(number: float, text: str) -> None:
    assert records.canonical(number) == text.encode()
    assert encoding.encode(number) == text.encode()  # type: ignore[arg-type]


OTHER_WAYS: dict[str, tuple[str, str]] = {
    "a blank": ('"format":1', '"format": 1'),
    "a line feed at the end": ("}", "}\n"),
    "an unknown field": ('"format":1', '"format":1,"fresh":1'),
    "keys in another order": ('"format":1,"kind":"delta"', '"kind":"delta","format":1'),
    "a key twice": ('"format":1', '"format":1,"format":1'),
    "a default": ('"format":1', '"files":[],"format":1'),
    "null for a default": ('"session"', '"previous":"","session"'),
    "a number as a fraction": ('"version":2', '"version":2.0'),
    "a number as text": ('"version":2', '"version":"2"'),
    "a number with an exponent": ('"raw_bytes":', '"raw_bytes":0e'),
    "an escaped character": ("delta", "d\\u0065lta"),
    "metadata with an escaped slash": ('"loss"', '"\\/":1,"loss"'),
    "a double with a digit too many": ("0.5", "0.50"),
    "a double as a fraction of none": ("0.5", "5e-1"),
    "a lone surrogate": ('"loss"', '"\\ud800":1,"loss"'),
    "another type": ('"type":"version"', '"type":"merge"'),
    "a newer format": ('"format":1', '"format":2'),
    "no format": ('"format":1,', ""),
    "a digest in capitals": ('"weights":"', '"weights":"A'),
    "a negative count": ('"word_count":', '"word_count":-'),
    "the place of another version": ('"version":2,', '"version":3,'),
    "another first version": ('"first":1', '"first":2'),
    "no base": ('"base":{"manifest"', '"bass":{"manifest"'),
    "an end's successor": ('"type"', f'"successor":"{"0" * 32}","type"'),
    "blocks of another size": ('"block":262144', '"block":262143'),
    "too many blocks": ('"blocks":["', f'"blocks":["{"0" * 64}","'),
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_both_refuse(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = manifest_text(tmp_path_factory)
    records.parse(text.encode(), "version")
    old, new = OTHER_WAYS[name]
    assert old in text
    changed = text[: text.rindex(old)] + new + text[text.rindex(old) + len(old) :]
    with pytest.raises(RefusedError):
        records.parse(changed.encode(), "version")
    with pytest.raises(ThinwireError):
        encoding.parse(changed.encode(), Manifest, name)


_texts: list[str] = []


def manifest_text(factory: pytest.TempPathFactory) -> str:
    """The manifest of an unsigned step delta, version 2."""
    if not _texts:
        made = making.make_stream(factory.mktemp("unsigned"), versions=2)
        path = lineage_of(made) / "manifests" / "000000000002.json"
        _texts.append(path.read_text(encoding="utf-8"))
    return _texts[0]


POLICY: dict[str, Any] = {
    "accept_new_lineages": False,
    "anchor_every": 0,
    "grace_s": 3600,
    "keep_age_s": 86400,
    "keep_versions": 1000,
    "merge_levels": [4, 16, 64, 256, 1024],
}


def verdicts(data: bytes, kind: str, cls: type[Any]) -> list[bool]:
    """Whether the independent reader takes a record, and whether ours does."""
    found = []
    for parse in (lambda: records.parse(data, kind), lambda: encoding.parse(data, cls, "it")):
        try:
            parse()
            found.append(True)
        except (RefusedError, ThinwireError):
            found.append(False)
    return found


@pytest.mark.parametrize(
    ("change", "is_good"),
    [
        ({}, True),
        ({"merge_levels": []}, True),
        ({"merge_levels": [2], "keep_versions": 7}, True),
        ({"keep_versions": 10**12 - 1, "accept_new_lineages": True}, True),
        ({"keep_versions": 10**12}, False),
        ({"merge_levels": [4, 6]}, False),
        ({"merge_levels": [4, 4]}, False),
        ({"merge_levels": [1]}, False),
        ({"merge_levels": [2**n for n in range(1, 18)]}, False),
        ({"grace_s": -1}, False),
        ({"grace_s": 0.5}, False),
        ({"accept_new_lineages": 0}, False),
        ({"fresh": 1}, False),
        *(({name: None}, False) for name in POLICY),
    ],
)
def test_policies(change: dict[str, Any], is_good: bool) -> None:
    """Every field is written; None: left out here."""
    policy = {name: value for name, value in (POLICY | change).items() if value is not None}
    record = stream_record() | {"policy": policy}
    assert verdicts(records.canonical(record), "stream", StreamRecord) == [is_good, is_good]


def stream_record() -> dict[str, Any]:
    zeros = "0" * 32
    shared = {"format": 1, "created_ms": 5, "stream": zeros, "lineage": zeros}
    return shared | {"type": "stream", "policy": POLICY}


def test_a_stream_needs_a_policy_and_no_name() -> None:
    record = stream_record()
    assert (
        verdicts(records.canonical(record | {"model": ""}), "stream", StreamRecord) == [False] * 2
    )
    del record["policy"]
    assert verdicts(records.canonical(record), "stream", StreamRecord) == [False] * 2


END: dict[str, Any] = {
    "base": {"manifest": "1" * 64, "version": 4},
    "created_ms": 5,
    "first": 2,
    "format": 1,
    "kind": "end",
    "lineage": "0" * 32,
    "session": "2" * 32,
    "stream": "3" * 32,
    "successor": "4" * 32,
    "type": "version",
    "version": 5,
}
_SHARD = {"block": 1 << 18, "blocks": ["5" * 64], "size": 7}


@pytest.mark.parametrize(
    "change",
    [
        {"successor": None},
        {"successor": "0" * 32},
        {"successor": "4" * 31},
        {"weights": "6" * 64},
        {"layout": "6" * 64},
        {"shards": [_SHARD]},
        {"files": [_SHARD | {"name": "a"}]},
        {"source": {"kind": "folder", "name": "a"}},
        {"content": "6" * 64},
        {"first": 5},
        {"first": 5, "base": None},
        {"first": 5, "previous": "7" * 32, "base": {"manifest": "1" * 64, "version": 5}},
        {"base": None},
        {"base": {"manifest": "1" * 64, "version": 3}},
        {"previous": "7" * 32},
    ],
)
def test_ends(change: dict[str, Any]) -> None:
    assert verdicts(records.canonical(END), "version", Manifest) == [True, True]
    changed = {name: value for name, value in (END | change).items() if value is not None}
    assert verdicts(records.canonical(changed), "version", Manifest) == [False, False]


def test_content_is_for_references_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    record = json.loads(manifest_text(tmp_path_factory)) | {"content": "6" * 64}
    assert verdicts(records.canonical(record), "version", Manifest) == [False, False]


CATALOG: dict[str, Any] = {
    "created_ms": 5,
    "format": 1,
    "lineage": "0" * 32,
    "merges": [{"base": 1, "size": 0, "version": 3}],
    "retired": [{"at_ms": 9, "base": 1, "kind": "steps", "version": 7}],
    "steps_from": 7,
    "stream": "3" * 32,
    "type": "catalog",
}


@pytest.mark.parametrize(
    "change",
    [
        {"type": "merge"},
        {"type": None},
        {"stream": None},
        {"created_ms": None},
        {"lineage": "0"},
        {"steps_from": 0},
        {"steps_from": -1},
        {"steps_from": 10**12},
        {"anchors": []},
        {"is_over": False},
        {"anchors": [{"size": -1, "version": 3}]},
        {"anchors": [{"size": 1, "version": 0}]},
        {"anchors": [{"size": 1, "version": 10**12}]},
        {"merges": [{"base": 3, "size": 1, "version": 3}]},
        {"merges": [{"base": 0, "size": 1, "version": 3}]},
        {"merges": [{"base": 1, "size": 2**62, "version": 3}]},
        {"merges": [{"base": 1, "version": 3}]},
        {"retired": [{"at_ms": 9, "base": 8, "kind": "steps", "version": 7}]},
        {"retired": [{"at_ms": 9, "base": -1, "kind": "merge", "version": 7}]},
        {"retired": [{"at_ms": 9, "base": 1, "kind": "lease", "version": 7}]},
    ],
)
def test_catalogs(change: dict[str, Any]) -> None:
    assert verdicts(records.canonical(CATALOG), "catalog", Catalog) == [True, True]
    changed = {name: value for name, value in (CATALOG | change).items() if value is not None}
    assert verdicts(records.canonical(changed), "catalog", Catalog) == [False, False]


# What both do with hints, and with lineages that do not follow each other.


def lost(path: Path) -> None:
    path.unlink()


def unsigned(path: Path) -> None:
    record = json.loads(path.read_bytes())
    del record["signer"], record["signature"]
    path.write_bytes(records.canonical(record))


def changed(path: Path) -> None:
    record = json.loads(path.read_bytes())
    path.write_bytes(records.canonical(record | {"created_ms": record["created_ms"] + 1}))


@pytest.mark.parametrize("harm", [lost, unsigned, changed])
def test_where_no_catalog_counts_listings_do(copied: Made, harm: Callable[[Path], None]) -> None:
    lineage = lineage_of(copied)
    catalog = opened(copied).catalog(lineage.name)
    for path in objects(copied, "*/deltas/000000000002-000000000003/*"):
        path.unlink()
    for path in objects(copied, "*/anchors/000000000001-*/*"):
        path.unlink()
    harm(lineage / "catalog.json")
    found = opened(copied)
    assert found.catalog(lineage.name) == {"merges": [], "anchors": []}
    listed = found.listed(lineage.name)
    assert listed["merges"] == catalog["merges"]
    assert listed["anchors"] == [hint for hint in catalog["anchors"] if hint["version"] != 1]
    head = found.head()
    assert head is not None
    assert found.rebuild(head, "anchor").contents() == copied.contents[3]
    stream = open_stream(str(copied.bucket), trusted_keys=copied.pinned)
    with Follower(stream, copied.bucket.parent / "sink", lease=False) as follower:
        assert follower.catch_up().version == 3


def two_lineages(tmp_path: Path) -> list[Path]:
    """An unsigned stream; the folders of its lineages: versions 1 and 2 with an end, version 3."""
    bucket = tmp_path / "bucket"
    arrays = {"w": np.arange(300, dtype=np.float32)}
    for new_lineage in (False, True):
        stream = open_stream(str(bucket))
        with Publisher(
            stream, tmp_path / "p", maintain=False, new_lineage=new_lineage
        ) as publisher:
            for _ in range(1 if new_lineage else 2):
                arrays["w"][7] += 1
                publisher.publish(arrays)
    first = bucket / json.loads((bucket / "stream.json").read_bytes())["lineage"]
    end = json.loads((first / "manifests" / "000000000003.json").read_bytes())
    hint = {"format": 1, "lineage": first.name, "version": 2}
    (bucket / "head.json").write_bytes(records.canonical(hint))
    return [first, bucket / end["successor"]]


def refuse_the_head(bucket: Path) -> None:
    with pytest.raises(RefusedError):
        Reader(bucket).head()
    with pytest.raises(Corrupt):
        open_stream(str(bucket)).tip()


def test_a_successor_must_follow_the_end(tmp_path: Path) -> None:
    first, second = two_lineages(tmp_path)
    begin = second / "manifests" / "000000000003.json"
    record = json.loads(begin.read_bytes())
    head = Reader(first.parent).head()
    assert head is not None
    assert head["version"] == 3
    other = record | {"base": {"manifest": "0" * 64, "version": 3}}
    begin.write_bytes(records.canonical(other))
    refuse_the_head(first.parent)
    alone = {name: value for name, value in record.items() if name not in ("base", "previous")}
    begin.write_bytes(records.canonical(alone))
    refuse_the_head(first.parent)


def test_a_successor_must_name_the_lineage_before(tmp_path: Path) -> None:
    first, second = two_lineages(tmp_path)
    begin = second / "manifests" / "000000000003.json"
    record = json.loads(begin.read_bytes()) | {"previous": "9" * 32}
    begin.write_bytes(records.canonical(record))
    refuse_the_head(first.parent)


def test_lineages_in_a_circle_are_refused(tmp_path: Path) -> None:
    first, second = two_lineages(tmp_path)
    begin = json.loads((second / "manifests" / "000000000003.json").read_bytes())
    shared = {name: begin[name] for name in ("format", "type", "stream", "created_ms", "session")}
    end = shared | {
        "kind": "end",
        "lineage": second.name,
        "first": 3,
        "version": 4,
        "base": {"version": 3, "manifest": digest_of(records.canonical(begin))},
        "successor": first.name,
    }
    (second / "manifests" / "000000000004.json").write_bytes(records.canonical(end))
    # Of the first lineage, at the place of its successor's end: someone forged both.
    again = begin | {
        "lineage": first.name,
        "first": 4,
        "version": 4,
        "previous": second.name,
        "base": {"version": 4, "manifest": digest_of(records.canonical(end))},
    }
    (first / "manifests" / "000000000004.json").write_bytes(records.canonical(again))
    refuse_the_head(first.parent)
