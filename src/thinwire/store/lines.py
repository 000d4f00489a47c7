"""A socket for http.client whose answers end: at a deadline, and after so many bytes.

A socket's own timeout is for one read. A server that gives a byte now and then, interim answers or
headers without end would hold whoever asked for ever.
"""

from __future__ import annotations

import io
import math
import socket
import time
from collections.abc import Callable
from typing import Any

# What OpenSSL calls the first bytes of an answer in plain HTTP.
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})


class TooMuchSent(Exception):
    """More came than any answer has."""


class Line:
    """What http.client needs of a socket.

    Args:
        found: The connected socket; it is this one's to close.
        slice_s: How long one wait may last at most, before ``check`` is called again.
        check: Raises what is to end a wait.
    """

    def __init__(
        self,
        found: socket.socket,
        *,
        slice_s: float = math.inf,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = found
        self._slice_s = slice_s
        self._check = check
        self._deadline_s = 0.0
        self._silence_s = math.inf
        self._left_bytes = 0

    def give(self, timeout_s: float, limit_bytes: int, *, silence_s: float = math.inf) -> None:
        """Let what follows take so long, and so many bytes, from now on.

        Args:
            timeout_s: For all of it.
            limit_bytes: The most that may arrive.
            silence_s: How long nothing may arrive.
        """
        self._deadline_s = time.monotonic() + timeout_s
        self._left_bytes = limit_bytes
        self._silence_s = silence_s

    def sendall(self, data: Any) -> None:
        """Send it all.

        Raises:
            TimeoutError: It was not taken before the deadline.
        """
        self._socket.settimeout(max(0.001, self._deadline_s - time.monotonic()))
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """A reader of what comes."""
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        """Nothing yet: http.client closes before it reads an answer that ends with the line."""

    def shut(self) -> None:
        """Close it."""
        self._socket.close()

    def read_into(self, buffer: Any) -> int:
        """Wait for bytes.

        Raises:
            TimeoutError: None came before the deadline, or for too long.
            TooMuchSent: More came than is allowed.
        """
        if self._left_bytes <= 0:
            raise TooMuchSent
        silent_s = time.monotonic() + self._silence_s
        while True:
            self._check()
            left_s = min(self._deadline_s, silent_s) - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(min(left_s, self._slice_s))
            try:
                size_bytes = self._socket.recv_into(buffer)
            except TimeoutError:
                continue
            self._left_bytes -= size_bytes
            return size_bytes


class _Reader(io.RawIOBase):
    def __init__(self, line: Line) -> None:
        self._line = line

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._line.read_into(buffer)
