"""The schemas in docs/schema are those of the code, and real records are as they say."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.errors import ThinwireError
from thinwire.follow import Follower, open_stream
from thinwire.maintain import Maintainer
from thinwire.publish import Publisher
from thinwire.stream import encoding, keys, records
from thinwire.stream.records import Policy
from thinwire.stream.signing import SigningKey

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCHEMAS = DOCS / "schema"


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"thinwire_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _module(SCHEMAS / "make.py")


def test_the_committed_schemas_are_the_generated_ones() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.glob("*.json")}
    assert committed == make.files(), "run: python docs/schema/make.py"


def validator(name: str) -> Any:
    """What validates against a committed schema."""
    jsonschema = pytest.importorskip(
        "jsonschema", reason="jsonschema is not installed: the schemas were NOT tried on records"
    )
    schema = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream with records of every kind: a reference, a new lineage, merges, anchors, leases."""
    root = tmp_path_factory.mktemp("stream")
    key = SigningKey.generate()
    arrays = {"w": np.arange(500, dtype=np.float32)}
    with Publisher(
        open_stream(str(root / "first"), signing_key=key), root / "copy", maintain=False
    ) as publisher:
        publisher.publish(arrays)
    copy = root / "copy"
    stream = open_stream(
        str(root / "bucket"), model="m", policy=Policy(anchor_every=2), signing_key=key
    )
    with Publisher(stream, root / "p", base=copy, maintain=False) as publisher:
        publisher.publish_reference(str(copy), step=1, metadata={"é": [1, 2.5, None]})
        arrays["w"][3] += 1
        publisher.publish(arrays)
    with Publisher(stream, root / "p", base=copy, maintain=False, new_lineage=True) as publisher:
        for _ in range(9):
            arrays["w"][5] += 1
            publisher.publish(arrays, step=-2)
        with Maintainer(stream, root / "work") as maintainer:
            maintainer.run_once()
        with Follower(stream, root / "sink") as follower:
            follower.wait_for(5, 10)
            leases = [(root / "bucket" / e.key) for e in stream.store.list(keys.LEASES)]
            (root / "leases").mkdir()
            for path in leases:
                (root / "leases" / path.name).write_bytes(path.read_bytes())
    return root


def kinds(root: Path) -> Iterator[tuple[str, Path]]:
    """Every record of the stream with the name of its schema."""
    bucket = root / "bucket"
    yield "stream", bucket / "stream.json"
    yield "head", bucket / "head.json"
    yield "mark", root / "sink" / ".thinwire-mark"
    for name, pattern in (
        ("version", "*/manifests/*.json"),
        ("merge", "*/merges/*.json"),
        ("anchor", "*/anchors/*.json"),
        ("catalog", "*/catalog.json"),
    ):
        for path in bucket.glob(pattern):
            yield name, path
    for path in (root / "leases").iterdir():
        yield "lease", path


def test_records_of_a_real_stream_validate(root: Path) -> None:
    found = list(kinds(root))
    assert {name for name, _ in found} == make.RECORDS.keys()
    versions = [json.loads(p.read_bytes())["kind"] for name, p in found if name == "version"]
    assert set(versions) == {"anchor", "reference", "delta", "end"}
    catalogs = [json.loads(p.read_bytes()) for name, p in found if name == "catalog"]
    assert all(record["signer"] and record["signature"] for record in catalogs)
    for name, path in found:
        validator(name).validate(json.loads(path.read_bytes()))


def test_a_schema_refuses_other_records(root: Path) -> None:
    for name, path in kinds(root):
        record = json.loads(path.read_bytes())
        for changed in (record | {"format": 2}, record | {"fresh": 1}, {}):
            assert not validator(name).is_valid(changed)
        if "type" in record:
            assert not validator(name).is_valid(record | {"type": "lease"})


def test_a_schema_wants_the_whole_policy(root: Path) -> None:
    record = json.loads((root / "bucket" / "stream.json").read_bytes())
    policy = record["policy"]
    assert policy.keys() == set(Policy.__struct_fields__)
    for field in policy:
        short = {name: value for name, value in policy.items() if name != field}
        assert not validator("stream").is_valid(record | {"policy": short})
    del record["policy"]
    assert not validator("stream").is_valid(record)


def example_records() -> list[dict[str, Any]]:
    """Those of the worked example in docs/stream.md."""
    text = (DOCS / "stream.md").read_text(encoding="utf-8")
    example = text.partition("Worked example")[2]
    return [json.loads(body) for body in re.findall(r"```json\n(.*?)\n```", example, re.DOTALL)]


def test_the_worked_example_validates() -> None:
    found = example_records()
    assert [record["type"] for record in found] == ["stream", "version", "version"]
    for record in found:
        validator(record["type"]).validate(record)


def test_the_worked_example_is_signed_and_linked() -> None:
    classes = {"stream": records.StreamRecord, "version": records.Manifest}
    signers = set()
    parsed = []
    for record in example_records():
        signers.add(record["signer"])
        data = json.dumps(
            record, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()
        parsed.append(encoding.parse(data, classes[record["type"]], "it", [record["signer"]]))
        later = data.replace(b'"created_ms":1', b'"created_ms":2')
        with pytest.raises(ThinwireError):
            encoding.parse(later, type(parsed[-1]), "it")
    assert len(signers) == 1
    assert parsed[2].base == encoding.link_of(parsed[1])
    text = (DOCS / "stream.md").read_text(encoding="utf-8")
    for manifest in parsed[1:]:
        assert encoding.digest_of_record(manifest) in text
