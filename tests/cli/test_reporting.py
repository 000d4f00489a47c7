"""A hub, those who follow and those who publish, as processes."""

from __future__ import annotations

import json
import os
import time
from typing import Any
from urllib.request import Request, urlopen

import pytest

from thinwire.cli.reporting import TOKEN_VARIABLE
from thinwire.report import replica_name

from .conftest import Run
from .streams import WITHIN_S, Lab, publish_some, running

# A look by itself is further away than any test waits.
RARELY = ["--poll", 3600]
FOLLOW, PUBLISH = "follow-0123456789abc", "publish-0123456789abc"


def replicas(url: str) -> list[dict[str, Any]]:
    asked = Request(f"{url}/v1/streams/store/replicas")
    asked.add_header("authorization", f"Bearer {FOLLOW}")
    with urlopen(asked, timeout=WITHIN_S) as answer:
        found: list[dict[str, Any]] = json.load(answer)["replicas"]
    return found


def wait_for_replica(url: str, version: int) -> dict[str, Any]:
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        for found in replicas(url):
            if found["beat"].get("version") == version and found["state"] == "ready":
                return found
        time.sleep(0.05)
    raise AssertionError(replicas(url))


def test_the_whole_loop(lab: Lab, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing wakes who follows, who is shown; at SIGTERM in a wait it ends, and is gone."""
    folder = lab.root / "folder"
    tokens, token = lab.root / "tokens", lab.root / "token"
    tokens.write_text(f"follow {FOLLOW}\npublish {PUBLISH}\n")
    token.write_text(f"{FOLLOW}\n")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    publish_some(lab, 1, 1)
    hub = ["hub", "--stream", lab.url, "--port", 0, "--tokens", tokens, *RARELY, "--json"]
    with running(*hub) as served:
        url = json.loads(served.line())["url"]
        options = ["--hub", url, "--region", "eu", "--hub-token-file", token]
        with running("follow", lab.url, folder, *options, *RARELY, "--json") as follower:
            assert json.loads(follower.line())["version"] == 1
            found = wait_for_replica(url, 1)
            assert found["beat"]["replica"] == replica_name(folder)
            assert found["beat"]["region"] == "eu"
            # The hub is told, looks, and wakes: nothing here polls.
            monkeypatch.setenv(TOKEN_VARIABLE, PUBLISH)
            publish = ["publish", lab.checkpoints[1], lab.url, "--state", lab.root / "state"]
            done = run(*publish, "--hub", url)
            assert done.exit_code == 0, done.output
            assert json.loads(follower.line())["version"] == 2
            wait_for_replica(url, 2)
            assert follower.terminate() == 0
            assert replicas(url) == []
        assert served.terminate() == 0


def test_a_hub_that_is_away_fails_nothing(lab: Lab, run: Run) -> None:
    folder = lab.root / "folder"
    away = ["--hub", "http://127.0.0.1:1"]
    publish = ["publish", lab.checkpoints[0], lab.url, "--state", lab.root / "state", "--json"]
    done = run(*publish, *away)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["version"] == 1
    assert "signals fail" in done.stderr
    with running("follow", lab.url, folder, "--poll", 0.05, "--json", *away) as follower:
        assert json.loads(follower.line())["version"] == 1
        publish_some(lab, 2, 2)
        assert json.loads(follower.line())["version"] == 2
        assert follower.terminate() == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--region", "eu"],
        ["--replica", "r1"],
        ["--hub-stream", "x"],
        ["--hub-token-file", os.devnull],
        ["--hub", "127.0.0.1:8765"],
        ["--hub", "http://h", "--region", "a b"],
        ["--hub", "http://h", "--replica", ""],
        ["--hub", "http://h", "--hub-stream", "a/b"],
        ["--hub", "http://h", "--hub-token-file", os.devnull],
        ["--relay-token-file", os.devnull],
        ["--relay", "h:8766/x", "--relay-token-file", os.devnull],
    ],
)
def test_follow_refuses_what_makes_no_sense(options: list[object], lab: Lab, run: Run) -> None:
    done = run("follow", lab.url, lab.root / "folder", *options, "--json")
    assert done.exit_code == 2, done.output
    assert json.loads(done.stdout)["error"]["code"] == "invalid-argument"
    assert not (lab.root / "folder").exists()


def test_relay_and_hub_have_tokens_of_their_own(
    lab: Lab, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_HTTP_TOKEN", "of-another-server-012345")
    tokens, token = lab.root / "tokens", lab.root / "token"
    tokens.write_text(f"follow {FOLLOW}\n")
    token.write_text(f"{FOLLOW}\n")
    for path in (tokens, token):
        path.chmod(0o600)
    publish_some(lab, 1, 1)
    relay = ["relay", "--stream", lab.url, "--listen", "127.0.0.1:0", "--tokens", tokens]
    cache = ["--cache", lab.root / "cache", "--limit-bytes", "64MiB", "--json"]
    with running(*relay, *cache) as served:
        url = json.loads(served.line())["streams"]["store"]
        options = ["--relay", url, "--relay-token-file", token, "--once", "--json"]
        done = run("follow", lab.url, lab.root / "folder", *options)
        assert done.exit_code == 0, done.output
        asked = Request(url.replace("/store", "/metrics"))
        asked.add_header("authorization", f"Bearer {FOLLOW}")
        with urlopen(asked, timeout=WITHIN_S) as answer:
            text = answer.read().decode()
    served_bytes = next(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("thinwire_relay_served_bytes_total")
    )
    assert served_bytes > 0


def test_publish_refuses_what_makes_no_sense(lab: Lab, run: Run) -> None:
    publish = ["publish", lab.checkpoints[0], lab.url, "--state", lab.root / "state", "--json"]
    for options in (["--hub-stream", "x"], ["--hub", "ftp://h"], ["--hub", "http://a@h"]):
        done = run(*publish, *options)
        assert done.exit_code == 2, done.output
    assert not lab.store.joinpath("head.json").exists()
