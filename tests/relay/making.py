"""Relays that really listen, before stores of which everything is counted and can be broken."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what rooms share

from stream_units.making import DictStore, bits, held, history, maintained, publisher, stepped
from thinwire.errors import Unavailable
from thinwire.follow import Follower, open_stream
from thinwire.relay.relay import Folders, StreamRelay
from thinwire.relay.server import RelayApp
from thinwire.store import Entry, Store, StoreWrapper
from thinwire.stream.encoding import encode, parse, sign
from thinwire.stream.places import Place, objects_of, place_of
from thinwire.stream.records import Manifest, Policy
from thinwire.stream.signing import SigningKey
from thinwire.web import Listener, Tokens

__all__ = ["DictStore", "bits", "held", "history", "maintained", "publisher", "stepped"]

KEY = SigningKey.generate()
STRANGER = SigningKey.generate()
LIMIT_BYTES = 64 << 20


class Upstream(StoreWrapper):
    """A store that counts what is taken from each key, and can be away, hang, or lie."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.log: list[tuple[str, str, int]] = []
        self.is_away = False
        self.hanging = threading.Event()
        self.hanging.set()
        self.change: Callable[[str, bytes], bytes] = lambda key, data: data
        self.before: Callable[[str, str], None] = lambda operation, key: None

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        self._arrive("get", key)
        return self._leave("get", key, super().get(key, limit_bytes=limit_bytes))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._arrive("get_range", key)
        return self._leave("get_range", key, super().get_range(key, start, stop))

    def put(self, key: str, data: bytes) -> None:
        self._arrive("put", key)
        self.log.append(("put", key, 0))
        super().put(key, data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        self._arrive("list", prefix)
        yield from super().list(prefix, after=after)

    def bytes_of(self, part: str) -> int:
        """What was taken from keys that hold ``part``."""
        return sum(size for _, key, size in list(self.log) if part in key)

    def count_of(self, part: str) -> int:
        return sum(part in key for _, key, _ in list(self.log))

    def _arrive(self, operation: str, key: str) -> None:
        self.before(operation, key)
        self.hanging.wait(60)
        if self.is_away:
            self.log.append((operation, key, 0))
            raise Unavailable(f"cannot {operation} {key} in {self.url}: it is away")

    def _leave(self, operation: str, key: str, data: bytes) -> bytes:
        self.log.append((operation, key, len(data)))
        return self.change(key, data)


class Running:
    """A relay and its address."""

    def __init__(self, relays: list[StreamRelay], listener: Listener) -> None:
        self.relays = relays
        self.stop_listening = listener.stop
        self.one = relays[0]
        self.root = listener.url
        self.url = f"{listener.url}/{relays[0].name}"

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Of the first stream."""
        return self.ask("GET", path, **headers)

    def ask(self, method: str, path: str, content: bytes = b"", **headers: str) -> httpx.Response:
        return httpx.request(
            method, f"{self.url}{path}", content=content, headers=headers, trust_env=False,
            timeout=60,
        )  # fmt: skip

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.root}/metrics", trust_env=False).text
        (line,) = [at for at in text.splitlines() if at.startswith(f"thinwire_relay_{name}")]
        return float(line.rpartition(" ")[2])


@contextmanager
def relaying(
    stores: Store | dict[str, Store],
    folder: Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    trusted_keys: Iterable[str] = (),
    tokens: Tokens | None = None,
    fetches: bool = False,
    poll_s: float = 0.2,
) -> Iterator[Running]:
    """A relay in this process."""
    by_name = stores if isinstance(stores, dict) else {"run": stores}
    folders = Folders.at(folder, limit_bytes)
    relays = [
        StreamRelay(
            name, store, folders, trusted_keys=[*trusted_keys], fetches=fetches, poll_s=poll_s
        )
        for name, store in by_name.items()
    ]
    listener = Listener(RelayApp(relays, tokens or Tokens()), "127.0.0.1", 0)
    thread = threading.Thread(target=listener.run)
    thread.start()
    for relay in relays:
        relay.start()
    try:
        yield Running(relays, listener)
    finally:
        for relay in relays:
            relay.stop()
        listener.stop()
        thread.join(20)
        assert not thread.is_alive()


def large(seed: int = 0, size_bytes: int = 6 << 20) -> dict[str, Any]:
    """A model of one tensor, whose anchor has many blocks."""
    rng = np.random.default_rng(seed)
    return {"w": rng.integers(0, 1 << 15, size_bytes // 2, np.uint16).view(np.float16)}


def publish(
    store: Store, folder: Path, versions: Iterable[Any], key: SigningKey | None = None
) -> None:
    """Publish versions, or further ones from the same folder."""
    stream = open_stream(store, policy=Policy(merge_levels=(2, 4)), signing_key=key)
    with publisher(stream, folder) as made:
        for arrays in versions:
            made.publish(arrays)


def manifest_of(store: Store, version: int) -> Manifest:
    stream = open_stream(store)
    found = stream.manifest(stream.record().lineage, version)
    assert found is not None
    return found


def data_keys(store: Store, version: int) -> dict[str, int]:
    """The objects of a version's own manifest, and their sizes."""
    found = objects_of(manifest_of(store, version))
    return {key: record.size for key, record in found.items()}


def resigned(data: bytes) -> bytes:
    """A manifest as a stranger would sign it, with one thing changed."""
    manifest = parse(data, Manifest, "it")
    changed = msgspec.structs.replace(manifest, step=manifest.version + 1_000_000)
    return encode(sign(changed, STRANGER))


def place(key: str) -> Place:
    found = place_of(key)
    assert found is not None
    return found


def caught_up(url: str | Store, folder: Path, **options: Any) -> dict[str, str]:
    """What a follower of ``url`` holds after it caught up."""
    stream = open_stream(url, retry_s=5.0, **options)
    with Follower(stream, folder) as follower:
        follower.catch_up()
    return held(folder)


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds that is due soon."""
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def connect(running: Running) -> socket.socket:
    port = int(running.root.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=20)
