"""A server that cannot be held up: real sockets, a small application."""

import asyncio
import datetime
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from thinwire.errors import InvalidArgument, NotFound, StoreError
from thinwire.web import Limits, Listener, Tls
from thinwire.web.protocol import GuardedProtocol


async def echo(request: Request) -> Response:
    return PlainTextResponse(await request.body() or b"nothing")


async def endless(request: Request) -> Response:
    async def parts() -> Any:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)

    return StreamingResponse(parts())


async def broken(request: Request) -> Response:
    raise RuntimeError("a bug")


APP = Starlette(
    routes=[
        Route("/", echo, methods=["GET", "POST"]),
        Route("/endless", endless),
        Route("/broken", broken),
    ]
)


@contextmanager
def listening(**options: Any) -> Iterator[Listener]:
    listener = Listener(APP, "127.0.0.1", 0, **options)
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        yield listener
    finally:
        listener.stop()
        thread.join(20)
        assert not thread.is_alive()


def connect(listener: Listener) -> socket.socket:
    port = int(listener.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def read_until(connection: socket.socket, end: bytes) -> None:
    received = b""
    while not received.endswith(end):
        data = connection.recv(1000)
        assert data, received
        received += data


def count_bytes(connection: socket.socket, *, limit_bytes: int) -> int:
    count = 0
    while count < limit_bytes and (data := connection.recv(1 << 20)):
        count += len(data)
    return count


def is_alive(listener: Listener) -> bool:
    return httpx.post(listener.url, content=b"hello", trust_env=False).text == "hello"


def test_answers() -> None:
    with listening() as listener:
        assert is_alive(listener)


def test_rubbish_ends_only_its_own_connection() -> None:
    with listening() as listener:
        for rubbish in [
            b"\0" * 100,
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /%ff%fe HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
            b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n\0\1\2 rubbish in the answer\r\n\r\n",
        ]:
            with connect(listener) as connection, suppress(OSError):
                connection.sendall(rubbish)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(100)
        assert is_alive(listener)


def test_only_bugs_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as listener:
        with connect(listener) as connection:
            connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\nrubbish\r\n\r\n")
            connection.recv(1000)
        with connect(listener) as connection:
            connection.sendall(
                b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"
            )
            connection.recv(1000)
        assert is_alive(listener)
        assert not caplog.records
        assert httpx.get(f"{listener.url}/broken", trust_env=False).status_code == 500
    assert [record.message for record in caplog.records] == ["GET '/broken' failed"]


def test_small_answers_do_not_wait_for_each_other() -> None:
    with listening() as listener:
        assert listener._socket.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
@pytest.mark.parametrize("part", [b"", b"GET / HT"])
def test_a_head_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, before: bytes, part: bytes
) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_within_s", 0.3)
    with listening(limits=Limits(keep_alive_s=1)) as listener, connect(listener) as connection:
        if before:
            connection.sendall(before)
            read_until(connection, b"nothing")
        connection.sendall(part)
        # It is ended, and not by us.
        with suppress(ConnectionResetError):
            assert connection.recv(1000) == b""
        assert is_alive(listener)


def test_a_slow_body_is_not_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_within_s", 0.2)
    with listening() as listener, connect(listener) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab")
        time.sleep(0.5)
        connection.sendall(b"cd")
        read_until(connection, b"abcd")


def test_a_body_that_comes_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused before its body came does not hold a connection by sending it slowly."""
    monkeypatch.setattr(GuardedProtocol, "head_within_s", 0.4)
    with listening() as listener, connect(listener) as connection:
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        read_until(connection, b"Not Found")
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(200):
                connection.sendall(b"x")
                time.sleep(0.05)
        assert is_alive(listener)


def test_an_answer_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "read_within_s", 0.3)
    with listening() as listener, connect(listener) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(1.0)
        # What lies in the sockets still comes, and then the end.
        with suppress(ConnectionResetError):
            assert count_bytes(connection, limit_bytes=1 << 26) < 1 << 26
        assert is_alive(listener)


def test_too_many_connections() -> None:
    with listening(limits=Limits(connections=16)) as listener:
        idle = [connect(listener) for _ in range(30)]
        answer = httpx.get(listener.url, trust_env=False)
        assert answer.status_code == 503
        for connection in idle:
            connection.close()
        for _ in range(100):
            if httpx.get(listener.url, trust_env=False).status_code == 200:
                return
        pytest.fail("it did not come back")


def test_a_port_that_is_taken() -> None:
    with listening() as listener:
        port = int(listener.url.rpartition(":")[2])
        with pytest.raises(StoreError, match="cannot listen"):
            Listener(APP, "127.0.0.1", port)
    with pytest.raises(StoreError, match="cannot listen"):
        Listener(APP, "127.0.0.1", 70_000)


def test_tls(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    with listening(tls=files) as listener:
        assert listener.url.startswith("https://")
        known = ssl.create_default_context(cafile=str(files.certificate))
        answer = httpx.get(listener.url, verify=known, trust_env=False)
        assert answer.text == "nothing"
        with pytest.raises(httpx.ConnectError):
            httpx.get(listener.url, trust_env=False)


def test_tls_files_that_are_none(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    with pytest.raises(InvalidArgument, match="no certificate and its key"):
        Listener(APP, "127.0.0.1", 0, tls=Tls(certificate=files.key, key=files.certificate))
    # Not there yet, as before a mount: no reason to give up for good.
    with pytest.raises(NotFound, match="No such file"):
        Listener(APP, "127.0.0.1", 0, tls=Tls(certificate=tmp_path / "no", key=files.key))


def make_certificate(folder: Path) -> Tls:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "certificate.pem", folder / "key.pem"
    certificate_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return Tls(certificate=certificate_path, key=key_path)


def test_fewer_files_than_connections_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("thinwire.web.listener.resource.getrlimit", lambda _: (300, 300))
    monkeypatch.setattr("thinwire.web.listener.resource.setrlimit", lambda *_: None)
    with listening(limits=Limits(connections=40)):
        assert caplog.text == ""
    with listening(limits=Limits(connections=1000)):
        assert "takes 44 connections of the 1000" in caplog.text
