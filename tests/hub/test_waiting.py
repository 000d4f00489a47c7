"""Followers are woken: by events, by long polls, by signals; slow ones hold up nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from thinwire.hub import Hub, HubLimits, events
from thinwire.hub.events import Ended, Fanout, Message, TooMany

from .making import OTHER, Trainer, beat, calling, head_at, listening, training, until

STREAM = "/v1/streams/policy"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with training(tmp_path) as made:
        yield made


class Events:
    """Reads a stream's events in a thread."""

    def __init__(self, client: httpx.Client, query: str = "") -> None:
        self._path = f"{STREAM}/events{query}"
        self.found: list[tuple[str, str, Any]] = []
        self.text = ""
        self._client = client
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(httpx.HTTPError), self._client.stream("GET", self._path) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            kind = place = ""
            for line in answer.iter_lines():
                self.text += line + "\n"
                name, _, value = line.partition(": ")
                if name == "event":
                    kind, place = value, ""
                elif name == "id":
                    place = value
                elif name == "data":
                    self.found.append((kind, place, json.loads(value)))

    def versions(self) -> list[int]:
        return [data["version"] for kind, _, data in self.found if kind == "version"]


@contextmanager
def hub_of(trainer: Trainer, **options: Any) -> Iterator[httpx.Client]:
    hub = Hub({"policy": trainer.url}, **{"poll_s": 0.05, **options})
    with calling(hub) as client:
        yield client


def wait(client: httpx.Client, **query: Any) -> httpx.Response:
    return client.get(f"{STREAM}/wait", params=query)


def test_events(trainer: Trainer) -> None:
    trainer.publish()
    with hub_of(trainer) as client:
        head = head_at(client, 1)["head"]
        heard, only = Events(client), Events(client, "?only=versions")
        until(lambda: heard.versions() == only.versions() == [1])
        assert heard.found[0][1] == f"{head['lineage']}-1"
        assert heard.found[0][2] == head
        for _ in range(5):
            trainer.publish()
        until(lambda: heard.versions() == [1, 2, 3, 4, 5, 6])
        client.post(f"{STREAM}/heartbeats", json={"replica": "a"})
        client.post(f"{STREAM}/heartbeats", json={"replica": "b"})
        until(lambda: any(kind == "replicas" for kind, _, _ in heard.found))
        changed = [data["changed"] for kind, _, data in heard.found if kind == "replicas"]
        assert sum(changed) in (1, 2)
        assert {kind for kind, _, _ in only.found} == {"version"}
        until(lambda: client.get("/metrics").text.count('kind="events",stream="policy"} 2.0'))


def test_a_long_poll_is_woken(trainer: Trainer) -> None:
    with hub_of(trainer) as client:
        assert wait(client, timeout_s=0).status_code == 204
        answers: list[httpx.Response] = []
        waiter = threading.Thread(target=lambda: answers.append(wait(client, timeout_s=60)))
        waiter.start()
        until(lambda: client.get("/metrics").text.count('kind="wait",stream="policy"} 1.0'))
        trainer.publish()
        waiter.join(30)
        note = answers[0].json()
        assert (answers[0].status_code, note["version"]) == (200, 1)
        # What is there is told at once to those who know less, and to nobody else.
        assert wait(client, after=0, timeout_s=60).json() == note
        known = {"lineage": note["lineage"], "after": 1}
        assert wait(client, **known, timeout_s=0.05).status_code == 204
        # A follower may be faster than the hub: it is not told of an older version.
        assert wait(client, lineage=note["lineage"], after=2, timeout_s=0.05).status_code == 204
        # A lineage that the hub does not know: told, but not so that it would ask without end.
        began_s = time.monotonic()
        assert wait(client, lineage=OTHER, after=9, timeout_s=60).json() == note
        assert time.monotonic() - began_s >= 0.9


def test_a_signal_wakes_a_hub_that_hardly_polls(trainer: Trainer) -> None:
    trainer.publish()
    with hub_of(trainer, poll_s=3600) as client:
        head_at(client, 1)
        trainer.publish()
        assert client.post(f"{STREAM}/signal", json={}).status_code == 202
        lineage = head_at(client, 2)["head"]["lineage"]
        # What a signal says is no more than a reason to look.
        said = {"lineage": "e" * 32, "version": 99}
        assert client.post(f"{STREAM}/signal", json=said).status_code == 202
        trainer.publish()
        client.post(f"{STREAM}/signal", json={"lineage": lineage, "version": 3})
        assert head_at(client, 3)["head"]["lineage"] == lineage
        # A replica that is further than the hub is one as well.
        trainer.publish()
        ahead = beat("a", 4, lineage=lineage)
        client.post(f"{STREAM}/heartbeats", json={"replica": ahead.replica, "version": 4})
        head_at(client, 4)


