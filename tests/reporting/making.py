"""Real hubs, raw ones that answer what they like, and followers that report to them."""

from __future__ import annotations

import datetime
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from thinwire.follow import CheckpointSink, Follower, open_stream
from thinwire.hub import FleetLimits, Hub, HubLimits
from thinwire.publish import Publisher
from thinwire.report import HubClient
from thinwire.stream.events import Event
from thinwire.stream.version import Version
from thinwire.web import Limits, Listener, Tls, Tokens

WITHIN_S = 60.0
NEVER_S = 1e6
NAME = "run"


def tiny(seed: int = 0) -> dict[str, np.ndarray]:
    """A model of a few hundred bytes."""
    return {"w": np.random.default_rng(seed).normal(0, 0.02, 400).astype(np.float16)}


def eventually(holds: Callable[[], Any], what: str = "") -> Any:
    """What ``holds`` gives once it is true."""
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        if found := holds():
            return found
        time.sleep(0.01)
    raise AssertionError(f"it did not happen: {what}")


class Trainer:
    """Publishes small versions of a stream in a folder."""

    def __init__(self, folder: Path, observer: Any = None) -> None:
        self.url = str(folder / NAME)
        self.publisher = Publisher(self.url, folder / "state", maintain=False, observer=observer)
        self._model = tiny()
        self.weights: dict[int, bytes] = {}

    def publish(self) -> Version:
        array = self._model["w"].copy()
        array.view(np.uint16)[len(self.weights) % array.size] ^= 1
        self._model = {"w": array}
        made = self.publisher.publish(self._model, step=10 * (len(self.weights) + 1))
        self.weights[made.version] = array.tobytes()
        return made

    def close(self) -> None:
        self.publisher.close()


@contextmanager
def training(folder: Path, observer: Any = None) -> Iterator[Trainer]:
    trainer = Trainer(folder, observer)
    try:
        yield trainer
    finally:
        trainer.close()


class Rollout:
    """A follower in a thread of its own that reports to a hub; keeps what it was told."""

    def __init__(self, url: str, folder: Path, client: HubClient, poll_s: float = NEVER_S) -> None:
        self.folder = folder
        self.client = client
        self.events: list[Event] = []
        self.expectations: list[bool] = []
        self.wake_count = 0
        self.versions: list[int] = []
        self.error: BaseException | None = None
        self.is_ready = False
        self.follower = Follower(
            open_stream(url), CheckpointSink(folder), observer=self, lease=False
        )
        self._poll_s = poll_s
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    # As the hub's client sees it.

    def wake(self) -> None:
        self.wake_count += 1
        self.follower.wake()

    def expect_wakes(self, is_expected: bool) -> None:
        self.expectations.append(is_expected)
        self.follower.expect_wakes(is_expected)

    def version(self) -> Version | None:
        return self.follower.version()

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.client.on_event(event)

    # As tests see it.

    def reaches(self, version: int) -> None:
        eventually(lambda: version in self.versions or self.error, f"version {version}")
        assert self.error is None
        assert self.versions[-1] >= version

    def holds(self, trainer: Trainer) -> bool:
        """Whether the folder has the bits of the newest version."""
        data = (self.folder / "model.safetensors").read_bytes()
        return data.endswith(trainer.weights[max(trainer.weights)])

    def stop(self) -> None:
        self.follower.stop()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self.follower, self.client.reporting(Seen(self)):
                for version in self.follower.follow(poll_s=self._poll_s):
                    self.versions.append(version.version)
        except BaseException as error:
            self.error = error


class Seen:
    """A rollout as a follower: no driver, whatever else it has."""

    def __init__(self, rollout: Rollout) -> None:
        self.wake = rollout.wake
        self.expect_wakes = rollout.expect_wakes
        self.version = rollout.version


@contextmanager
def rolling(
    url: str, folder: Path, client: HubClient, poll_s: float = NEVER_S
) -> Iterator[Rollout]:
    rollout = Rollout(url, folder, client, poll_s)
    try:
        yield rollout
    finally:
        rollout.stop()


