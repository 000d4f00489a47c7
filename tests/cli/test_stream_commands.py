"""publish, log, cat, maintain and fsck, over streams in folders."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from urllib.request import urlopen

import numpy as np
import pytest

from thinwire.follow import open_stream
from thinwire.publish import Publisher

from .conftest import Run, read_json
from .streams import VERSIONS, WITHIN_S, Lab, publish_some, running


def test_publish_and_follow(lab: Lab, run: Run) -> None:
    folder = lab.root / "folder"
    for number in (1, 2):
        done = run("publish", lab.checkpoints[number - 1], lab.url, "--state", lab.root / "state")
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith(f"version {number} of {lab.url}: ")
        assert "maintenance: nothing was due" in done.stdout
        followed = run("follow", lab.url, folder, "--once", "--log-level", "error")
        assert followed.exit_code == 0, followed.output
        assert followed.stdout.startswith(f"version {number}: ")
        assert followed.stdout.count("\n") == 1
        assert followed.stderr == ""
        assert (folder / "model.safetensors").read_bytes() == lab.weights(number)


def test_publish_json(lab: Lab, run: Run) -> None:
    arguments = ["--state", lab.root / "state", "--json"]
    facts = ["--step", 7, "--metadata", '{"reward": [1, 2.5]}', "--model", "m"]
    policy = ["--keep-age", "36h", "--keep-versions", 5, "--anchor-every", 2]
    content = read_json(
        run(
            *["publish", lab.checkpoints[0], lab.url, *arguments, *facts, *policy],
            *["--accept-new-lineages", "--no-maintain", "--workers", 2],
        )
    )
    assert (content["version"], content["step"], content["kind"]) == (1, 7, "anchor")
    assert content["metadata"] == {"reward": [1, 2.5]}
    assert content["maintenance"] is None
    assert content["url"] == lab.url
    record = open_stream(lab.url).record()
    assert record.model == "m"
    asked = record.policy
    assert (asked.keep_age_s, asked.keep_versions, asked.anchor_every) == (129_600, 5, 2)
    assert asked.accept_new_lineages
    for number in (2, 3):
        content = read_json(run("publish", lab.checkpoints[number - 1], lab.url, *arguments))
        assert content["kind"] == "delta"
        assert 0.5 < content["changed_percent"] < 2
    # Of version 3 on version 1, as the policy says.
    assert content["maintenance"]["anchor_count"] == 1


@pytest.mark.parametrize(
    "option",
    [
        ["--model", "m"],
        ["--keep-age", "1d"],
        ["--keep-versions", 3],
        ["--anchor-every", 3],
        ["--accept-new-lineages"],
    ],
)
def test_what_is_chosen_at_creation_cannot_be_chosen_later(
    option: list[object], stream: Lab, run: Run
) -> None:
    arguments = ["publish", stream.checkpoints[3], stream.url, "--state", stream.root / "state"]
    done = run(*arguments, *option, "--json")
    assert done.exit_code == 2
    assert read_json(done)["error"]["code"] == "invalid-argument"
    assert "exists already" in done.stderr
    assert read_json(run("log", stream.url, "--json"))["versions"][0]["version"] == VERSIONS


@pytest.mark.parametrize("metadata", ["[1]", "{", "NaN", '"text"', '{"a": ' * 3000])
def test_bad_metadata(metadata: str, lab: Lab, run: Run) -> None:
    state = lab.root / "state"
    done = run("publish", lab.checkpoints[0], lab.url, "--state", state, "--metadata", metadata)
    assert done.exit_code == 2
    assert "JSON object" in done.stderr
    assert not lab.store.exists()


def test_maintenance_that_fails_is_no_failed_publish(
    lab: Lab, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        from thinwire.errors import Unavailable

        raise Unavailable("no room", hint="make some")

    monkeypatch.setattr("thinwire.maintain.Maintainer.run_once", fail)
    arguments = ["publish", lab.checkpoints[0], lab.url, "--state", lab.root / "state"]
    done = run(*arguments)
    assert done.exit_code == 0
    assert "maintenance: failed, to be tried again by the next one: no room" in done.stdout
    content = read_json(run(*arguments, "--json"))
    assert content["version"] == 2
    assert content["maintenance"]["error"]["code"] == "unavailable"


def test_publish_by_reference(lab: Lab, run: Run) -> None:
    first, second = lab.checkpoints[:2]
    state = ["--state", lab.root / "state"]
    done = run("publish", first, lab.url, *state, "--reference", first, "--step", 1)
    assert done.exit_code == 0, done.output
    assert run("publish", second, lab.url, *state).exit_code == 0
    versions = read_json(run("log", lab.url, "--json"))["versions"]
    assert [version["kind"] for version in versions] == ["delta", "reference"]
    assert versions[1]["payload_bytes"] < 2_000
    folder = lab.root / "folder"
    without = run("follow", lab.url, folder, "--once", "--json")
    assert without.exit_code == 5
    assert "--base" in without.stderr
    assert run("follow", lab.url, folder, "--once", "--base", first).exit_code == 0
    assert (folder / "model.safetensors").read_bytes() == lab.weights(2)
    assert run("fsck", lab.url, "--deep", "--base", first).exit_code == 0
    late = run("publish", first, lab.url, *state, "--reference", first)
    assert late.exit_code == 2


def test_cat_from_a_stream_by_reference(lab: Lab, run: Run) -> None:
    first, second = lab.checkpoints[:2]
    with Publisher(lab.url, lab.root / "state", maintain=False) as publisher:
        publisher.publish_reference(str(first))
        publisher.publish(second)
    found = run("cat", lab.url, "large", "--base", first)
    assert found.exit_code == 0, found.stderr
    assert found.stdout_bytes == lab.tensor(2, "large")


def test_log(stream: Lab, run: Run) -> None:
    lines = run("log", stream.url).stdout.splitlines()
    assert lines[0].startswith(f"{stream.url}: version 3, ")
    assert lines[2].split() == ["version", "step", "age", "bytes", "changed", "%", "kind", "signer"]
    assert [line.split()[0] for line in lines[3:]] == ["3", "2", "1"]
    assert lines[-1].split()[-3:] == ["-", "anchor", "-"]
    limited = read_json(run("log", stream.url, "--limit", 2, "--json"))
    assert [version["version"] for version in limited["versions"]] == [3, 2]
    assert limited["pending_lineage"] is None


def test_log_of_an_empty_stream(lab: Lab, run: Run) -> None:
    assert run("log", lab.url).exit_code == 5
    Publisher(lab.url, lab.root / "state", maintain=False).close()
    assert "nothing was published yet" in run("log", lab.url).stdout
    assert read_json(run("log", lab.url, "--json"))["versions"] == []


@pytest.mark.parametrize("name", ["large", "blocks[0].w*", "small"])
def test_cat(name: str, stream: Lab, run: Run) -> None:
    for number in range(1, VERSIONS + 1):
        found = run("cat", stream.url, name, "--version", number)
        assert found.exit_code == 0, found.stderr
        assert found.stdout_bytes == stream.tensor(number, name)
    out = stream.root / "out.bin"
    cache = ["--cache", stream.root / "cache"]
    assert run("cat", stream.url, name, "-o", out, *cache).exit_code == 0
    assert out.read_bytes() == stream.tensor(VERSIONS, name)
    assert run("cat", stream.url, name, "-o", out).exit_code == 5
    content = read_json(
        run("cat", stream.url, name, "-o", out, "--overwrite", "--version", 1, "--json")
    )
    assert out.read_bytes() == stream.tensor(1, name)
    assert (content["tensor"], content["version"], content["step"]) == (name, 1, 10)
    assert content["size_bytes"] == out.stat().st_size
    assert content["dtype"] in ("BF16", "F32")
    assert len(content["first_values"]) == min(8, np.prod(content["shape"]))
    assert re.fullmatch("[0-9a-f]{16}", content["digest"])


def test_cat_on_a_terminal(stream: Lab) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "thinwire", "cat", stream.url, "large"]
    subprocess.run(command, stdout=theirs, timeout=WITHIN_S, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    assert shown[0] == "large at version 3: BF16 300x250, 150,000 bytes"
    assert re.fullmatch("digest [0-9a-f]{16}", shown[1])
    assert len(shown[2].split()) == 9


def test_cat_of_nothing(stream: Lab, run: Run) -> None:
    done = run("cat", stream.url, "nothing", "--json")
    assert done.exit_code == 5
    assert read_json(done)["error"]["context"] == {"tensor": "nothing"}
    assert run("cat", stream.url, "large", "--version", 9).exit_code == 5


def test_maintain(lab: Lab, run: Run) -> None:
    publish_some(lab, 1, 9)
    arguments = ["maintain", lab.url, "--work-dir", lab.root / "work"]
    content = read_json(run(*arguments, "--json"))
    assert content["merge_count"] >= 1
    assert content["is_other"] is False
    assert run(*arguments).stdout == "nothing was due\n"
    assert run("fsck", lab.url, "--deep").exit_code == 0
    folder = lab.root / "folder"
    assert run("follow", lab.url, folder, "--once").exit_code == 0
    assert (folder / "model.safetensors").read_bytes() == lab.weights(9)


def test_maintain_of_nothing(lab: Lab, run: Run) -> None:
    done = run("maintain", lab.url, "--work-dir", lab.root / "work", "--json")
    assert done.exit_code == 5
    assert json.loads(done.stdout)["error"]["code"] == "not-found"


def test_maintain_watches_until_sigterm(lab: Lab) -> None:
    publish_some(lab, 1, 9)
    options = ["--work-dir", lab.root / "work", "--watch", "--every", 0.1, "--json"]
    with running("maintain", lab.url, *options, "--metrics-port", 0, "--log-level", "info") as it:
        at = it.log("metrics")["at"]
        made = json.loads(it.line())
        assert (made["kind"], made["object_count"]) == ("merge", 1)
        assert made["payload_bytes"] > 0
        with urlopen(at, timeout=WITHIN_S) as response:
            scraped = response.read().decode()
        assert 'thinwire_maintained_objects_total{kind="merge"' in scraped
        assert "thinwire_version{" not in scraped
        assert it.terminate() == 0


def test_fsck(stream: Lab, run: Run) -> None:
    content = read_json(run("fsck", stream.url, "--deep", "--json"))
    assert (content["is_whole"], content["problems"]) == (True, [])
    assert (content["version_count"], content["rebuilt_count"]) == (VERSIONS, VERSIONS)
    plain = run("fsck", stream.url, "--work-dir", stream.root / "work")
    assert plain.exit_code == 0
    assert plain.stdout.count("\n") == 1
    assert "is whole; 3 versions in 1 lineage" in plain.stdout


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_fsck_of_a_damaged_stream(damage: str, stream: Lab, run: Run) -> None:
    shards = sorted(stream.store.glob("*/deltas/*/*.tw"))
    assert len(shards) == VERSIONS - 1
    for shard in shards:
        if damage == "flip":
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
        else:
            shard.unlink()
    plain = run("fsck", stream.url)
    assert plain.exit_code == 6
    lines = plain.stdout.splitlines()
    assert len(lines) == len(shards) + 1
    code = {"flip": "checksum-mismatch", "remove": "not-found"}[damage]
    assert all(line.endswith(f"[{code}]") for line in lines[:-1])
    assert "NOT whole: 2 problems" in lines[-1]
    content = read_json(run("fsck", stream.url, "--json"))
    assert content["is_whole"] is False
    assert [problem["code"] for problem in content["problems"]] == [code] * 2


def test_fsck_of_nothing(lab: Lab, run: Run) -> None:
    assert run("fsck", lab.url).exit_code == 5
