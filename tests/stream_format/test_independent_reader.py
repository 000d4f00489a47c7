"""docs/stream.md suffices: a follower written from it alone rebuilds what the library publishes.

The library is a black box here, but for its encoding of records, which both must agree on.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ThinwireError
from thinwire.follow import open_stream
from thinwire.publish import Publisher
from thinwire.stream import encoding
from thinwire.stream.records import Manifest, Policy, StreamRecord
from thinwire.stream.signing import SigningKey

from . import making, records
from .making import Made
from .reader import Model, Reader
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
    pairs = [(m["base"]["version"], m["target"]["version"]) for m in catalog["merges"]]
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
    for merge in found.catalog(head["lineage"])["merges"]:
        base = found.require(head["lineage"], merge["base"])
        found.merged(found.rebuild(base, "steps"), merge)


@pytest.mark.parametrize(
    "pattern",
    ["stream.json", "*/manifests/*", "*/deltas/*/*", "*/anchors/*.json", "*/anchors/*/*"],
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


@pytest.mark.parametrize(
    ("policy", "is_good"),
    [
        ("", True),
        ('"policy":{"merge_levels":[4,16,64,256,1024]},', True),
        ('"policy":{"keep_versions":1000,"merge_levels":[]},', True),
        ('"policy":{"grace_s":3600,"keep_age_s":86400,"merge_levels":[2]},', True),
        ('"policy":{},', True),
        ('"policy":{"keep_versions":7},', True),
        ('"policy":{"keep_versions":1000000000000},', False),
        ('"policy":{"anchor_every":0,"merge_levels":[]},', False),
        ('"policy":{"accept_new_lineages":false,"merge_levels":[]},', False),
        ('"policy":{"merge_levels":[4,6]},', False),
        ('"policy":{"merge_levels":[4,4]},', False),
        ('"policy":{"merge_levels":[1]},', False),
        ('"policy":{"grace_s":-1,"merge_levels":[]},', False),
        ('"model":"",', False),
    ],
)
def test_policies(policy: str, is_good: bool) -> None:
    zeros = "0" * 32
    text = (
        f'{{"created_ms":5,"format":1,"lineage":"{zeros}",{policy}'
        f'"stream":"{zeros}","type":"stream"}}'
    ).encode()
    verdicts = []
    for parse in (
        lambda: records.parse(text, "stream"),
        lambda: encoding.parse(text, StreamRecord, "stream.json"),
    ):
        try:
            parse()
            verdicts.append(True)
        except (RefusedError, ThinwireError):
            verdicts.append(False)
    assert verdicts == [is_good, is_good]
