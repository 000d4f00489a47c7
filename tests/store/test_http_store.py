"""The read side over HTTP: against a real relay, and against servers that are none."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what rooms share

from relay.making import DictStore, Running, data_keys, large, publish, relaying
from thinwire.errors import (
    AccessDenied,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    StoreError,
    Truncated,
    Unavailable,
)
from thinwire.store import Entry, Store, StoreWrapper, open_store
from thinwire.store import http_client as client_room
from thinwire.store import http_store as store_room
from thinwire.store.http_client import Timeouts
from thinwire.store.http_store import open_http
from thinwire.stream import keys
from thinwire.testing import contract


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> DictStore:
    store = DictStore()
    publish(store, tmp_path_factory.mktemp("baseline"), [large(size_bytes=3 << 20)])
    return store


@pytest.fixture(scope="module")
def relay(stored: DictStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with relaying(stored, tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest.fixture
def key(stored: DictStore) -> str:
    return max(data_keys(stored, 1))


@pytest.fixture
def store(relay: Running) -> Store:
    return open_store(relay.url, retry_s=0)


def test_the_contract_of_ranges(store: Store, stored: DictStore, key: str) -> None:
    data = stored.get(key, limit_bytes=1 << 30)
    size = len(data)
    for start, stop in ((0, 1), (0, size), (1, 2), (255, 300), (size - 1, size), (5, 5), (0, 0)):
        assert store.get_range(key, start, stop) == data[start:stop]
    assert store.get_range(key, size, size) == b""
    for start, stop in (
        (0, size + 1),
        (size - 1, size + 1),
        (size, size + 1),
        (size + 9, size + 99),
        (size + 1, size + 1),
    ):
        with pytest.raises(Truncated):
            store.get_range(key, start, stop)
    for start, stop in ((-1, 1), (2, 1)):
        with pytest.raises(InvalidArgument):
            store.get_range(key, start, stop)


def test_the_contract_of_limits(store: Store, stored: DictStore, key: str) -> None:
    data = stored.get(key, limit_bytes=1 << 30)
    for limit_bytes in (len(data), 1 << 50):
        assert store.get(key, limit_bytes=limit_bytes) == data
    for limit_bytes in (len(data) - 1, 0):
        with pytest.raises(LimitExceeded):
            store.get(key, limit_bytes=limit_bytes)
    assert type(store.get(key, limit_bytes=1 << 30)) is bytes


def test_the_contract_of_absence(store: Store, key: str) -> None:
    missing = keys.manifest("ab" * 16, 7)
    for name in (missing, "a/b", f"{key}/c"):
        with pytest.raises(NotFound) as caught:
            store.get(name, limit_bytes=9)
        assert name in str(caught.value)
        assert store.url in str(caught.value)
        assert not caught.value.retryable
        for start, stop in ((0, 1), (0, 0)):
            with pytest.raises(NotFound):
                store.get_range(name, start, stop)
    assert list(store.list("no/such/")) == []


def test_the_contract_of_keys(store: Store) -> None:
    """The suite's own check, but for the listing at its end: this store is not empty."""

    class Empty(StoreWrapper):
        def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
            return iter(())

    contract.check_bad_keys(Empty(store))


def test_the_contract_of_listings(store: Store, stored: DictStore) -> None:
    due = [entry for entry in stored.list("") if not entry.key.startswith("leases/")]
    assert list(store.list("")) == due
    for entry in due:
        assert list(store.list("", after=entry.key)) == [e for e in due if e.key > entry.key]
    folder = f"{due[0].key.partition('/')[0]}/manifests/"
    assert [e.key for e in store.list(folder)] == [e.key for e in due if e.key.startswith(folder)]
    for prefix in ("p", "../"):
        with pytest.raises(InvalidArgument):
            list(store.list(prefix))


def test_many_keys_are_listed(tmp_path: Path) -> None:
    bucket = DictStore()
    names = [keys.manifest("ab" * 16, version) for version in range(1, 2_003)]
    for name in names:
        bucket.put(name, b"x")
    with relaying(bucket, tmp_path / "cache") as relay:
        store = open_store(relay.url, retry_s=0)
        assert [entry.key for entry in store.list(keys.manifests("ab" * 16))] == names
        assert [e.key for e in store.list("", after=names[998])] == names[999:]


def test_unusual_names(tmp_path: Path) -> None:
    """Files of an anchor are called as people like."""
    from stream_units.making import model, publisher, write_folder

    folder = write_folder(tmp_path / "model", model=model())
    for name in contract.UNUSUAL_NAMES:
        if "/" not in name and not name.startswith(".") and "model-0000" not in name:
            (folder / name).write_bytes(name.encode())
    bucket = DictStore()
    from thinwire.follow import open_stream

    with publisher(open_stream(bucket), tmp_path / "baseline") as made:
        made.publish(folder)
    with relaying(bucket, tmp_path / "cache") as relay:
        store = open_store(relay.url, retry_s=0)
        files = data_keys(bucket, 1)
        assert len(files) > 5
        for key in files:
            assert store.get(key, limit_bytes=1 << 30) == bucket.get(key, limit_bytes=1 << 30)


