"""What docs/stream.md and docs/operations.md say is so: limits, the worked example, commands."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

from thinwire import errors
from thinwire.cli.app import app
from thinwire.follow import Follower, open_stream
from thinwire.maintain import fsck
from thinwire.stream import keys
from thinwire.stream.blocks import ObjectRecord, record_of
from thinwire.stream.encoding import digest_of_record, encode, sign

from . import example
from .reader import Reader

DOCS = Path(__file__).resolve().parents[2] / "docs"
STREAM = (DOCS / "stream.md").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "operations.md").read_text(encoding="utf-8")
EXAMPLE = STREAM.partition("Worked example")[2]


def limits() -> list[tuple[str, str]]:
    """The names and values of the table of limits."""
    part = STREAM.partition("## 17. Limits")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \| ([\d.]+) \|", part, re.MULTILINE)


@pytest.mark.parametrize(("name", "value"), limits())
def test_a_limit_is_what_the_code_has(name: str, value: str) -> None:
    module, _, constant = name.rpartition(".")
    assert str(getattr(importlib.import_module(f"thinwire.{module}"), constant)) == value


def test_limits_named_in_the_text_are_in_the_table() -> None:
    named = set(re.findall(r"`((?:MAX|MIN)_[A-Z_]+)`", STREAM))
    assert named <= {name.rpartition(".")[2] for name, _ in limits()}


def fences(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)\n```", EXAMPLE, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


def shard() -> bytes:
    return bytes.fromhex(fences("hex")[0])


def test_the_example_is_made_again() -> None:
    first, second = example.manifests(shard())
    records = [example.stream_record(), first, second]
    assert fences("json") == [encode(record).decode() for record in records]
    for record in records:
        assert f"{len(encode(record))} bytes" in EXAMPLE
        assert sign(record, example.key()) == record
    for manifest in (first, second):
        assert digest_of_record(manifest) in EXAMPLE
        assert f"`{keys.manifest(example.LINEAGE, manifest.version)}`" in EXAMPLE
    assert example.key().public in EXAMPLE
    (signed,) = fences("")
    signature = f'"signature":"{second.signature}",'
    assert signed == "thinwire version\n" + encode(second).decode().replace(signature, "")
    assert f"these {len(signed.encode())} bytes" in EXAMPLE


def example_stream(bucket: Path) -> list[bytes]:
    """The example in a folder, from the document's own bytes; the weights of both versions."""
    texts = fences("json")
    data = shard()
    objects = {
        keys.STREAM: texts[0].encode(),
        keys.manifest(example.LINEAGE, 1): texts[1].encode(),
        keys.manifest(example.LINEAGE, 2): texts[2].encode(),
        re.findall(r"`(\w+/anchors/\S+)`", EXAMPLE)[0]: example.weights_file(),
        re.findall(r"`(\w+/deltas/\S+)`", EXAMPLE)[0]: data,
    }
    for key, content in objects.items():
        path = bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    header = example.weights_file()[:-192]
    return [header + example.words(version).tobytes() for version in (1, 2)]


def test_ours_follows_the_example(tmp_path: Path) -> None:
    wanted = example_stream(tmp_path / "bucket")
    stream = open_stream(str(tmp_path / "bucket"), trusted_keys=[example.key().public])
    with Follower(stream, tmp_path / "sink", lease=False) as follower:
        for version in (1, 2):
            assert follower.catch_up(version).version == version
            found = (tmp_path / "sink" / "model.safetensors").read_bytes()
            assert found == wanted[version - 1]
    assert fsck(stream, deep=True).is_whole


def test_the_independent_follower_follows_the_example(tmp_path: Path) -> None:
    wanted = example_stream(tmp_path)
    found = Reader(tmp_path, [example.key().public])
    head = found.head()
    assert head is not None
    for manifest in found.history(head):
        contents = found.rebuild(manifest).contents()
        assert contents == {"model.safetensors": wanted[manifest["version"] - 1]}


def test_the_digest_of_an_object_of_several_blocks() -> None:
    data = bytes(range(256)) * 3000
    record = record_of(data)
    assert len(record.blocks) == 3
    joined = "".join(record.blocks).encode()
    assert record.digest == ObjectRecord(len(joined), 1 << 18, record_of(joined).blocks).digest


# docs/operations.md


def error_codes() -> list[str]:
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]
    return sorted({cls.code for cls in found if issubclass(cls, errors.ThinwireError)} - {"error"})


@pytest.mark.parametrize("code", error_codes())
def test_every_error_is_in_the_playbook(code: str) -> None:
    assert f"`{code}`" in OPERATIONS


def commands() -> list[list[str]]:
    lines = "".join(re.findall(r"^```console\n(.*?)^```", OPERATIONS, re.DOTALL | re.MULTILINE))
    joined = lines.replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ") for line in joined if line.startswith("$ thinwire ")]
    return [shlex.split(line, comments=True)[1:] for line in found]


@pytest.mark.parametrize("arguments", commands(), ids=shlex.join)
def test_commands_parse(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    # Parsing only: nothing runs.
    group.commands[arguments[0]].make_context(arguments[0], arguments[1:]).close()
