"""Applications on loopback, a stream that is published to, and replicas that report to a hub."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import ml_dtypes
import msgspec
import numpy as np

from thinwire.hub import Hub
from thinwire.publish import Publisher
from thinwire.report.messages import Heartbeat, UpdateNote
from thinwire.web import Limits, Listener, Tokens

STREAM = "run"
WORDS = 4096


@contextmanager
def served(app: Any, port: int = 0, let_go: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The application's URL while it is answered; ``let_go`` ends what listeners wait for."""
    listener = Listener(app, "127.0.0.1", port, limits=Limits(stop_within_s=1))
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        yield listener.url
    finally:
        let_go()
        listener.stop()
        thread.join()


@contextmanager
def real_hub(
    stream_url: str,
    *,
    others: Mapping[str, str] | None = None,
    tokens: Tokens | None = None,
    port: int = 0,
) -> Iterator[str]:
    """A hub's URL."""
    with (
        Hub({STREAM: stream_url, **(others or {})}, tokens=tokens, poll_s=0.1) as hub,
        served(hub.app, port, hub.let_go) as url,
    ):
        yield url


class Trainer:
    """Publishes versions of a small model; step 10 for each."""

    def __init__(self, folder: Path) -> None:
        self.url = (folder / "store").as_uri()
        self._weights = np.random.default_rng(7).normal(size=WORDS).astype(ml_dtypes.bfloat16)
        self._publisher = Publisher(self.url, folder / "trainer", maintain=False)
        self.version = 0

    def publish(self, identity: str = "") -> None:
        """A version in which one word of a hundred changed."""
        self._weights = self._weights.copy()
        self._weights.view(np.uint16)[self.version :: 100] ^= 1
        self.version += 1
        metadata = {"identity": identity} if identity else None
        self._publisher.publish(
            {"weights": self._weights}, step=10 * self.version, metadata=metadata
        )

    def close(self) -> None:
        self._publisher.close()


@contextmanager
def training(folder: Path, versions: int) -> Iterator[Trainer]:
    trainer = Trainer(folder)
    try:
        for _ in range(versions):
            trainer.publish()
        yield trainer
    finally:
        trainer.close()


class Place(NamedTuple):
    """Where heartbeats go."""

    url: str
    lineage: str
    token: str = ""

    def report(self, replica: str, *, version: int = 0, **more: Any) -> None:
        """Post one, as a replica does."""
        serves = {"lineage": self.lineage, "step": 10 * version, "is_ready": True}
        beat = Heartbeat(replica, version=version, **{**(serves if version else {}), **more})
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        answer = httpx.post(
            f"{self.url}/v1/streams/{STREAM}/heartbeats",
            content=msgspec.json.encode(beat),
            headers={"Content-Type": "application/json", **headers},
        )
        assert answer.status_code == 200, answer.text


def place_at(url: str, token: str = "") -> Place:
    """Where replicas of the hub's stream report to, once it has seen a version."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for _ in range(200):
        head = httpx.get(f"{url}/v1/streams/{STREAM}", headers=headers).json()["head"]
        if head:
            return Place(url, head["lineage"], token)
        time.sleep(0.05)
    raise AssertionError("the hub has not seen the stream")


def update_to(version: int, **more: Any) -> UpdateNote:
    """An update as an engine reports it."""
    phases = {"fetch": 1.2, "stage": 0.4, "pause": 0.05, "attach": 0.2, "prove": 0.1}
    fields = {"phases": phases, "pause_s": 0.3, "fetched_bytes": 1234, **more}
    return UpdateNote(version, int(1000 * time.time()), **fields)
