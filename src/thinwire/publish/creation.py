"""Making a stream, and proving that its store is fit for one."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from thinwire.checkpoint.disk import os_errors
from thinwire.checkpoint.file_names import MARK_NAME
from thinwire.errors import AlreadyExists, InvalidArgument, NotFound
from thinwire.follow import Stream
from thinwire.store import prove_put_if_absent
from thinwire.stream import keys
from thinwire.stream.encoding import MAX_SMALL_BYTES, seal
from thinwire.stream.records import FORMAT, StreamRecord

# In a folder of a publisher: the record of the stream that it publishes to.
_NOTE = "stream.json"


def create_stream(stream: Stream, folder: Path | None = None) -> StreamRecord:
    """The stream's record; made if there is none. Of several that try at once, one makes it.

    Args:
        stream: The stream.
        folder: What a publisher keeps from run to run: with it none is made in place of one that
            was there.

    Raises:
        Unavailable: There is no stream, and there was one: its store is away.
        UnsafeStore: The store does not honour put-if-absent.
        InvalidArgument: The URL is that of a follower's folder; the stream is signed and there is
            no key, or it has another policy than the one asked for.
    """
    if folder is not None and (folder / _NOTE).exists():
        stream.expect()
    try:
        record = stream.record()
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
    if folder is not None:
        with os_errors("cannot write into", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _NOTE).write_bytes(data)
    return record


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
