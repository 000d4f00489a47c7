"""A hub and a relay for tests, behind sockets, and patience."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from thinwire.follow import Stream
from thinwire.hub import Hub
from thinwire.relay.relay import Folders, StreamRelay
from thinwire.relay.server import RelayApp
from thinwire.store import Store
from thinwire.web import Listener, Role, Tokens

READ, FOLLOW = "a-token-that-reads", "a-token-that-follows"


@contextmanager
def hub_at(stream: Stream | str, port: int = 0) -> Iterator[str]:
    """A hub that knows one stream as ``policy``; yields its URL."""
    tokens = Tokens({READ: Role.READ, FOLLOW: Role.FOLLOW})
    with (
        Hub({"policy": stream}, tokens=tokens, poll_s=0.05) as hub,
        listening(hub.app, port) as url,
    ):
        yield url


@contextmanager
def relay_at(store: Store, folder: Path) -> Iterator[str]:
    """A relay of one stream, called ``policy``; yields its URL."""
    relay = StreamRelay("policy", store, Folders.at(folder, 64 << 20), poll_s=0.05)
    with listening(RelayApp([relay], Tokens())) as url:
        relay.start()
        try:
            yield f"{url}/policy"
        finally:
            relay.stop()


@contextmanager
def listening(app: Any, port: int = 0) -> Iterator[str]:
    """An application behind a socket; yields its URL."""
    listener = Listener(app, "127.0.0.1", port)
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        yield listener.url
    finally:
        listener.stop()
        thread.join()


def until(holds: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Wait until it holds; fail the test if it does not in time."""
    give_up_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > give_up_s:
            pytest.fail(f"not within {within_s} s: {what}")
        time.sleep(0.02)
