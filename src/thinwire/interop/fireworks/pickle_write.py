"""Plain values to pickles, byte for byte as Python's own pickler (protocol 5) makes them.

arc_v3 keeps the smallest of several compressed pickles. As a compressor may make more of less, only
the same pickle is sure not to become larger than the package's; and written here it stays the same
whatever the Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

Storable: TypeAlias = Any
"""A dict with text keys, a tuple, str of under 256 bytes, bytes, or an int from -2^31 to 2^63."""

_FRAME_BYTES = 1 << 16
# A frame of fewer bytes has no head.
_MIN_FRAME_BYTES = 4
_TUPLE_ENDS = {1: b"\x85\x94", 2: b"\x86\x94", 3: b"\x87\x94"}


class Unshared(str):
    """Text that the package makes anew: written out where it comes again, as the pickler does."""

    __slots__ = ()


def write_pickle(value: Storable) -> bytes:
    """The pickle of a value. Text and empty bytes that come again are written once.

    Args:
        value: See ``Storable``; at most 256 texts, tables, tuples and runs of bytes in it.
    """
    writer = _Writer()
    writer.save(value)
    return writer.finish()


class OpenTable:
    """The pickle of a table whose last item is still open; so several share the work on the rest.

    Args:
        items: All items but the last, two or more.
    """

    def __init__(self, items: Mapping[str, Storable]) -> None:
        self._writer = _Writer()
        self._writer.open_table(items)

    def write_with(self, key: str, value: Storable) -> bytes:
        """The pickle of the table with this last item."""
        writer = self._writer.copy()
        writer.save(key)
        writer.save(value)
        writer.put(b"u")
        return writer.finish()


def bytes_head(size_bytes: int) -> bytes:
    """What precedes a run of so many bytes in a pickle."""
    if size_bytes < 1 << 8:
        return b"C" + size_bytes.to_bytes(1, "little")
    if size_bytes < 1 << 32:
        return b"B" + size_bytes.to_bytes(4, "little")
    return b"\x8e" + size_bytes.to_bytes(8, "little")


class _Writer:
    """One pickle: finished pieces, and the frame that is still open."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = [b"\x80\x05"]
        self._frame: list[bytes] = []
        self._frame_bytes = 0
        self._memo: dict[str | bytes, int] = {}
        self._memo_count = 0

    def copy(self) -> _Writer:
        twin = _Writer()
        twin._pieces = self._pieces.copy()
        twin._frame = self._frame.copy()
        twin._frame_bytes = self._frame_bytes
        twin._memo = self._memo.copy()
        twin._memo_count = self._memo_count
        return twin

    def finish(self) -> bytes:
        self.put(b".")
        self._close_frame()
        return b"".join(self._pieces)

    def put(self, piece: bytes) -> None:
        self._frame.append(piece)
        self._frame_bytes += len(piece)

    def _close_frame(self) -> None:
        if self._frame_bytes >= _MIN_FRAME_BYTES:
            self._pieces.append(b"\x95" + self._frame_bytes.to_bytes(8, "little"))
        self._pieces += self._frame
        self._frame = []
        self._frame_bytes = 0

    def save(self, value: Storable) -> None:
        # The pickler looks at this before each value, never after one.
        if self._frame_bytes >= _FRAME_BYTES:
            self._close_frame()
        kind = type(value)
        if kind is int:
            self.put(_int_bytes(value))
        elif kind is str or kind is Unshared:
            if not self._save_again(value):
                self.put(_text_bytes(value))
        elif kind is dict:
            self._save_table(value)
        elif kind is tuple:
            self._save_tuple(value)
        elif not self._save_again(value):
            self._save_bytes(value)

    def _save_again(self, value: str | bytes) -> bool:
        """Refer to a text or to empty bytes that were written before; else note it."""
        if type(value) is str or not value:  # there is only one empty run of bytes
            number = self._memo.setdefault(value, self._memo_count)
            if number < self._memo_count:
                self.put(b"h" + bytes((number,)))
                return True
        self._memo_count += 1
        return False

    def _save_bytes(self, value: bytes) -> None:
        head = bytes_head(len(value))
        if len(value) < _FRAME_BYTES:
            self.put(head + value)
        else:
            # Large ones stand outside of frames.
            self._close_frame()
            self._pieces += (head, value)
        self.put(b"\x94")

    def _save_tuple(self, value: tuple[Storable, ...]) -> None:
        if not value:
            self.put(b")")
            return
        if len(value) > 3:
            self.put(b"(")
        for part in value:
            self.save(part)
        self._memo_count += 1
        self.put(_TUPLE_ENDS.get(len(value), b"t\x94"))

    def _save_table(self, value: dict[str, Storable]) -> None:
        if len(value) > 1:
            self.open_table(value)
            self.put(b"u")
            return
        self._memo_count += 1
        self.put(b"}\x94")
        for key, part in value.items():
            self.save(key)
            self.save(part)
            self.put(b"s")

    def open_table(self, items: Mapping[str, Storable]) -> None:
        self._memo_count += 1
        self.put(b"}\x94(")
        for key, part in items.items():
            self.save(key)
            self.save(part)


@lru_cache(maxsize=256)
def _text_bytes(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes((len(data),)) + data + b"\x94"


def _int_bytes(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
