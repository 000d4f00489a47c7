"""The links between the regions of examples/regions: bytes whole, delayed, counted, cut off."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ROOT / "examples" / "regions" / "links.py"
DELAY_S = 0.05
TIMEOUT_S = 20.0


class Upper(socketserver.StreamRequestHandler):
    """Answers all it is sent, in capitals, once the sender has ended; and then ends."""

    def handle(self) -> None:
        self.wfile.write(self.rfile.read().upper())


@contextlib.contextmanager
def service() -> Iterator[int]:
    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Server(("127.0.0.1", 0), Upper) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Link:
    """links.py, with one route."""

    def __init__(self, to: int, delay_s: float, bits_per_s: float | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        route = {"name": "s3", "listen": ["127.0.0.1", self.port], "to": ["127.0.0.1", to]}
        settings = {"delay_s": delay_s, "bits_per_s": bits_per_s, "routes": [route]}
        self.process = subprocess.Popen(
            [sys.executable, str(LINKS), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, what: str) -> dict[str, Any]:
        print(json.dumps({"do": what}), file=self.process.stdin, flush=True)
        return self.read()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)


@contextlib.contextmanager
def link(delay_s: float, bits_per_s: float | None = None) -> Iterator[Link]:
    with service() as port:
        made = Link(port, delay_s, bits_per_s)
        try:
            yield made
        finally:
            assert made.process.stdin is not None
            made.process.stdin.close()
            # It ends with its standard input, by itself.
            assert made.process.wait(TIMEOUT_S) == 0


def exchange(connection: socket.socket, data: bytes) -> bytes:
    with connection:
        sender = threading.Thread(target=send, args=(connection, data))
        sender.start()
        answer = bytearray()
        while piece := connection.recv(1 << 20):
            answer += piece
        sender.join()
    return bytes(answer)


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def test_bytes_arrive_whole_both_ways_and_are_counted() -> None:
    # More than one read, more than what one connection may hold back.
    data = os.urandom(1 << 20).hex().encode() * 6
    with link(0.002) as made:
        assert exchange(made.connect(), data) == data.upper()
        assert made.ask("count") == {"s3": {"up": len(data), "down": len(data)}}


def test_an_answer_takes_two_round_trips_on_a_new_connection() -> None:
    with link(DELAY_S) as made:
        start_s = time.monotonic()
        assert exchange(made.connect(), b"abc") == b"ABC"
        # A handshake, then there and back. A sleep is never too short; longer is the machine's.
        assert time.monotonic() - start_s >= 4 * DELAY_S


def test_where_no_kernel_shapes_the_link_bytes_are_paced() -> None:
    size_bytes, bits_per_s = 200_000, 8e6
    with link(0.0, bits_per_s) as made:
        start_s = time.monotonic()
        assert len(exchange(made.connect(), b"x" * size_bytes)) == size_bytes
        # The service answers once all is there, so both directions take their time.
        assert time.monotonic() - start_s >= 2 * size_bytes * 8 / bits_per_s


def test_while_it_is_cut_nothing_arrives_and_nothing_is_refused() -> None:
    with link(0.002) as made:
        before = made.connect()
        before.sendall(b"one")
        while made.ask("count")["s3"]["up"] < 3:
            time.sleep(0.01)
        made.ask("cut")
        before.sendall(b"lost")
        meanwhile = made.connect()
        meanwhile.sendall(b"lost, too")
        meanwhile.settimeout(0.3)
        with pytest.raises(TimeoutError):
            meanwhile.recv(1)
        assert made.ask("count")["s3"] == {"up": 3, "down": 0}
        made.ask("restore")
        for connection in (before, meanwhile):
            connection.settimeout(TIMEOUT_S)
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
            connection.close()
        assert exchange(made.connect(), b"again") == b"AGAIN"
        assert made.ask("count")["s3"] == {"up": 8, "down": 5}


def test_a_service_that_is_away_looks_like_a_connection_that_breaks() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = probe.getsockname()[1]
    made = Link(nobody, 0.002)
    with made.connect() as connection, pytest.raises(ConnectionResetError):
        connection.recv(1)
    made.process.communicate(timeout=TIMEOUT_S)
