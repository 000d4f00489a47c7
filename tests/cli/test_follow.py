"""follow: to where, under which conditions, and until when."""

from __future__ import annotations

import json
import os
import re
import signal
from urllib.request import urlopen

import pytest

from thinwire.cli.signals import stopped_by_signals

from .conftest import Run, read_json
from .streams import VERSIONS, WITHIN_S, Lab, publish_some, running


def test_follow_once_json_is_a_line(stream: Lab, run: Run) -> None:
    done = run("follow", stream.url, stream.root / "folder", "--once", "--json")
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 1
    content = read_json(done)
    assert (content["version"], content["step"]) == (VERSIONS, 10 * VERSIONS)
    assert content["age_s"] >= 0
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [e["version"] for e in events if e["event"] == "applied"] == [1, 2, 3]
    assert all(e["level"] and e["timestamp"] for e in events)


def test_follow_to_a_version_and_back(stream: Lab, run: Run) -> None:
    folder = stream.root / "folder"
    weights = folder / "model.safetensors"
    assert run("follow", stream.url, folder, "--version", 2).exit_code == 0
    assert weights.read_bytes() == stream.weights(2)
    assert run("follow", stream.url, folder, "--once").exit_code == 0
    back = run("follow", stream.url, folder, "--version", 1, "--json")
    assert back.exit_code == 6
    assert json.loads(back.stdout)["error"]["code"] == "lineage-changed"
    assert weights.read_bytes() == stream.weights(3)
    assert run("follow", stream.url, folder, "--version", 1, "--reset").exit_code == 0
    assert weights.read_bytes() == stream.weights(1)
    ahead = run("follow", stream.url, folder, "--version", 4)
    assert ahead.exit_code == 5
    assert "no version 4" in ahead.stderr


def test_follow_verify_mends(stream: Lab, run: Run) -> None:
    folder = stream.root / "folder"
    weights = folder / "model.safetensors"
    assert run("follow", stream.url, folder, "--once", "--verify").exit_code == 0
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    mended = run("follow", stream.url, folder, "--once", "--verify")
    assert mended.exit_code == 0
    assert '"mended"' in mended.stderr
    assert weights.read_bytes() == stream.weights(VERSIONS)


