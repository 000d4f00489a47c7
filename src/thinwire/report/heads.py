"""Which version a hub says is the newest, out of bytes that may be anything."""

from __future__ import annotations

import msgspec

from thinwire.report.calls import Place
from thinwire.report.http import HubFault
from thinwire.report.messages import Lineage, VersionNumber


class _Head(msgspec.Struct, frozen=True):
    """The part of a VersionNote that matters here; a newer hub may say more."""

    lineage: Lineage
    version: VersionNumber

    def place(self) -> Place:
        return Place(self.lineage, self.version) if self.lineage and self.version else Place()


class _Answer(msgspec.Struct, frozen=True):
    head: _Head | None
    interval_s: float


_HEADS = msgspec.json.Decoder(_Head)
_ANSWERS = msgspec.json.Decoder(_Answer)


def parse_head(data: bytes) -> Place:
    """The version that a note is about.

    Raises:
        HubFault: It is no such note.
    """
    try:
        return _HEADS.decode(data).place()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise HubFault("what it says of the newest version cannot be read") from None


def parse_answer(data: bytes) -> tuple[Place, float]:
    """What a heartbeat was answered with: the newest version, and the seconds until the next.

    Raises:
        HubFault: It is no such answer.
    """
    try:
        answer = _ANSWERS.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise HubFault("its answer to a heartbeat cannot be read") from None
    return (Place() if answer.head is None else answer.head.place()), answer.interval_s
