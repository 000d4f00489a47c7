"""Replicas that report to a real hub and are woken by it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from thinwire.errors import InvalidArgument, LineageChanged
from thinwire.publish import Publisher
from thinwire.report import HubClient, HubNotifier
from thinwire.web import Role, Tokens

from .making import (
    NAME,
    WITHIN_S,
    Asked,
    answer,
    certificate,
    eventually,
    heard,
    raw,
    rolling,
    running,
    say,
    tiny,
    training,
)

FOLLOW = "follow-token-0123456789"
PUBLISH = "publish-token-0123456789"
READ = "read-token-0123456789"


def client_of(url: str, **options: str) -> HubClient:
    return HubClient(url, NAME, **{"replica": "r1", "region": "eu", **options})


def test_woken_though_it_never_polls(tmp_path: Path) -> None:
    with training(tmp_path) as trainer, running(trainer.url) as hub:
        trainer.publish()
        with rolling(trainer.url, tmp_path / "f", client_of(hub.url)) as rollout:
            for version in (1, 2, 3):
                rollout.reaches(version)
                assert rollout.holds(trainer)
                if version < 3:
                    trainer.publish()
            beat = eventually(
                lambda: (found := hub.replica("r1")) and found["beat"].get("version") == 3 and found
            )["beat"]
            assert (beat["region"], beat["engine"], beat["step"]) == ("eu", "folder", 30)
            assert beat["is_ready"]
            assert beat["digest"] == hub.get("")["head"]["digest"]
            assert beat["fetched_bytes"] == sum(
                event.payload_bytes for event in rollout.events if hasattr(event, "cached_bytes")
            )
            updates = eventually(
                lambda: (found := hub.get("/updates")["updates"]) and len(found) >= 3 and found
            )
            assert sorted(one["version"] for one in updates)[-2:] == [2, 3]
            assert {name for one in updates for name in one["phases"]} == {"fetch", "apply"}
        # It said good-bye.
        assert hub.replica("r1") is None


def test_waits_for_the_first_version(tmp_path: Path) -> None:
    with (
        training(tmp_path) as trainer,
        running(trainer.url) as hub,
        rolling(trainer.url, tmp_path / "f", client_of(hub.url)) as rollout,
    ):
        found = eventually(lambda: hub.replica("r1"))
        assert found["state"] == "joining"
        trainer.publish()
        rollout.reaches(1)
        eventually(lambda: (hub.replica("r1") or {}).get("state") == "ready")


def test_a_hub_that_dies_and_comes_back(tmp_path: Path) -> None:
    """Without a hub it polls; a new hub knows the replica again without being asked."""
    with training(tmp_path) as trainer, running(trainer.url) as hub:
        trainer.publish()
        with rolling(trainer.url, tmp_path / "f", client_of(hub.url), poll_s=0.05) as rollout:
            rollout.reaches(1)
            eventually(lambda: rollout.expectations[-1:] == [True])
            hub.end()
            eventually(lambda: rollout.expectations[-1] is False)
            trainer.publish()
            rollout.reaches(2)
            assert rollout.holds(trainer)
            hub.begin()
            eventually(
                lambda: (hub.replica("r1") or {"beat": {}})["beat"].get("version") == 2,
                "the state is back",
            )
            eventually(lambda: rollout.expectations[-1] is True)
            trainer.publish()
            rollout.reaches(3)


def test_tokens(tmp_path: Path) -> None:
    tokens = Tokens({FOLLOW: Role.FOLLOW, PUBLISH: Role.PUBLISH, READ: Role.READ})
    with training(tmp_path) as trainer, running(trainer.url, tokens) as hub:
        notifier = HubNotifier(hub.url, NAME, token=PUBLISH)
        trainer.publish()
        with rolling(trainer.url, tmp_path / "f", client_of(hub.url, token=FOLLOW)) as rollout:
            rollout.reaches(1)
            eventually(lambda: hub.replica("r1", READ))
            trainer.publish()
            rollout.reaches(2)
        assert hub.replica("r1", READ) is None
        notifier.close()


@pytest.mark.parametrize("token", ["", READ, PUBLISH])
def test_a_token_that_does_not_do(
    token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heartbeats are refused, which is said once; following goes on."""
    tokens = Tokens({FOLLOW: Role.FOLLOW, PUBLISH: Role.PUBLISH, READ: Role.READ})
    with training(tmp_path) as trainer, running(trainer.url, tokens) as hub:
        trainer.publish()
        client = client_of(hub.url, token=token)
        with rolling(trainer.url, tmp_path / "f", client, poll_s=0.05) as rollout:
            rollout.reaches(1)
            eventually(lambda: [r for r in caplog.records if "heartbeats" in r.getMessage()])
            trainer.publish()
            rollout.reaches(2)
        lines = [r.getMessage() for r in caplog.records if "heartbeats" in r.getMessage()]
        assert len(lines) == 1
        assert "does not accept the token" in lines[0]
        if token:
            assert "of the role follow, for the replica 'r1' in the region" in lines[0]
            assert token not in caplog.text
        assert hub.get("/replicas", READ)["replicas"] == []


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate that this machine trusts, also through a good-bye."""
    tls = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
    with training(tmp_path) as trainer, running(trainer.url, tls=tls) as hub:
        assert hub.url.startswith("https:")
        trainer.publish()
        with rolling(trainer.url, tmp_path / "f", client_of(hub.url)) as rollout:
            rollout.reaches(1)
            eventually(lambda: hub.replica("r1"))
            trainer.publish()
            rollout.reaches(2)
        assert hub.replica("r1") is None


def test_a_certificate_that_nobody_trusts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The token is not told to it, and following goes on."""
    tls = certificate(tmp_path)
    with training(tmp_path) as trainer, running(trainer.url, tls=tls) as hub:
        trainer.publish()
        client = client_of(hub.url, token=FOLLOW)
        with rolling(trainer.url, tmp_path / "f", client, poll_s=0.05) as rollout:
            rollout.reaches(1)
            eventually(lambda: "its certificate is not trusted" in caplog.text)
            trainer.publish()
            rollout.reaches(2)


