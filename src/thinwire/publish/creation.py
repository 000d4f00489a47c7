"""Making a stream, and proving that its store is fit for one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from thinwire.checkpoint.disk import (
    os_errors,
    put_in_place,
    remove_quietly,
    temporary_sibling,
    write_file,
)
from thinwire.checkpoint.file_names import MARK_NAME
from thinwire.errors import AlreadyExists, InvalidArgument, LineageChanged, NotFound
from thinwire.follow import Stream
from thinwire.store import prove_put_if_absent
from thinwire.stream import keys
from thinwire.stream.encoding import MAX_SMALL_BYTES, seal
from thinwire.stream.records import FORMAT, StreamRecord

# In a folder of a publisher: the id of the stream that it publishes to.
_NOTE = "stream-id"
_MAX_NOTE_BYTES = 256


def noted_stream(folder: Path) -> str:
    """The id of the stream that was published to from a folder; empty: none was."""
    path = folder / _NOTE
    with os_errors("cannot read", path), suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(_MAX_NOTE_BYTES).decode(errors="replace").strip()
    return ""


def note_stream(folder: Path, stream: str) -> None:
    """Have a folder remember which stream is published to from it."""
    if noted_stream(folder) == stream:
        return
    temporary = temporary_sibling(folder / _NOTE)
    try:
        write_file(temporary, f"{stream}\n".encode())
        put_in_place(temporary, folder / _NOTE, overwrite=True)
    finally:
        remove_quietly(temporary)


def create_stream(stream: Stream, noted: Mapping[str, str] | None = None) -> StreamRecord:
    """The stream's record; made if there is none. Of several that try at once, one makes it.

    Args:
        stream: The stream.
        noted: The streams that were published to before, by id: the folder that says so. Where
            there are some, the stream must be one of them.

    Raises:
        Unavailable: There is no stream, and there was one: its store is away.
        LineageChanged: It is another one than was published to before.
        UnsafeStore: The store does not honour put-if-absent.
        InvalidArgument: The URL is that of a follower's folder; the stream is signed and there is
            no key, or it has another policy than the one asked for.
    """
    if noted:
        stream.expect(", ".join(sorted(noted.values())))
    try:
        record = stream.record()
        _check_noted(stream, record, noted or {})
        _check_policy(stream, record)
    except NotFound:
        _refuse_copy(stream)
        made = StreamRecord(
            format=FORMAT,
            type=StreamRecord.TYPE,
            stream=secrets.token_hex(16),
            created_ms=time.time_ns() // 1_000_000,
            lineage=secrets.token_hex(16),
            model=stream.model,
            policy=stream.policy,
        )
        _, data = seal(made, stream.signing_key)
        with suppress(AlreadyExists):
            stream.store.put_if_absent(keys.STREAM, data)
        record = stream.record()
    stream.check_key()
    # The bytes as they lie there: writing the same ones again does no harm.
    data = stream.store.get(keys.STREAM, limit_bytes=MAX_SMALL_BYTES)
    prove_put_if_absent(stream.store, keys.STREAM, data)
    return record


def _check_noted(stream: Stream, record: StreamRecord, noted: Mapping[str, str]) -> None:
    if noted and record.stream not in noted:
        raise LineageChanged(
            f"{', '.join(sorted(noted.values()))}: this is of another stream than the one at "
            f"{stream.url}, which was replaced",
            hint="Find out by whom. Meant: remove the folder, or give an empty one (folder=)",
        )


def _refuse_copy(stream: Stream) -> None:
    """A folder that follows a stream, or is a publisher's baseline, is no place for one."""
    parts = urlsplit(stream.url)
    folder = Path(unquote(parts.path))
    if parts.scheme == "file" and (folder / MARK_NAME).exists():
        raise InvalidArgument(
            f"{folder} holds a copy of a model at a version of a stream: none is made inside",
            hint="Were the stream's URL and the folder swapped?",
        )


def _check_policy(stream: Stream, record: StreamRecord) -> None:
    if stream.asked_policy not in (None, record.policy):
        raise InvalidArgument(
            f"{stream.url} exists, with another policy than the one asked for",
            hint="Leave the policy out, or change it with `thinwire policy` (set_policy)",
        )
