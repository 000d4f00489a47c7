"""A publisher that tells a hub of its versions, and is never held up by one."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import InvalidArgument
from thinwire.report import HubNotifier
from thinwire.stream.events import Published, Refused

from .making import NAME, WITHIN_S, Asked, answer, eventually, raw, say, training

TOKEN = "publish-token-0123456789"


def published(version: int) -> Published:
    facts: dict[str, Any] = {"step": 1, "payload_bytes": 1, "raw_bytes": 1, "changed_count": 1}
    return Published(url="u", lineage="a" * 32, version=version, wall_s=1.0, **facts)


def test_each_version_is_told(tmp_path: Path) -> None:
    with raw(signal=answer(202)) as hub, HubNotifier(hub.url, NAME, token=TOKEN) as notifier:
        with training(tmp_path, notifier) as trainer:
            for count in (1, 2):
                made = trainer.publish()
                eventually(lambda count=count: len(hub.of("signal")) == count)
                asked = hub.of("signal")[-1]
                assert asked.line == f"POST /v1/streams/{NAME}/signal HTTP/1.1"
                assert asked.headers["authorization"] == f"Bearer {TOKEN}"
                assert json.loads(asked.body) == {
                    "lineage": made.lineage,
                    "version": made.version,
                }
        # The same connection.
        assert hub.connection_count == 1


def test_the_last_one_is_told_at_the_end() -> None:
    with raw(signal=answer(202)) as hub:
        with HubNotifier(hub.url, NAME) as notifier:
            notifier.on_event(published(7))
        assert [json.loads(asked.body)["version"] for asked in hub.of("signal")] == [7]
        notifier.on_event(published(8))
        assert len(hub.of("signal")) == 1


def test_of_many_only_the_newest_matters() -> None:
    is_open = threading.Event()

    def slow(found: socket.socket, asked: Asked) -> None:
        is_open.wait(WITHIN_S)
        answer(202)(found, asked)

    with raw(signal=slow) as hub, HubNotifier(hub.url, NAME) as notifier:
        for version in range(1, 100):
            notifier.on_event(published(version))
        eventually(lambda: hub.of("signal"))
        notifier.on_event(published(100))
        is_open.set()
        eventually(lambda: json.loads(hub.asked[-1].body)["version"] == 100)
        assert len(hub.of("signal")) <= 3


def test_it_is_told_again_where_that_failed() -> None:
    acts = [answer(503), answer(202)]

    def act(found: socket.socket, asked: Asked) -> None:
        acts.pop(0)(found, asked)

    with raw(signal=act) as hub, HubNotifier(hub.url, NAME) as notifier:
        notifier.on_event(published(3))
        eventually(lambda: not acts)
        assert [json.loads(asked.body)["version"] for asked in hub.of("signal")] == [3, 3]


@pytest.mark.parametrize("status", [301, 307, 400, 401, 403, 404, 500])
def test_what_a_hub_refuses_is_said_once(
    status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with raw() as elsewhere:
        refusing = answer(status, b"secret-of-the-hub", location=elsewhere.url)
        with (
            raw(signal=refusing) as hub,
            HubNotifier(hub.url, NAME, token=TOKEN) as notifier,
            training(tmp_path, notifier) as trainer,
        ):
            for version in (1, 2, 3):
                assert trainer.publish().version == version
                eventually(lambda hub=hub: hub.of("signal"))
        assert elsewhere.connection_count == 0
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "signals fail" in line]) == 1
    assert "secret-of-the-hub" not in caplog.text
    assert TOKEN not in caplog.text


def test_a_hub_that_says_nothing_holds_nothing_up(tmp_path: Path) -> None:
    with raw(signal=say()) as hub:
        notifier = HubNotifier(hub.url, NAME, timeout_s=WITHIN_S)
        with training(tmp_path, notifier) as trainer:
            for version in (1, 2, 3):
                assert trainer.publish().version == version
        notifier.close(0.1)
        assert notifier._thread is not None
        notifier._thread.join(WITHIN_S)
        assert not notifier._thread.is_alive()


def test_what_is_not_published_starts_nothing() -> None:
    with raw() as hub, HubNotifier(hub.url, NAME) as notifier:
        notifier.on_event(Refused(url="u", lineage="", version=1, code="x", reason="y"))
        assert notifier._thread is None
    assert hub.connection_count == 0


def test_what_makes_no_sense() -> None:
    for url, stream, token in (
        ("hub", NAME, ""),
        ("http://hub", "a/b", ""),
        ("http://hub", NAME, "a\nb"),
    ):
        with pytest.raises(InvalidArgument):
            HubNotifier(url, stream, token=token)