def test_what_ends_it_is_told(tmp_path: Path) -> None:
    """A follower that gave up is not one that left."""
    with training(tmp_path) as trainer, running(trainer.url) as hub:
        trainer.publish()
        client = client_of(hub.url)
        with rolling(trainer.url, tmp_path / "f", client, poll_s=0.05) as rollout:
            rollout.reaches(1)
            eventually(lambda: hub.replica("r1"))
            trainer.close()
            with Publisher(trainer.url, tmp_path / "other", new_lineage=True) as other:
                other.publish(tiny(9), step=0)
            eventually(lambda: rollout.error is not None)
            assert isinstance(rollout.error, LineageChanged)
        found = hub.replica("r1")
        assert found is not None
        assert found["state"] == "unready"
        assert found["beat"]["fault"]["code"] == "lineage-changed"


def test_a_replica_can_report_again(tmp_path: Path) -> None:
    with training(tmp_path) as trainer, running(trainer.url) as hub:
        trainer.publish()
        client = client_of(hub.url)
        for _ in range(2):
            with rolling(trainer.url, tmp_path / "f", client) as rollout:
                rollout.reaches(1)
                eventually(lambda: hub.replica("r1"))
                eventually(lambda rollout=rollout: rollout.expectations[-1:] == [True])
            assert rollout.expectations[-1] is False
            assert hub.replica("r1") is None


def test_it_ends_at_once(tmp_path: Path) -> None:
    """Before its first heartbeat was answered, and while nothing answers."""
    with training(tmp_path) as trainer, raw(heartbeats=say(), events=say()) as hub:
        trainer.publish()
        with rolling(trainer.url, tmp_path / "f", client_of(hub.url)) as rollout:
            rollout.reaches(1)
            eventually(lambda: hub.of("heartbeats"))
        # It may have arrived, so that a good-bye is tried all the same.
        eventually(lambda: hub.of("r1"))


def test_long_polls_where_events_do_not_come_through(tmp_path: Path) -> None:
    """As behind a proxy that holds them back: the hub's other way is taken."""
    is_published = threading.Event()
    with training(tmp_path) as trainer:
        lineage = trainer.publish().lineage

        def wait(found: socket.socket, asked: Asked) -> None:
            after = int(asked.line.partition("after=")[2].partition("&")[0])
            if after == 1:
                is_published.wait(WITHIN_S)
            if after < 2:
                note = {"lineage": lineage, "version": after + 1, "of the future": True}
                answer(200, json.dumps(note).encode())(found, asked)

        with raw(events=answer(404), wait=wait, heartbeats=heard()) as hub:
            with rolling(trainer.url, tmp_path / "f", client_of(hub.url)) as rollout:
                rollout.reaches(1)
                eventually(lambda: len(hub.of("wait")) >= 2)
                trainer.publish()
                is_published.set()
                rollout.reaches(2)
            assert f"lineage={lineage}&after=1&" in hub.of("wait")[1].line


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hub:8765", "begins with neither"),
        ("ftp://hub", "begins with neither"),
        ("http://", "names no host"),
        ("http://hub:0", "names no host, or no port"),
        ("http://hub:99999", "is not an address"),
        ("http://user:secret@hub", "has a user or a password"),
        ("http://hub?x=1", "has more than"),
        ("http://hub/\nx", "has more than"),
    ],
)
def test_urls_that_are_none(url: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        client_of(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"replica": ""},
        {"replica": "a b"},
        {"replica": "a\n"},
        {"region": "-x"},
        {"engine": "x" * 65},
    ],
)
def test_names_that_are_none(options: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="is "):
        client_of("http://hub", **options)


@pytest.mark.parametrize("token", ["a b", "a\r\nx: y", "ä" * 16])
def test_tokens_that_are_none(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client_of("http://hub", token=token)
    assert token not in str(caught.value)


def test_a_late_goodbye_is_none(tmp_path: Path) -> None:
    """By then the name may be in use again, by the next process."""
    from thinwire.report.beating import Sender
    from thinwire.report.http import Address

    with raw(r1=answer(204)) as hub:
        for within_s, count in ((0.0, 0), (-1.0, 0), (5.0, 1)):
            sender = Sender(Address.of(hub.url), NAME, hub.url, 5.0, threading.Event())
            sender.close(None, "r1", is_there=True, within_s=within_s)
            assert len(hub.of("r1")) == count


def test_a_client_that_hung_says_no_goodbye(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.report.client._END_S", 0.0)
    with training(tmp_path) as trainer, raw(heartbeats=heard(), r1=answer(204)) as hub:
        with rolling(trainer.url, tmp_path / "f", client_of(hub.url)):
            eventually(lambda: hub.of("heartbeats"))
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "thinwire-report"])
        assert hub.of("r1") == []
