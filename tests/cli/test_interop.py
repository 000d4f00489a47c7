"""convert, mirror, and inspect of other systems' deltas: as a user sees them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.checkpoint import diff_checkpoint
from thinwire.interop import writing
from thinwire.testing.hot_load_server import HotLoadServer, serving

from .conftest import Pair, Run, read_json
from .streams import VERSIONS, Lab, publish_some, running


@pytest.fixture
def step(lab: Lab) -> Pair:
    """Two checkpoints of a step, and the delta between them."""
    base, new = lab.checkpoints[:2]
    delta = lab.root / "delta.tw"
    diff_checkpoint(base, new, delta)
    return Pair(base, new, delta)


@pytest.fixture
def two_versions(lab: Lab) -> Lab:
    publish_some(lab, 1, 2)
    return lab


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_convert_a_delta_there_and_back(step: Pair, run: Run, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    there = run("convert", step.delta, chain, "--to", "slime", "--base", step.base, "--version", 3)
    assert there.exit_code == 0, there.stderr
    assert there.stdout.startswith("version 3: weight_v000003, a delta from 2: ")
    back = run(
        "convert", chain / "weight_v000003", tmp_path / "d.tw", "--to", "thinwire", "--base",
        step.base, "--json",
    )  # fmt: skip
    assert back.exit_code == 0, back.stderr
    (content,) = lines(back.stdout)
    assert (content["version"], content["base_version"], content["kind"]) == (3, 2, "delta")
    assert content["written_bytes"] == (tmp_path / "d.tw").stat().st_size
    made = tmp_path / "made"
    assert run("apply", step.base, tmp_path / "d.tw", "-o", made).exit_code == 0
    for path in step.new.glob("*.safetensors"):
        assert (made / path.name).read_bytes() == path.read_bytes()


def test_convert_takes_options(step: Pair, run: Run, tmp_path: Path) -> None:
    arguments = ["convert", step.delta, tmp_path / "chain", "--to", "slime", "--base", step.base]
    done = run(
        *arguments, "--version", 1, "--option", "encoding=overwrite", "--option", "checksum=blake3"
    )
    assert done.exit_code == 0, done.stderr
    index = tmp_path / "chain" / "weight_v000001" / "model.safetensors.index.json"
    metadata = json.loads(index.read_text())["metadata"]
    assert (metadata["delta_encoding"], metadata["checksum_format"]) == ("overwrite", "blake3")
    for wrong in ("encoding", "=x", "colour=red"):
        refused = run(*arguments, "--version", 2, "--option", wrong)
        assert refused.exit_code == 2
        assert "option" in refused.stderr


@pytest.mark.parametrize("command", ["convert", "mirror"])
def test_workers_code(stream: Lab, run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """As many threads as asked for; without a word one for each processor."""
    asked = []
    code_tensors = writing.code_tensors

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments[-1])
        return code_tensors(*arguments, **options)

    monkeypatch.setattr(writing, "code_tensors", counted)
    places: tuple[object, ...] = (stream.url, stream.root / "chain")
    words = {
        "convert": ("convert", *places, "--to", "slime"),
        "mirror": (
            "mirror",
            *places,
            "--format",
            "slime",
            "--work-dir",
            stream.root / "w",
            "--once",
        ),
    }[command]
    if command == "mirror":
        run(*words)
        publish_some(stream, VERSIONS + 1, VERSIONS + 1)
    assert run(*words, "--workers", 3).exit_code == 0
    assert asked == [3] * (2 if command == "convert" else 1)
    assert run(*words, "--workers", 0).exit_code == 2


def test_convert_needs_a_base(step: Pair, run: Run, tmp_path: Path) -> None:
    done = run("convert", step.delta, tmp_path / "chain", "--to", "slime", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["code"] == "invalid-argument"
    assert "--base" in done.stderr


def test_convert_a_stream_and_back(stream: Lab, run: Run) -> None:
    chain = stream.root / "chain"
    there = run("convert", stream.url, chain, "--to", "slime", "--json")
    assert there.exit_code == 0, there.stderr
    kinds = [(row["version"], row["kind"]) for row in lines(there.stdout)]
    assert kinds == [(1, "full"), (2, "delta"), (3, "delta")]
    again = stream.root / "again"
    back = run("convert", chain, again, "--to", "thinwire")
    assert back.exit_code == 0, back.stderr
    assert back.stdout.count("\n") == VERSIONS
    folder = stream.root / "folder"
    assert run("follow", again, folder, "--once").exit_code == 0
    assert (folder / "model.safetensors").read_bytes() == stream.weights(VERSIONS)


def test_convert_nothing(run: Run, tmp_path: Path) -> None:
    done = run("convert", tmp_path, tmp_path / "out", "--to", "slime", "--base", tmp_path)
    assert done.exit_code != 0
    assert "Traceback" not in done.stderr


def test_inspect_a_chain_and_a_delta(stream: Lab, run: Run) -> None:
    chain = stream.root / "chain"
    run("convert", stream.url, chain, "--to", "slime")
    content = read_json(run("inspect", chain, "--json"))
    assert content["format"] == "slime"
    assert [row["base_version"] for row in content["versions"]] == [None, 1, 2]
    assert "weight_v000002" in run("inspect", chain).stdout
    delta = chain / "weight_v000002"
    content = read_json(run("inspect", delta, "--json"))
    assert (content["format"], content["version"], content["base_version"]) == ("slime", 2, 1)
    assert all(row["payload_bytes"] > 0 for row in content["tensors"])
    text = run("inspect", delta, "--top", 1).stdout
    assert "slime" in text
    refused = run("inspect", delta, "--base", stream.checkpoints[0])
    assert refused.exit_code == 2


def test_inspect_a_malformed_delta(stream: Lab, run: Run) -> None:
    chain = stream.root / "chain"
    run("convert", stream.url, chain, "--to", "slime")
    weights = next((chain / "weight_v000002").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    done = run("inspect", chain / "weight_v000002")
    assert done.exit_code == 3
    assert weights.name in done.stderr


def test_mirror_once(stream: Lab, run: Run) -> None:
    chain, work = stream.root / "chain", stream.root / "work"
    arguments = ["mirror", stream.url, chain, "--format", "slime", "--work-dir", work, "--once"]
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    (content,) = lines(done.stdout)
    assert (content["version"], content["mirrored_as"]) == (VERSIONS, "weight_v000003")
    assert content["mirrored_base"] is None
    again = run(*arguments)
    assert (again.exit_code, again.stdout) == (0, "")


def test_mirror_follows_and_stops(two_versions: Lab) -> None:
    stream = two_versions
    chain, work = stream.root / "chain", stream.root / "work"
    seen = stream.root / "seen"
    script = f"import os; open({str(seen)!r}, 'a').write(os.environ['THINWIRE_VERSION'] + ' ')"
    with running(
        "mirror", stream.url, chain, "--format", "slime", "--work-dir", work, "--poll", 0.05,
        "--exec", f'{sys.executable} -c "{script}"', "--json",
    ) as process:  # fmt: skip
        assert json.loads(process.line())["mirrored_as"] == "weight_v000002"
        publish_some(stream, 3, 3)
        told = json.loads(process.line())
        assert (told["mirrored_as"], told["mirrored_base"]) == ("weight_v000003", 2)
        process.log("stopped") if process.terminate() == 0 else pytest.fail("not stopped")
    assert seen.read_text() == "2 3 "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--deployment", "d"], "is for a deployment of Fireworks"),
        (["--reset-prompt-cache", "all"], "is for a deployment of Fireworks"),
        (["--option", "colour=red"], "has no option 'colour'"),
    ],
)
def test_mirror_refuses(stream: Lab, run: Run, arguments: list[str], said: str) -> None:
    chain, work = stream.root / "chain", stream.root / "work"
    done = run(
        "mirror", stream.url, chain, "--format", "slime", "--work-dir", work, "--once", *arguments
    )
    assert done.exit_code == 2
    assert said in done.stderr


def test_mirror_for_a_deployment_needs_a_key(
    stream: Lab, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FIREWORKS_API_KEY", raising=False)
    done = run(
        "mirror", stream.url, stream.root / "chain", "--format", "fireworks", "--work-dir",
        stream.root / "work", "--deployment", "d", "--account", "a", "--model", "m", "--once",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "FIREWORKS_API_KEY" in done.stderr


def test_mirror_into_a_deployment(stream: Lab, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HotLoadServer()
    monkeypatch.setenv("FIREWORKS_API_KEY", server.key)
    bucket = stream.root / "bucket"
    with serving(server) as endpoint:
        done = run(
            "mirror", stream.url, bucket, "--format", "fireworks", "--work-dir",
            stream.root / "work", "--deployment", "d", "--account", "acme", "--model", "m",
            "--endpoint", endpoint, "--reset-prompt-cache", "all", "--once",
        )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"version {VERSIONS}: v0000000{VERSIONS}-")
    assert server.fleet.current() == next(bucket.glob("v*")).name
    assert server.key not in done.stdout + done.stderr


@pytest.mark.parametrize("format", ["slime", "fireworks", "trl", "hf"])
def test_mirror_in_each_format(two_versions: Lab, run: Run, format: str) -> None:
    stream = two_versions
    arguments = ["mirror", stream.url, stream.root / "dst", "--format", format]
    arguments += ["--work-dir", stream.root / "work", "--once", "--json"]
    (first,) = lines(run(*arguments).stdout)
    publish_some(stream, 3, 3)
    (second,) = lines(run(*arguments).stdout)
    assert (first["version"], first["mirrored_base"]) == (2, None)
    assert (second["version"], second["mirrored_base"]) == (3, None if format == "hf" else 2)
    assert run(*arguments).stdout == ""


def test_folders_that_are_something_else(stream: Lab, run: Run) -> None:
    for path, said in ((stream.store, "is a stream"), (stream.checkpoints[0], "a checkpoint")):
        done = run("inspect", path)
        assert done.exit_code == 2
        assert said in done.stderr
    done = run("convert", stream.checkpoints[0], stream.root / "out", "--to", "slime")
    assert (done.exit_code, "a checkpoint" in done.stderr) == (2, True)