def test_a_new_lineage_and_another_stream(trainer: Trainer, tmp_path: Path) -> None:
    for _ in range(3):
        trainer.publish()
    with hub_of(trainer) as client:
        first = head_at(client, 3)["head"]
        heard = Events(client)
        trainer.begin_again()
        trainer.publish()
        second = head_at(client, 4)["head"]
        assert first["lineage"] != second["lineage"]
        until(lambda: heard.versions() == [3, 4])
        versions = client.get(f"{STREAM}/versions").json()["versions"]
        assert [one["version"] for one in versions] == [4, 3, 2, 1]


def test_too_many_listeners(trainer: Trainer) -> None:
    with hub_of(trainer, limits=HubLimits(listeners=1)) as client:
        heard = Events(client)
        until(lambda: ": hello" in heard.text)
        assert wait(client, timeout_s=1).status_code == 429
        assert client.get(f"{STREAM}/events").status_code == 429
        assert client.get(STREAM).status_code == 200


def test_whoever_goes_is_not_kept(trainer: Trainer) -> None:
    hub = Hub({"policy": trainer.url}, poll_s=0.05)
    with listening(hub) as url, httpx.Client(base_url=url) as client:
        host, port = urlsplit(url).hostname, urlsplit(url).port
        for path in ("events", "wait?timeout_s=60"):
            connections = []
            for _ in range(20):
                connection = socket.create_connection((host, port))
                request = f"GET {STREAM}/{path} HTTP/1.1\r\nhost: localhost\r\n\r\n"
                connection.sendall(request.encode())
                connections.append(connection)
            kind = "events" if path == "events" else "wait"
            gauge = f'thinwire_hub_listeners{{kind="{kind}",stream="policy"}}'
            until(lambda gauge=gauge: f"{gauge} 20.0" in client.get("/metrics").text)
            for connection in connections:
                connection.close()
            until(lambda gauge=gauge: f"{gauge} 0.0" in client.get("/metrics").text)


def test_a_slow_reader_is_dropped_and_holds_up_nobody() -> None:
    async def run() -> None:
        fanout = Fanout(10, lambda: None)
        slow, quick = fanout.listen(), fanout.listen()
        for number in range(1, 201):
            fanout.announce(Message(number, b"%d\n" % number))
            if number % 10 == 0:
                data = await quick.next()
                assert data is not None
                assert data.endswith(b"%d\n" % number)
        assert await slow.next() is None
        assert await slow.next() is None
        fanout.leave(slow)
        assert fanout.listening_count == 1

    asyncio.run(run())


def test_listeners_hear_that_the_hub_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "TICK_S", 0.001)
    ticks = []

    async def run() -> None:
        fanout = Fanout(10, lambda: ticks.append(1))
        listener = fanout.listen()
        for _ in range(2):
            assert await listener.next() == b": alive\n\n"
        fanout.note_replicas(2)
        assert await listener.next() == b'event: replicas\ndata: {"changed":2}\n\n'
        fanout.end()
        assert await listener.next() is None
        with pytest.raises(Ended):
            fanout.listen()

    asyncio.run(run())
    assert len(ticks) >= 30


def test_a_version_is_told_once_and_in_order() -> None:
    async def run() -> None:
        fanout = Fanout(10, lambda: None)
        late = fanout.listen()
        # It began with the head; what is announced of that and before comes too late.
        late.put(Message(5, b"5"))
        for number in (4, 5, 6):
            fanout.announce(Message(number, b"%d" % number))
        await asyncio.sleep(0)
        assert await late.next() == b"56"

    asyncio.run(run())


def test_a_fanout_lives_on_whichever_loop_listens() -> None:
    fanout = Fanout(1, lambda: None)
    fanout.announce(Message(1, b"nobody"))

    async def run(number: int) -> None:
        listener = fanout.listen()
        with pytest.raises(TooMany):
            fanout.wait()
        fanout.announce(Message(number, b"%d" % number))
        assert await listener.next() == b"%d" % number

    asyncio.run(run(2))
    fanout.announce(Message(3, b"nobody"))
    asyncio.run(run(4))
