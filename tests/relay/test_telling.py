"""A relay at a hub: what it says of itself, and that a wake-up brings the delta near."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from thinwire.errors import InvalidArgument
from thinwire.follow import open_stream
from thinwire.hub import Hub, Rule
from thinwire.relay.telling import Telling
from thinwire.web import Listener, Tokens

from .making import DictStore, Upstream, caught_up, data_keys, history, publish, relaying, until


@contextmanager
def a_hub(store: DictStore) -> Iterator[str]:
    import structlog

    hub = Hub(
        {"run": open_stream(store)},
        tokens=Tokens(),
        poll_s=0.05,
        history_count=100,
        rule=Rule(None),
        logger=structlog.get_logger(),
    )
    listener = Listener(hub.app, "127.0.0.1", 0)
    thread = threading.Thread(target=listener.run)
    with hub:
        thread.start()
        try:
            yield listener.url
        finally:
            hub.let_go()
            listener.stop()
            thread.join(20)


def beats(hub: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{hub}/v1/streams/run/replicas", trust_env=False).json()
    return [replica["beat"] for replica in answer["replicas"]]


def test_a_relay_is_seen_and_woken(tmp_path: Path) -> None:
    store = DictStore()
    versions = history(2)
    publish(store, tmp_path / "baseline", versions[:1])
    upstream = Upstream(store)
    with (
        a_hub(store) as hub,
        relaying(upstream, tmp_path / "cache", fetches=True, poll_s=1000.0) as relay,
    ):
        until(lambda: relay.one.watch.head)
        caught_up(relay.url, tmp_path / "f")
        telling = Telling(hub, relay.one, replica="relay-1", stream="run", region="north")
        with telling.telling():
            until(lambda: beats(hub))
            (beat,) = beats(hub)
            assert (beat["replica"], beat["kind"], beat["region"]) == ("relay-1", "relay", "north")
            assert beat["version"] == 1
            assert beat["fetched_bytes"] == upstream.bytes_of("")
            assert beat["served_bytes"] > 0
            publish(store, tmp_path / "baseline", versions[1:])
            (shard,) = data_keys(store, 2)
            until(lambda: upstream.bytes_of(shard))
        until(lambda: not beats(hub))


def test_a_hub_that_is_away(tmp_path: Path) -> None:
    store = DictStore()
    publish(store, tmp_path / "baseline", history(1))
    with relaying(store, tmp_path / "cache") as relay:
        telling = Telling("http://127.0.0.1:1", relay.one, replica="relay-1", stream="run")
        with telling.telling():
            caught_up(relay.url, tmp_path / "f")


def test_names_that_are_none(tmp_path: Path) -> None:
    with relaying(DictStore(), tmp_path / "cache") as relay:
        for names in (
            {"replica": "a b", "stream": "run"},
            {"replica": "a", "stream": ""},
            {"replica": "a", "stream": "run", "region": "?"},
        ):
            with pytest.raises(InvalidArgument):
                Telling("http://127.0.0.1:1", relay.one, **names)
