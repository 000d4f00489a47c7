"""What a destination says of itself: a record below ``thinwire-mirror/``, beside the chain.

Each record is written once, with the next number; the one with the highest number counts. It is
hostile as anything in a bucket: what it names may be deleted one day, so each name must look like
one of the format's, and each key lie below its version's name.
"""

from __future__ import annotations

import re

import msgspec

from thinwire.errors import Corrupt, InvalidArgument, NotFound
from thinwire.interop.formats import Format
from thinwire.store import Store
from thinwire.store.store import key_fault

RECORDS = "thinwire-mirror/"
MAX_RECORD_BYTES = 64 << 20
MAX_NUMBER = 10**12 - 1

_RECORD = re.compile(r"thinwire-mirror/(\d{12})\.json", re.ASCII)


class MirroredVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version at the destination.

    Attributes:
        version: Its number.
        base: The number of the version that it was made from; None: full weights.
        name: Its folder, or its file where the format has no folders.
        source: What it is a copy of: a digest.
        keys: Its objects in the order in which they were written.
        payload_bytes: Bytes of all its objects.
    """

    version: int
    base: int | None
    name: str
    source: str
    keys: list[str]
    payload_bytes: int


class MirrorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a destination says of itself.

    Attributes:
        format: The format's name.
        stream: The stream that it is a copy of, by its id.
        holder: Who writes here: a random id.
        versions: Those that are there, oldest first.
        writing: The name of the one that is being written; empty: none.
        announced: Names that a deployment was told of.
        served: The name that a deployment was last seen to serve.
        told: The name that the caller was last told of.
    """

    format: str
    stream: str
    holder: str
    versions: list[MirroredVersion] = []
    writing: str = ""
    announced: list[str] = []
    served: str = ""
    told: str = ""


def record_key(number: int) -> str:
    """Where the record of a number lies."""
    return f"{RECORDS}{number:012d}.json"


def list_records(store: Store, *, after: int = 0) -> list[int]:
    """The numbers of the records at a destination beyond ``after``, rising."""
    entries = store.list(RECORDS, after=record_key(after))
    found = (_RECORD.fullmatch(entry.key) for entry in entries)
    return [int(match[1]) for match in found if match]


def read_record(store: Store, number: int, format: Format, stream: str) -> MirrorRecord | None:
    """The record of a number at a destination; None: there is none.

    Raises:
        Corrupt: It is malformed, or names what is not its own.
        InvalidArgument: It is of another format, or of a copy of something else than ``stream``.
    """
    try:
        data = store.get(record_key(number), limit_bytes=MAX_RECORD_BYTES)
    except NotFound:
        return None
    try:
        found = msgspec.json.decode(data, type=MirrorRecord)
    except msgspec.MsgspecError as error:
        raise _malformed(store, str(error)) from None
    if (found.format, found.stream) != (format.name, stream):
        raise InvalidArgument(
            f"{store.url} is a copy of another stream, or in another format ({found.format[:40]})",
            hint="Give another destination",
            url=store.url,
        )
    for row in found.versions:
        is_begun = not row.name and not row.keys
        if not is_begun and not (_is_name(format, row.name) and _are_keys(format, row)):
            raise _malformed(store, f"version {row.version} has keys that are not its own")
    if found.writing and not _is_name(format, found.writing):
        raise _malformed(store, "what is being written has a name that is none")
    return found


def _is_name(format: Format, name: str) -> bool:
    return re.fullmatch(format.name_pattern, name, re.ASCII) is not None


def _are_keys(format: Format, row: MirroredVersion) -> bool:
    own = f"{row.name}/"
    return all(
        key in (row.name, format.pointer) or (key.startswith(own) and key_fault(key) is None)
        for key in row.keys
    )


def _malformed(store: Store, reason: str) -> Corrupt:
    return Corrupt(
        f"the record at {store.url}/{RECORDS} is malformed: {reason}",
        hint="Give another destination, or empty this one",
        url=store.url,
    )
