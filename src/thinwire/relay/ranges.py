"""Which bytes a request asks for: the Range header of RFC 9110, section 14."""

from __future__ import annotations

import re
from typing import NamedTuple

_ONE = re.compile(r"bytes=[ \t]*(\d{0,19})-(\d{0,19})[ \t]*")
_MANY = re.compile(r"bytes=[-0-9, \t]*,[-0-9, \t]*")


class Span(NamedTuple):
    """A half-open range of an object; ``is_part``: it was asked for, so the answer is a 206."""

    start: int
    stop: int
    is_part: bool


def span_of(header: str | None, size_bytes: int) -> Span | None:
    """What to send; None: nothing that was asked for is there, or there were several ranges.

    Units and forms that the RFC does not know are as if they were not there.
    """
    whole = Span(0, size_bytes, is_part=False)
    if header is None:
        return whole
    header = header.strip().lower()
    found = _ONE.fullmatch(header)
    if found is None:
        return None if _MANY.fullmatch(header) else whole
    first, last = found.groups()
    if not first:
        if not last:
            return whole
        length = min(int(last), size_bytes)
        return Span(size_bytes - length, size_bytes, is_part=True) if length else None
    start = int(first)
    if last and int(last) < start:
        return whole
    if start >= size_bytes:
        return None
    stop = min(int(last) + 1, size_bytes) if last else size_bytes
    return Span(start, stop, is_part=True)
