"""Hubs that lie, flood, drip, send garbage or lead elsewhere: a follower follows the stream."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.report import HubClient
from thinwire.stream.events import CaughtUp

from .hostile import HOSTILE, TOKEN, many_versions
from .making import (
    EVENTS_HEAD,
    NAME,
    WITHIN_S,
    Act,
    Asked,
    answer,
    eventually,
    heard,
    raw,
    rolling,
    say,
    training,
    version_event,
)

AT_ONCE = 12


def test_nothing_changes(tmp_path: Path) -> None:
    """All kinds side by side: what they do most is keep a client waiting."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        followed = {
            name: pool.submit(follow_beside, act, tmp_path / str(number))
            for number, (name, act) in enumerate(HOSTILE.items())
        }
    failed = {name: one.exception() for name, one in followed.items() if one.exception()}
    assert not failed


def follow_beside(act: Act, folder: Path) -> None:
    """Follow a stream whose hub does this to everybody."""
    folder.mkdir()
    with (
        training(folder) as trainer,
        raw(events=act, heartbeats=act, wait=act, r1=act) as hub,
    ):
        trainer.publish()
        client = HubClient(hub.url, NAME, replica="r1", token=TOKEN, timeout_s=0.5)
        with rolling(trainer.url, folder / "f", client, poll_s=0.02) as rollout:
            eventually(lambda: hub.of("events") and hub.of("heartbeats"))
            rollout.reaches(1)
            trainer.publish()
            rollout.reaches(2)
            assert rollout.holds(trainer)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_token_goes_nowhere_else(status: int, tmp_path: Path) -> None:
    with training(tmp_path) as trainer, raw() as elsewhere:
        trainer.publish()
        leading = answer(status, location=f"{elsewhere.url}/v1/streams/run/heartbeats")
        with raw(events=leading, heartbeats=leading, wait=leading, r1=leading) as hub:
            client = HubClient(hub.url, NAME, replica="r1", token=TOKEN)
            with rolling(trainer.url, tmp_path / "f", client, poll_s=0.02) as rollout:
                rollout.reaches(1)
                eventually(lambda: hub.of("wait") and len(hub.of("heartbeats")) >= 2)
            for asked in hub.asked:
                assert asked.headers["authorization"] == f"Bearer {TOKEN}"
        assert elsewhere.connection_count == 0


def test_proxies_of_the_environment_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path) as trainer, raw() as proxy, raw(heartbeats=heard()) as hub:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        trainer.publish()
        client = HubClient(hub.url, NAME, replica="r1", token=TOKEN)
        with rolling(trainer.url, tmp_path / "f", client, poll_s=0.02) as rollout:
            rollout.reaches(1)
            eventually(lambda: hub.of("heartbeats"))
        assert proxy.connection_count == 0


def test_lies_cause_few_looks(tmp_path: Path) -> None:
    """Ten thousand versions that do not exist, where nothing else makes it look."""
    told = threading.Event()

    def act(found: socket.socket, asked: Asked) -> None:
        found.sendall(EVENTS_HEAD)
        for _, event in zip(range(10_000), many_versions(), strict=False):
            found.sendall(event)
        told.set()

    with training(tmp_path) as trainer, raw(events=act, heartbeats=heard()) as hub:
        trainer.publish()
        client = HubClient(hub.url, NAME, replica="r1")
        with rolling(trainer.url, tmp_path / "f", client) as rollout:
            rollout.reaches(1)
            assert told.wait(WITHIN_S)
            looks = [event for event in rollout.events if isinstance(event, CaughtUp)]
            # By time at most one a second, and fewer with each lie: see test_decisions.py.
            assert len(looks) < 20
            assert rollout.expectations[-1:] != [True]


def test_a_hub_that_keeps_silent_about_versions_is_not_relied_on(tmp_path: Path) -> None:
    """It says that it is alive, and nothing of a version that is there: looks become frequent."""
    with training(tmp_path) as trainer:
        lineage = trainer.publish().lineage
        act = say(EVENTS_HEAD, version_event(lineage, 1))
        with raw(events=act, heartbeats=heard()) as hub:
            client = HubClient(hub.url, NAME, replica="r1")
            with rolling(trainer.url, tmp_path / "f", client, poll_s=0.02) as rollout:
                rollout.reaches(1)
                eventually(lambda: rollout.expectations[-1:] == [True])
                trainer.publish()
                # What the rare look finds half a minute later.
                rollout.follower.wake()
                rollout.reaches(2)
                eventually(lambda: rollout.expectations[-1:] == [False])
                trainer.publish()
                rollout.reaches(3)


def test_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = answer(500, b"secret-of-the-hub")
    with (
        training(tmp_path) as trainer,
        raw(events=failing, heartbeats=failing, wait=failing) as hub,
    ):
        trainer.publish()
        client = HubClient(hub.url, NAME, replica="r1", token=TOKEN)
        with rolling(trainer.url, tmp_path / "f", client, poll_s=0.02) as rollout:
            rollout.reaches(1)
            eventually(lambda: len(hub.of("heartbeats")) >= 3 and len(hub.of("events")) >= 2)
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "heartbeats fail" in line]) == 1
    assert len([line for line in lines if "wake-ups fail" in line]) == 1
    assert "secret-of-the-hub" not in caplog.text
    assert TOKEN not in caplog.text


def test_nobody_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with training(tmp_path) as trainer:
        trainer.publish()
        client = HubClient(url, NAME, replica="r1")
        with rolling(trainer.url, tmp_path / "f", client, poll_s=0.02) as rollout:
            rollout.reaches(1)
            trainer.publish()
            rollout.reaches(2)
            eventually(lambda: "Connection refused" in caplog.text)
