"""One connection to a hub, whatever is at its other end."""

from __future__ import annotations

import socket
import threading

import pytest

from thinwire.report.http import Address, Channel, Closed, HubFault

from .hostile import HOSTILE, TOKEN
from .making import WITHIN_S, Asked, answer, eventually, raw, say


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.startswith("answer")])
def test_every_question_ends(name: str) -> None:
    """With an answer, however odd, or a fault in our own words; and in bounded time."""
    with raw(x=HOSTILE[name]) as hub:
        channel = Channel(Address.of(hub.url, TOKEN), threading.Event())
        fault = ""
        status, data = 200, b""
        try:
            status, data = channel.ask("GET", "/x", timeout_s=0.3)
        except HubFault as error:
            fault = str(error)
        channel.close()
        assert TOKEN not in fault
        assert len(fault) < 100
        assert 0 < status < 1000
        assert len(data) <= 64 << 10


def test_a_connection_is_used_again() -> None:
    with raw(x=answer(200, b"{}")) as hub:
        channel = Channel(Address.of(hub.url), threading.Event())
        for _ in range(3):
            assert channel.ask("POST", "/x", body=b"{}", timeout_s=WITHIN_S) == (200, b"{}")
        assert hub.connection_count == 1
        channel.close()


def test_a_connection_that_the_hub_closed_meanwhile() -> None:
    def act(found: socket.socket, asked: Asked) -> None:
        answer(200, b"{}")(found, asked)
        found.shutdown(socket.SHUT_RDWR)

    with raw(x=act) as hub:
        channel = Channel(Address.of(hub.url), threading.Event())
        for _ in range(3):
            assert channel.ask("POST", "/x", body=b"{}", timeout_s=WITHIN_S) == (200, b"{}")
        assert hub.connection_count == 3
        channel.close()


def test_an_answer_that_ends_with_the_connection() -> None:
    def act(found: socket.socket, asked: Asked) -> None:
        found.sendall(b"HTTP/1.0 200 OK\r\n\r\nabc")
        found.shutdown(socket.SHUT_WR)

    with raw(x=act) as hub:
        channel = Channel(Address.of(hub.url), threading.Event())
        for _ in range(2):
            assert channel.ask("GET", "/x", timeout_s=WITHIN_S) == (200, b"abc")
        channel.close()


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"])
def test_whoever_waits_can_be_ended(sent: bytes) -> None:
    is_closed = threading.Event()
    ended: list[type[BaseException]] = []
    with raw(x=say(sent)) as hub:
        channel = Channel(Address.of(hub.url), is_closed)

        def ask() -> None:
            try:
                channel.ask("GET", "/x", timeout_s=1e6)
            except Closed:
                ended.append(Closed)

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: hub.of("x"))
        is_closed.set()
        thread.join(WITHIN_S)
    assert ended == [Closed]


def test_a_path_in_front_of_the_routes() -> None:
    with raw(x=answer(204)) as hub:
        channel = Channel(Address.of(hub.url + "/behind/a/proxy/"), threading.Event())
        assert channel.ask("DELETE", "/x", timeout_s=WITHIN_S) == (204, b"")
        channel.close()
        assert hub.asked[0].line == "DELETE /behind/a/proxy/x HTTP/1.1"


def test_a_token_is_not_shown() -> None:
    assert TOKEN not in repr(Address.of("https://hub:1/x", TOKEN))