def test_nothing_can_be_written(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    writes: list[Callable[[], None]] = [
        lambda: store.put("head.json", b"x"),
        lambda: store.put_if_absent("head.json", b"x"),
        lambda: store.put_file("head.json", tmp_path / "file"),
        lambda: store.delete(["head.json"]),
        # A lease that is none is refused by the relay itself.
        lambda: store.put("leases/x.json", b"x"),
    ]
    for write in writes:
        with pytest.raises(StoreError) as caught:
            write()
        assert not caught.value.retryable
    with pytest.raises(StoreError, match="can only be read"):
        store.put("head.json", b"x")


def test_many_threads_share_connections(store: Store, stored: DictStore, key: str) -> None:
    data = stored.get(key, limit_bytes=1 << 30)
    faults: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            for number in range(20):
                start = (seed * 7919 + number * 104_729) % (len(data) - 5000)
                assert store.get_range(key, start, start + 5000) == data[start : start + 5000]
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_connections_are_kept(relay: Running, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = client_room.HttpClient._made
    monkeypatch.setattr(
        client_room.HttpClient,
        "_made",
        lambda self: made.append(1) or original(self),  # type: ignore[func-returns-value]
    )
    store = open_store(relay.url, retry_s=0)
    for _ in range(10):
        store.get("head.json", limit_bytes=9999)
        store.get_range(key, 0, 10)
        store.get_range(key, 0, 0)
        list(store.list(""))
        with pytest.raises(NotFound):
            store.get("nothing", limit_bytes=9)
    assert len(made) == 1


def test_a_fork_has_connections_of_its_own(store: Store) -> None:
    assert store.get("head.json", limit_bytes=9999)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if store.get("head.json", limit_bytes=9999) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("head.json", limit_bytes=9999)


@contextmanager
def saying(*answers: bytes) -> Iterator[str]:
    """A server that gives one answer after the other, each on a connection of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                try:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.close()


@contextmanager
def talking(say: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that goes on and on with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                say(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def response(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (response("404 No", b"", "Thinwire-Absent: 1"), NotFound),
        # Of something else: a proxy's, another server's, a name that was misspelt.
        (response("404 No", b'{"error":{"code":"not-found"}}'), StoreError),
        (response("503 No", b""), Unavailable),
        (response("429 No", b""), Unavailable),
        (response("502 No", b'{"error":{"code":"truncated"}}'), Truncated),
        (response("502 No", b'{"error":{"code":"invalid-argument"}}'), Unavailable),
        (response("502 No", b"[" * 10_000), Unavailable),
        (response("302 Found", b"", "Location: http://127.0.0.1:1/x"), StoreError),
        (response("200 OK", b"x" * 100), LimitExceeded),
        (response("200 OK", b"x", "Content-Encoding: gzip"), StoreError),
        (response("204 Nothing", b""), StoreError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", Unavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\nabc", LimitExceeded),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc", StoreError),
        (b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc", Unavailable),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", StoreError),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", StoreError),
        (b"", Unavailable),
    ],
)
def test_what_servers_say(answer: bytes, error: type[Exception]) -> None:
    with saying(answer) as url:
        store = open_store(url, retry_s=0)
        with pytest.raises(error) as caught:
            store.get("some/key", limit_bytes=10)
        is_other = isinstance(caught.value, Unavailable | NotFound)
        assert not is_other or (isinstance(caught.value, error) and error is not StoreError)
        assert url in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        response("200 OK", b"x" * 10),
        response("206 Part", b"x" * 10),
        response("206 Part", b"x" * 10, "Content-Range: bytes 0-9/100"),
        response("206 Part", b"x" * 11, "Content-Range: bytes 5-15/100"),
        response("206 Part", b"x" * 10, "Content-Range: bytes 5-15/100"),
    ],
)
def test_ranges_that_are_none(answer: bytes) -> None:
    with saying(answer) as url, pytest.raises(StoreError):
        open_store(url, retry_s=0).get_range("some/key", 5, 15)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"[]",
        b'{"entries":[],"next":5}',
        b'{"entries":[["a/../b",1,1]],"next":null}',
        b'{"entries":[["b",1,1]],"next":null}',
        b'{"entries":[["a/b",-1,1]],"next":null}',
        b'{"entries":[["a/b",true,1]],"next":null}',
        b'{"entries":[["a/c",1,1],["a/b",1,1]],"next":null}',
        b'{"entries":[["a/b",1,1,1]],"next":null}',
        # It would never end.
        b'{"entries":[],"next":""}',
        b'{"entries":[["a/b",1,1]],"next":"a"}',
        b'{"entries":[],"next":"a/b"}',
        b'{"entries":[["a/b",1,1]],"next":"a/c"}',
    ],
)
def test_listings_that_are_none(page: bytes) -> None:
    with saying(response("200 OK", page)) as url, pytest.raises(StoreError):
        list(open_store(url, retry_s=0).list("a/"))


def dripping(beginning: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    def say(connection: socket.socket) -> None:
        connection.sendall(beginning)
        while True:
            connection.sendall(drop)
            time.sleep(0.02)

    return say


@pytest.mark.parametrize(
    ("beginning", "drop"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"T: x\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 9999\r\n\r\n", b"x"),
        (b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
    ],
)  # fmt: skip
def test_answers_that_never_end(beginning: bytes, drop: bytes) -> None:
    """Something comes all the time, so no single read is late."""
    timeouts = Timeouts(5.0, 5.0, head_s=0.3, patience_s=0.3, slowest_bytes_per_s=1e9)
    with talking(dripping(beginning, drop)) as url:
        store = open_http(urlsplit(url), {}, timeouts)
        with pytest.raises(StoreError):
            store.get("some/key", limit_bytes=1 << 20)


def test_a_listing_without_end() -> None:
    numbers = count()

    def say(connection: socket.socket) -> None:
        page = b'{"entries":[["a/%012d",1,1]],"next":"a/%012d"}'
        number = next(numbers)
        connection.sendall(response("200 OK", page % (number, number)))

    with talking(say) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_room, "MAX_LISTED", 20)
        with pytest.raises(LimitExceeded):
            list(open_store(url, retry_s=0).list("a/"))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (response("200 OK", b"ok"), None),
        (response("204 No", b""), None),
        (response("502 No", b'{"error":{"code":"checksum-mismatch"}}'), Unavailable),
        (response("403 No", b"<html>"), AccessDenied),
    ],
)
def test_what_servers_say_of_leases(answer: bytes, error: type[Exception] | None) -> None:
    """Nothing of it is an error of the stream's format, which would end a follower."""
    key = keys.lease("cd" * 16, 7)
    with saying(answer, answer) as url:
        store = open_store(url, retry_s=0)
        for write in (lambda: store.put(key, b"x"), lambda: store.delete([key])):
            with pytest.raises(error) if error else nullcontext():
                write()


def test_a_kept_connection_that_was_closed() -> None:
    """The server gave it up meanwhile: that is no failure."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(3):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = open_store(f"http://127.0.0.1:{listening.getsockname()[1]}", retry_s=0)
        for _ in range(3):
            assert store.get("a", limit_bytes=9) == b"x"
        thread.join(10)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
        open_store(f"http://127.0.0.1:{port}", retry_s=0).get("a", limit_bytes=9)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://relay:8080", "http://relay:8080"),
        ("HTTPS://relay/my%20run/", "https://relay/my%20run"),
        ("http://[::1]:80/x", "http://[::1]:80/x"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert open_store(url).url == shown


@pytest.mark.parametrize(
    "url",
    ["http://", "http://:80", "http://h:x", "http://u@h", "http://u:p@h", "http://h?q=1",
     "http://h#f", "http://h/a//b", "http://h/../b", "http://h:0"],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InvalidArgument):
        open_store(url)


@pytest.mark.parametrize("token", ["two words", "x" * 600, "new\nline", "ünïcode"])
def test_tokens_that_are_none(token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("THINWIRE_HTTP_TOKEN", token)
    with pytest.raises(InvalidArgument) as caught:
        open_store("http://h")
    assert token not in str(caught.value)
    monkeypatch.delenv("THINWIRE_HTTP_TOKEN")
    monkeypatch.setenv("THINWIRE_HTTP_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(NotFound):
        open_store("http://h")


@pytest.mark.parametrize(
    ("url", "is_told"),
    [("http://10.0.0.1", True), ("http://127.0.0.1", False), ("https://10.0.0.1", False)],
)
def test_a_token_in_clear_is_told(
    url: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("THINWIRE_HTTP_TOKEN", "x" * 20)
    open_store(url)
    assert ("in clear" in caplog.text) == is_told
    assert "x" * 20 not in caplog.text


def test_tls(stored: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.relay.relay import Folders, StreamRelay
    from thinwire.relay.server import RelayApp
    from thinwire.web import Listener, Tokens
    from web.test_listener import make_certificate

    tls = make_certificate(tmp_path)
    relay = StreamRelay("run", stored, Folders.at(tmp_path / "cache", 1 << 24))
    listener = Listener(RelayApp([relay], Tokens()), "127.0.0.1", 0, tls=tls)
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(StoreError, match="not trusted"):
            open_store(listener.url, retry_s=0).get("head.json", limit_bytes=999)
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
        assert open_store(listener.url, retry_s=0).get("head.json", limit_bytes=999)
    finally:
        listener.stop()
        thread.join(20)


@pytest.mark.parametrize(
    ("text", "said"), [("", "no token"), ("a" * 20 + "\n" + "b" * 20, "2 lines")]
)
def test_a_file_without_one_token(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(text)
    monkeypatch.setenv("THINWIRE_HTTP_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(InvalidArgument, match=said):
        open_store("http://127.0.0.1:1/policy")


def test_an_open_file_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text("a" * 20)
    (tmp_path / "token").chmod(0o644)
    monkeypatch.setenv("THINWIRE_HTTP_TOKEN_FILE", str(tmp_path / "token"))
    for _ in range(2):
        open_store("http://127.0.0.1:1/policy")
    assert caplog.text.count("chmod 600") == 1
