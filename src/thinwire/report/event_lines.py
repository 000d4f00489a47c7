"""``text/event-stream``, read from what arrives piece by piece; nothing is kept beyond a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_LINE_BYTES = 32 << 10
MAX_DATA_BYTES = 64 << 10


class ServerEvent(NamedTuple):
    """An event: its kind, "message" where none is named, and its data."""

    kind: str
    data: bytes


class EventLines:
    """Makes events of pieces.

    A line or an event that is too long is dropped, not cut: half of one means something else.
    Comments, ids and retry times are skipped.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._is_line_dropped = False
        self._was_cr = False
        self._kind = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._is_event_dropped = False

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """The events that end in a piece."""
        if self._was_cr and piece.startswith(b"\n"):
            # The two of one line's end came apart.
            piece = piece[1:]
        self._was_cr = piece.endswith(b"\r")
        # A lone CR ends a line, too.
        *ended, rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for part in ended:
            self._keep(part)
            event = self._take_line()
            if event is not None:
                yield event
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        if len(self._line) + len(part) > MAX_LINE_BYTES:
            self._is_line_dropped = True
            self._line.clear()
        if not self._is_line_dropped:
            self._line += part

    def _take_line(self) -> ServerEvent | None:
        line = bytes(self._line)
        self._line.clear()
        if self._is_line_dropped:
            self._is_line_dropped, self._is_event_dropped = False, True
            return None
        if not line:
            return self._take_event()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._kind = value
        elif field == b"data":
            self._data_bytes += len(value) + 1
            if self._data_bytes > MAX_DATA_BYTES:
                self._is_event_dropped = True
                self._data.clear()
            elif not self._is_event_dropped:
                self._data.append(value)
        return None

    def _take_event(self) -> ServerEvent | None:
        event = None
        if self._data and not self._is_event_dropped:
            kind = self._kind.decode("ascii", "replace") or "message"
            event = ServerEvent(kind, b"\n".join(self._data))
        self._kind, self._data, self._data_bytes = b"", [], 0
        self._is_event_dropped = False
        return event
