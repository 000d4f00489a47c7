"""A trainer waits for its fleet; no hub, whatever is the matter with it, stops the trainer."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from thinwire.errors import AccessDenied, InvalidArgument, NotFound
from thinwire.report import HubClient, wait_until_ready
from thinwire.web import Role, Tokens

from .making import (
    NAME,
    Act,
    Asked,
    answer,
    eventually,
    not_found,
    raw,
    rolling,
    running,
    say,
    training,
)

READ = "read-token-0123456789"
FOLLOW = "follow-token-0123456789"


def test_until_replicas_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.report.ready._AGAIN_S", 0.02)
    tokens = Tokens({READ: Role.READ, FOLLOW: Role.FOLLOW})
    with training(tmp_path) as trainer, running(trainer.url, tokens) as hub:
        trainer.publish()
        eventually(lambda: hub.get("", READ)["head"])

        def ready(within_s: float, published: int = 1) -> bool:
            return wait_until_ready(
                hub.url,
                NAME,
                token=READ + "\n",
                published=published,
                max_staleness_steps=0,
                share=0.5,
                region="eu",
                within_s=within_s,
            )

        assert not ready(0.1)
        client = HubClient(hub.url, NAME, replica="r1", region="eu", token=FOLLOW)
        with rolling(trainer.url, tmp_path / "f", client):
            assert ready(30.0)
            assert not ready(0.1, published=2)
            trainer.publish()
            assert ready(30.0, published=2)
        with pytest.raises(AccessDenied, match="does not accept the token"):
            wait_until_ready(hub.url, NAME, token="x" * 20)
        with pytest.raises(NotFound, match="'nope'"):
            wait_until_ready(hub.url, "nope", token=READ)
        with pytest.raises(InvalidArgument, match="422"):
            wait_until_ready(hub.url, NAME, token=READ, share=2.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that fails once is away."""
    monkeypatch.setattr("thinwire.report.ready._AWAY_S", 0.0)


def _break_off(found: object, asked: Asked) -> None:
    raise OSError


def _hang(found: object, asked: Asked) -> None:
    threading.Event().wait(0.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "act",
    [
        answer(500),
        answer(502, b"<html>"),
        answer(503, b"Service Unavailable"),  # a proxy's, or a hub's that is full
        answer(200, b"{}"),
        say(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{"),
        say(b"SSH-2.0\r\n"),
        _break_off,
        _hang,
    ],
)
def test_a_hub_that_fails_is_no_reason_to_stop(
    act: Act, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("thinwire.report.ready._TIMEOUT_S", 0.3)
    with raw(ready=act) as hub:
        assert wait_until_ready(hub.url, NAME, token=READ)
        assert not wait_until_ready(hub.url, NAME, token=READ, without_hub=False)
    assert "going on without" in caplog.text
    assert READ not in caplog.text


def test_a_question_at_the_end_is_no_hub_that_fails() -> None:
    """What is left of the time says when to ask no more, not how long an answer may take."""
    refusal = answer(503, b'{"is_ready": false}')

    def slowly(found: socket.socket, asked: Asked) -> None:
        time.sleep(0.2)
        refusal(found, asked)

    with raw(ready=slowly) as hub:
        for within_s in (0.0, 0.1):
            assert not wait_until_ready(hub.url, NAME, within_s=within_s)
        assert len(hub.asked) == 2


def test_a_hub_that_is_started_again_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And its answer counts, not that it was away; why it is not ready is told."""
    monkeypatch.setattr("thinwire.report.ready._AGAIN_S", 0.01)
    refusal = b'{"is_ready": false, "reason": "0 of 2\\u001b are ready"}'
    acts = [say(b"SSH-2.0\r\n"), answer(502), answer(503, refusal)] * 2 + [
        answer(200, b'{"is_ready": true}')
    ]

    def next_act(found: socket.socket, asked: Asked) -> None:
        acts.pop(0)(found, asked)

    with raw(ready=next_act) as hub:
        assert wait_until_ready(hub.url, NAME, without_hub=False)
        assert not acts
        assert "going on" not in caplog.text
        acts.append(answer(503, refusal))
        assert not wait_until_ready(hub.url, NAME, within_s=0.0)
    assert "not ready in time: '0 of 2\\x1b are ready'" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_no_hub_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with raw(ready=not_found) as hub:
        url = hub.url
    assert wait_until_ready(url, NAME)
    assert "going on without" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_port_that_speaks_no_tls_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path) as trainer, running(trainer.url) as hub:
        assert wait_until_ready(hub.url.replace("http:", "https:"), NAME)
    assert "plain HTTP" in caplog.text
