"""Hubs that lie, flood, drip and send garbage."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator

from .making import EVENTS_HEAD, Act, Asked, answer, say, version_event

OTHER = "f" * 32
TOKEN = "a-secret-token-0123456789"


def without_end(first: bytes, again: bytes) -> Act:
    """Send this for ever."""

    def act(found: socket.socket, asked: Asked) -> None:
        found.sendall(first)
        while True:
            found.sendall(again)

    return act


def dripping(data: bytes) -> Act:
    """Send a byte now and then, for ever."""

    def act(found: socket.socket, asked: Asked) -> None:
        for number in itertools.cycle(range(len(data))):
            found.sendall(data[number : number + 1])
            threading.Event().wait(0.05)

    return act


def many_versions() -> Iterator[bytes]:
    for number in itertools.count(1):
        yield version_event(OTHER if number % 2 else "0" * 32, number)


def flooding(found: socket.socket, asked: Asked) -> None:
    found.sendall(EVENTS_HEAD)
    for event in many_versions():
        found.sendall(event)


def hanging_up(found: socket.socket, asked: Asked) -> None:
    found.shutdown(socket.SHUT_RDWR)


def lies(*notes: object) -> Act:
    """Events and heartbeats' answers as they should be, but for what they say."""
    return say(
        EVENTS_HEAD,
        *(b"event: version\ndata: " + json.dumps(note).encode() + b"\n\n" for note in notes),
    )


NOTES = [
    {"lineage": OTHER, "version": 10**11},
    {"lineage": OTHER, "version": -1},
    {"lineage": OTHER, "version": 10**40},
    {"lineage": OTHER, "version": 1.5},
    {"lineage": OTHER, "version": "1"},
    {"lineage": "../../etc", "version": 1},
    {"lineage": None, "version": None},
    {"lineage": OTHER},
    [],
    "x",
    None,
]
HEADS: dict[str, bytes] = {
    "interval below zero": b'{"head": null, "interval_s": -1}',
    "interval of nothing": b'{"head": null, "interval_s": 0}',
    "interval without end": b'{"head": null, "interval_s": 1e308}',
    "interval too large": b'{"head": null, "interval_s": 1e999}',
    "interval is text": b'{"head": null, "interval_s": "soon"}',
    "not JSON": b"<html>",
    "not text": b"\xff\xfe{}",
    "nothing": b"",
    "deep": b"[" * 60_000,
    "a head that is none": b'{"head": {"version": {}}, "interval_s": 1}',
    "a head of the future": b'{"head": {"lineage": "%s", "version": 99999}, "interval_s": 1}'
    % OTHER.encode(),
}
HOSTILE: dict[str, Act] = {
    "garbage": say(b"\x00\xff" * 5000),
    "silence": say(),
    "hangs up": hanging_up,
    "endless status line": without_end(b"HTTP/1.1 200 ", b"x" * 9999),
    "endless header": without_end(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 9999),
    "endless headers": without_end(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 999),
    "continue, continue": without_end(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99),
    "dripped head": dripping(b"HTTP/1.1 200 OK\r\nx: y\r\n"),
    "huge": answer(200, b"{}", content_length="999999999999999999999999"),
    "below zero": answer(200, b"{}", content_length="-5"),
    "bad chunks": say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc"),
    "endless chunk size": without_end(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1" * 9999
    ),
    "endless trailer": without_end(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 999
    ),
    "endless body": without_end(b"HTTP/1.1 200 OK\r\n\r\n", b"{" * 9999),
    "endless line": without_end(EVENTS_HEAD, b"data: " + b"x" * 9999),
    "endless event": without_end(EVENTS_HEAD, b"data: x\n" * 999),
    "endless comments": without_end(EVENTS_HEAD, b":\n\n" * 999),
    "dripped event": dripping(EVENTS_HEAD + version_event(OTHER, 7)),
    "flood of versions": flooding,
    "wrong kind": answer(200, version_event(OTHER, 9), content_type="text/html"),
    "compressed": answer(200, b"\x1f\x8b\x08", content_encoding="gzip"),
    "status 500": answer(500, b"no"),
    "status 401": answer(401),
    "status 999": answer(999),
    "lies": lies(*NOTES),
    **{f"answer: {name}": answer(200, body) for name, body in HEADS.items()},
}