def test_follow_some_tensors(stream: Lab, run: Run) -> None:
    folder, cache = stream.root / "folder", stream.root / "cache"
    options = ["--tensors", "lar*", "--cache", cache, "--cache-limit", "1MiB"]
    more = ["--memory-limit", "16MiB", "--poll", 0.1]
    done = run("follow", stream.url, folder, "--once", *options, *more)
    assert done.exit_code == 0, done.output
    data = (folder / "model.safetensors").read_bytes()
    assert stream.tensor(VERSIONS, "large") in data
    assert b"blocks" not in data
    assert any(cache.glob("??/*"))
    other = run("follow", stream.url, folder, "--once")
    assert other.exit_code == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--timeout", 3],
        ["--once", "--verify", "--tensors", "x"],
        ["--once", "--memory-limit", "1kB"],
        ["--once", "--trust", "abc"],
        ["--once", "--tensors", ""],
    ],
)
def test_follow_refuses_what_makes_no_sense(options: list[object], stream: Lab, run: Run) -> None:
    done = run("follow", stream.url, stream.root / "folder", *options, "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["code"] == "invalid-argument"


def test_follow_waits_no_longer_than_it_may(lab: Lab, run: Run) -> None:
    folder = lab.root / "folder"
    arguments = ["follow", lab.url, folder, "--once", "--json"]
    assert run(*arguments).exit_code == 5
    late = run(*arguments, "--timeout", 0.05, "--poll", 0.01)
    assert late.exit_code == 6
    assert json.loads(late.stdout)["error"]["code"] == "deadline"
    publish_some(lab, 1, 2)
    assert run(*arguments, "--version", 2, "--timeout", 30).exit_code == 0
    late = run(*arguments, "--version", 3, "--timeout", 0.05, "--poll", 0.01)
    assert late.exit_code == 6
    assert "had no version 3 within" in late.stderr


def test_follow_until_sigterm(lab: Lab) -> None:
    folder = lab.root / "folder"
    options = ["--poll", 0.05, "--json", "--metrics-port", 0]
    with running("follow", lab.url, folder, *options) as follower:
        at = follower.log("metrics")["at"]
        assert at.startswith("http://127.0.0.1:")
        follower.log("following")
        for number in (1, 2):
            publish_some(lab, number, number)
            content = json.loads(follower.line())
            assert (content["version"], content["step"]) == (number, 10 * number)
            assert (folder / "model.safetensors").read_bytes() == lab.weights(number)
        with urlopen(at, timeout=WITHIN_S) as response:
            scraped = response.read().decode()
        assert f'thinwire_version{{url="{lab.url}"}} 2.0' in scraped
        assert re.search(r"thinwire_applied_versions_total\{.*kind=\"delta\".*\} 1\.0", scraped)
        assert follower.terminate() == 0
        follower.log("stopped")
        assert follower.stdout.empty()


def test_a_signal_while_waiting(lab: Lab) -> None:
    arguments = [lab.url, lab.root / "folder", "--once", "--timeout", WITHIN_S, "--poll", 30]
    with running("follow", *arguments) as follower:
        follower.log("following")
        assert follower.terminate() == 130


def test_a_second_signal_interrupts() -> None:
    calls = []
    before = signal.getsignal(signal.SIGTERM)

    def be_told_twice() -> None:
        with stopped_by_signals(lambda: calls.append(1)) as event:
            os.kill(os.getpid(), signal.SIGTERM)
            assert event.wait(WITHIN_S)
            os.kill(os.getpid(), signal.SIGINT)
            event.clear()
            event.wait(WITHIN_S)

    with pytest.raises(KeyboardInterrupt):
        be_told_twice()
    assert calls == [1]
    assert signal.getsignal(signal.SIGTERM) == before


def test_lineages(stream: Lab, run: Run) -> None:
    folder, state = stream.root / "folder", stream.root / "state"
    assert run("follow", stream.url, folder, "--once").exit_code == 0
    arguments = ["publish", stream.checkpoints[0], stream.url, "--state", state]
    assert run(*arguments, "--new-lineage", "--no-maintain").exit_code == 0
    plain = run("log", stream.url).stdout
    assert re.search(r"^ +4 .*anchor, new lineage", plain, re.MULTILINE)
    versions = read_json(run("log", stream.url, "--json"))["versions"]
    assert [v["version"] for v in versions] == [4, 3, 2, 1]
    assert [v["is_new_lineage"] for v in versions] == [True, False, False, False]
    assert versions[0]["lineage"] != versions[1]["lineage"]
    refused = run("follow", stream.url, folder, "--once")
    assert refused.exit_code == 6
    assert "--accept-new-lineages" in refused.stderr
    assert run("follow", stream.url, folder, "--once", "--accept-new-lineages").exit_code == 0
    assert (folder / "model.safetensors").read_bytes() == stream.weights(1)


def test_a_command_runs_while_the_folder_rests(lab: Lab, run: Run) -> None:
    publish_some(lab, 1, 2)
    seen = lab.root / "seen"
    script = lab.root / "reload.sh"
    script.write_text(
        f'#!/bin/sh\necho "$THINWIRE_VERSION $THINWIRE_FOLDER" >> {seen}\necho noise\n'
    )
    script.chmod(0o755)
    done = run("follow", lab.url, lab.root / "f", "--once", "--json", "--exec", script)
    assert done.exit_code == 0
    assert read_json(done)["version"] == 2
    assert seen.read_text() == f"2 {(lab.root / 'f').absolute()}\n"
    # Found out before anything is fetched for it; but what goes away later is told, and goes by.
    # It may be mounted later: only with the exit code 2 does systemd give up.
    done = run("follow", lab.url, lab.root / "g", "--once", "--exec", "/no/such/command")
    assert done.exit_code == 5
    assert not (lab.root / "g").exists()
    script.write_text("#!/no/such/shell\n")
    done = run("follow", lab.url, lab.root / "g", "--once", "--exec", script)
    assert done.exit_code == 0
    assert "exec failed" in done.stderr
