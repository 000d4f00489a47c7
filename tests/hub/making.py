"""Real streams in folders, and a real hub that listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from thinwire.follow import open_stream
from thinwire.hub import FleetLimits, Hub, HubLimits
from thinwire.publish import Publisher
from thinwire.report.messages import Heartbeat, UpdateNote, VersionNote
from thinwire.web import Limits, Listener, Role, Tokens

LINEAGE = "0123456789abcdef" * 2
OTHER = "f" * 32
# Nobody is lost because the machine that runs the tests is busy.
PATIENT = HubLimits(fleet=FleetLimits(interval_s=60, settle_s=0))
TOKENS = {
    Role.READ: "read-0123456789abcdef",
    Role.FOLLOW: "follow-0123456789abcdef",
    Role.PUBLISH: "publish-0123456789abcdef",
}


class Trainer:
    """Publishes versions of a model of a few hundred words."""

    def __init__(self, folder: Path, name: str = "policy", **options: Any) -> None:
        self.url = str(folder / name)
        self._copy = folder / f"{name}-copy"
        self._weights = np.arange(400, dtype=np.float16)
        self._count = 0
        self._options = options
        self._publisher = self._open()

    def publish(self, step: int | None = None, **metadata: Any) -> int:
        """Publish one more version; its number."""
        self._weights[self._count % 400] += 1
        self._count += 1
        found = self._publisher.publish({"w": self._weights}, step=step, metadata=metadata)
        return found.version

    def begin_again(self) -> None:
        """Go on in a new lineage."""
        self._publisher.close()
        self._publisher = self._open(new_lineage=True)

    def close(self) -> None:
        self._publisher.close()

    def _open(self, **options: Any) -> Publisher:
        stream = open_stream(self.url, **self._options)
        return Publisher(stream, self._copy, maintain=False, **options)


@contextmanager
def training(folder: Path, name: str = "policy", **options: Any) -> Iterator[Trainer]:
    trainer = Trainer(folder, name, **options)
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def listening(hub: Hub, limits: Limits | None = None) -> Iterator[str]:
    """A hub at a URL."""
    listener = Listener(hub.app, "127.0.0.1", 0, limits=limits)
    thread = threading.Thread(target=listener.run)
    with hub:
        thread.start()
        try:
            yield listener.url
        finally:
            hub.let_go()
            listener.stop()
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def calling(hub: Hub, token: str = "") -> Iterator[httpx.Client]:
    """A client of a hub that listens."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with listening(hub) as url, httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        yield client


def known_tokens() -> Tokens:
    return Tokens({token: role for role, token in TOKENS.items()})


def until(holds: Callable[[], Any], what: str = "it") -> Any:
    """Wait until something holds; what it is then."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        if found := holds():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come")


def head_at(client: httpx.Client, version: int, name: str = "policy") -> Any:
    """The stream's status, once its head is a version."""

    def look() -> Any:
        status = client.get(f"/v1/streams/{name}").json()
        head = status["head"]
        return status if head is not None and head["version"] == version else None

    return until(look, f"version {version}")


def note(version: int, step: int | None = None, lineage: str = LINEAGE, **more: Any) -> VersionNote:
    facts: dict[str, Any] = {
        "kind": "delta",
        "created_ms": 1000 * version,
        "payload_bytes": 10,
        "raw_bytes": 1000,
        "changed_count": 1,
        "word_count": 500,
    }
    return VersionNote(lineage=lineage, version=version, step=step, **{**facts, **more})


def beat(replica: str = "a", version: int = 0, **more: Any) -> Heartbeat:
    facts: dict[str, Any] = {"lineage": LINEAGE if version else "", "is_ready": version > 0}
    return Heartbeat(replica=replica, version=version, **{**facts, **more})


def update(version: int, ended_ms: int = 1) -> UpdateNote:
    return UpdateNote(version=version, ended_ms=ended_ms)
