"""Calls to an engine, against a server that answers as it is told."""

from __future__ import annotations

import gzip
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from thinwire.engines.engine import Timer
from thinwire.engines.http import EngineHttp
from thinwire.errors import Deadline, EngineError, EngineUnreachable, InvalidArgument

KEY = "k3y-that-nobody-may-see"


class Handler(http.server.BaseHTTPRequestHandler):
    """Does what the path says, and remembers what it was asked."""

    seen: list[dict[str, Any]]

    def do_GET(self) -> None:
        getattr(self, self.path.split("?")[0].strip("/").replace("/", "_"))()

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(size) or b"null")
        self.seen.append({"path": self.path, "body": body, **dict(self.headers)})
        self.do_GET()

    def reply(
        self, body: bytes, status: int = 200, kind: str = "application/json", **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def value(self) -> None:
        self.reply(b'{"a": [1, 2.5, null]}')

    def under_value(self) -> None:
        self.value()

    def text(self) -> None:
        self.reply("Gr\u00fc\u00dfe".encode(), kind="text/plain; charset=utf-8")

    def nothing(self) -> None:
        self.reply(b"", kind="text/plain")

    def broken(self) -> None:
        self.reply(b'{"a": ')

    def nested(self) -> None:
        self.reply(b"[" * 100_000)

    def refused(self) -> None:
        shown = f"no: {self.headers.get('authorization')} \x00\x1b[31m" + "x" * 1000
        self.reply(shown.encode(), 500)

    def forbidden(self) -> None:
        self.reply(b'{"error": "Unauthorized"}', 401)

    def moved(self) -> None:
        self.reply(b"", 307, location="http://127.0.0.1:1/elsewhere")

    def declared(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(1 << 40))
        self.end_headers()

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for _ in range(10_000):
                self.wfile.write(b"x" * 65536)

    def zipped(self) -> None:
        self.reply(gzip.compress(b"1" * 1000), content_encoding="gzip")

    def slow(self) -> None:
        time.sleep(1.5)
        with suppress(OSError):
            self.value()

    def dripping(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.1)

    def cut(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "100")
        self.end_headers()
        self.wfile.write(b"half")

    def dropped(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def endpoint(seen: list[dict[str, Any]]) -> Iterator[str]:
    handler = type("Seeing", (Handler,), {"seen": seen})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def soon(timeout_s: float = 10.0) -> Timer:
    return Timer(timeout_s, "asking")


def test_what_is_answered(endpoint: str) -> None:
    engine = EngineHttp(endpoint + "/")
    assert engine.call("GET", "/value", timer=soon()) == {"a": [1, 2.5, None]}
    assert engine.call("GET", "/text", timer=soon()) == "Gr\u00fc\u00dfe"
    assert engine.call("GET", "/nothing", timer=soon()) is None
    assert engine.ask("GET", "/forbidden", timer=soon(), ok=(200, 401)).status == 401
    assert EngineHttp(endpoint + "/under").call("GET", "/value", timer=soon())
    engine.close()
    assert engine.call("GET", "/value", timer=soon())


def test_what_is_sent(endpoint: str, seen: list[dict[str, Any]]) -> None:
    engine = EngineHttp(endpoint, key=KEY)
    engine.call("POST", "/value", timer=soon(), json={"b": 1}, params={"c": 2.5})
    engine.call("POST", "/nothing", timer=soon())
    assert (seen[0]["path"], seen[0]["body"]) == ("/value?c=2.5", {"b": 1})
    assert seen[0]["authorization"] == f"Bearer {KEY}"
    assert seen[1]["body"] is None


@pytest.mark.parametrize(
    ("path", "said", "hint"),
    [
        ("/forbidden", "with 401: .*Unauthorized", "the key of this test"),
        ("/refused", "GET /refused with 500: ", "log"),
        ("/moved", "with 307", "Redirects"),
        ("/broken", "not JSON", "endpoint"),
        ("/nested", "not JSON", "endpoint"),
        ("/declared", "more than 1000000 bytes", "endpoint"),
        ("/endless", "more than 1000000 bytes", "endpoint"),
        ("/zipped", "compressed", "compress"),
    ],
)
def test_what_is_refused(endpoint: str, path: str, said: str, hint: str) -> None:
    engine = EngineHttp(
        endpoint, key=KEY, key_hint="Give the key of this test", max_answer_bytes=1_000_000
    )
    with pytest.raises(EngineError, match=said) as failure:
        engine.call("GET", path, timer=soon())
    error = failure.value
    assert not isinstance(error, EngineUnreachable)
    assert hint in error.hint
    assert error.context["route"] == f"GET {path}"
    assert len(str(error)) < 700
    assert str(error).isprintable()
    for text in (str(error), repr(error.context), repr(engine)):
        assert KEY not in text


@pytest.mark.parametrize("path", ["/cut", "/dropped"])
def test_a_connection_that_breaks(endpoint: str, path: str) -> None:
    with pytest.raises(EngineUnreachable, match="broke off") as failure:
        EngineHttp(endpoint).call("GET", path, timer=soon())
    assert failure.value.context["sent"] is True
    assert failure.value.retryable


def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        engine = EngineHttp(f"http://127.0.0.1:{held.getsockname()[1]}")
        with pytest.raises(EngineUnreachable, match="does not take") as failure:
            engine.call("GET", "/value", timer=soon())
    assert failure.value.context["sent"] is False


@pytest.mark.parametrize("path", ["/slow", "/dripping"])
def test_the_time_runs_out(endpoint: str, path: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(Deadline):
        EngineHttp(endpoint).call("GET", path, timer=soon(0.5))
    assert time.monotonic() - began_s < 1.2


def test_no_time_is_left(endpoint: str, seen: list[dict[str, Any]]) -> None:
    with pytest.raises(Deadline):
        EngineHttp(endpoint).call("POST", "/value", timer=soon(0.0))
    assert not seen


def test_proxy_variables_are_not_read(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert EngineHttp(endpoint).call("GET", "/value", timer=soon())


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "file:///etc/passwd",
        "http://",
        "http://:8000",
        "http://host:0",
        "http://host:99999",
        "http://host:port",
        "http://[::1",
        "http://host/?a=b",
        "http://host/#a",
        "http://ho st",
        "http://host\n",
    ],
)
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(InvalidArgument):
        EngineHttp(endpoint)


@pytest.mark.parametrize("start", ["http://user:", "http://", "user:", "http://host:1/x?"])
def test_a_secret_in_the_endpoint_is_not_shown(start: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        EngineHttp(f"{start}{KEY}@127.0.0.1:8000")
    assert KEY not in str(failure.value)


@pytest.mark.parametrize("key", ["", " ", "a\nb", "schl\u00fcssel"])
def test_keys_that_are_none(key: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        EngineHttp("http://127.0.0.1", key=key)
    assert not key.strip() or key not in str(failure.value)


def test_headers_of_every_call(endpoint: str, seen: list[dict[str, Any]]) -> None:
    engine = EngineHttp(endpoint, key=KEY, headers={"which-model": "accounts/a/models/m"})
    engine.call("POST", "/value", timer=soon(), json={})
    engine.call("POST", "/nothing", timer=soon())
    assert [one["which-model"] for one in seen] == ["accounts/a/models/m"] * 2
    assert seen[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer another"},
        {"host": "elsewhere"},
        {"content-length": "0"},
        {"": "a"},
        {"a b": "c"},
        {"a": "b\r\nx: y"},
        {"a": " b"},
        {"a": "\u00fc"},
    ],
)
def test_headers_that_are_none(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="header"):
        EngineHttp("http://127.0.0.1", headers=headers)


def test_https_is_checked(endpoint: str, tmp_path: Any) -> None:
    plain = endpoint.replace("http:", "https:")
    with pytest.raises(EngineUnreachable):
        EngineHttp(plain).call("GET", "/value", timer=soon())
    with pytest.raises(InvalidArgument, match="CA file"):
        EngineHttp(plain, ca_file=str(tmp_path / "none")).call("GET", "/value", timer=soon())