class RealHub:
    """A hub of this package on loopback, which can be ended and begun again at its port."""

    def __init__(self, url: str, tokens: Tokens | None = None, tls: Tls | None = None) -> None:
        self._stream_url = url
        self._tls = tls
        self._tokens = tokens
        self._port = 0
        self.begin()

    def begin(self) -> None:
        # It judges at once: nobody is there that it does not know yet.
        limits = HubLimits(fleet=FleetLimits(settle_s=0))
        self._hub = Hub({NAME: self._stream_url}, tokens=self._tokens, poll_s=0.05, limits=limits)
        self._hub.start()
        self._listener = Listener(
            self._hub.app,
            "127.0.0.1",
            self._port,
            tls=self._tls,
            limits=Limits(stop_within_s=1),
        )
        self.url = self._listener.url
        self._port = int(self.url.rpartition(":")[2])
        self._thread = threading.Thread(target=self._listener.run)
        self._thread.start()

    def end(self) -> None:
        self._listener.stop()
        self._thread.join(WITHIN_S)
        self._hub.close()

    def get(self, path: str, token: str = "") -> Any:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        with urlopen(Request(f"{self.url}/v1/streams/{NAME}{path}", headers=headers)) as answer:
            return json.load(answer)

    def replica(self, name: str, token: str = "") -> dict[str, Any] | None:
        found = self.get("/replicas", token)["replicas"]
        return next((one for one in found if one["beat"]["replica"] == name), None)


@contextmanager
def running(url: str, tokens: Tokens | None = None, tls: Tls | None = None) -> Iterator[RealHub]:
    hub = RealHub(url, tokens, tls)
    try:
        yield hub
    finally:
        hub.end()


def certificate(folder: Path) -> Tls:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hub")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    found = Tls(certificate=folder / "hub.pem", key=folder / "hub.key")
    found.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    found.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return found


class Asked(NamedTuple):
    """What a raw hub was asked."""

    line: str
    headers: dict[str, str]
    body: bytes
    at_s: float

    @property
    def route(self) -> str:
        """The last part of the path."""
        return self.line.split(" ")[1].partition("?")[0].rpartition("/")[2]


Act = Callable[[socket.socket, Asked], None]


class RawHub:
    """Takes connections on loopback, and does to each request what it was made for.

    Args:
        acts: By the last part of a request's path; "" is for all others. What is not named is
            answered with 404. Whatever an act leaves open stays open until the end.
    """

    def __init__(self, **acts: Act) -> None:
        self.acts = acts
        self.asked: list[Asked] = []
        self.connection_count = 0
        self.is_over = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def of(self, route: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.route == route]

    def close(self) -> None:
        self.is_over.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                found, _ = self._server.accept()
            except OSError:
                return
            self.connection_count += 1
            self._open.append(found)
            threading.Thread(target=self._serve, args=(found,), daemon=True).start()

    def _serve(self, found: socket.socket) -> None:
        with suppress(OSError, ValueError):
            reader = found.makefile("rb")
            while line := reader.readline():
                headers = {}
                while row := reader.readline().strip():
                    name, _, value = row.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = reader.read(int(headers.get("content-length", "0")))
                asked = Asked(line.decode().strip(), headers, body, time.monotonic())
                self.asked.append(asked)
                self.acts.get(asked.route, not_found)(found, asked)


@contextmanager
def raw(**acts: Act) -> Iterator[RawHub]:
    hub = RawHub(**acts)
    try:
        yield hub
    finally:
        hub.close()


def answer(status: int, body: bytes = b"", **headers: str) -> Act:
    """Answer with this."""

    def act(found: socket.socket, asked: Asked) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        found.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return act


not_found = answer(404)


def say(*pieces: bytes) -> Act:
    """Send these as they are, and leave the connection open."""

    def act(found: socket.socket, asked: Asked) -> None:
        for piece in pieces:
            found.sendall(piece)

    return act


EVENTS_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def version_event(lineage: str, version: int, **more: Any) -> bytes:
    note = {"lineage": lineage, "version": version, **more}
    return b"event: version\ndata: " + json.dumps(note).encode() + b"\n\n"


def heard(interval_s: float = 1.0, head: Any = None) -> Act:
    """Answer a heartbeat as a hub does."""
    body = json.dumps({"head": head, "interval_s": interval_s}).encode()
    return answer(200, body, content_type="application/json")
