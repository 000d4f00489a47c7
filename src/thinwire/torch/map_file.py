"""Index maps as files: a cache, checked before use and made again where it is not sound.

::

    magic 8 | head bytes 4 | head (JSON) | rows, 9 int64 each | XXH3-64 of all before 8
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from thinwire.checkpoint.disk import map_file
from thinwire.codec.digest import xxh3_64
from thinwire.errors import ThinwireError
from thinwire.torch.index_map import IndexMap, Run

_LOG = logging.getLogger("thinwire")

MAGIC = b"TWMAP01\n"
MAX_FILE_BYTES = 1 << 34
_HEAD = struct.Struct("<I")
_DIGEST = struct.Struct("<Q")
_ROW_BYTES = 8 * len(Run._fields)


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: list[tuple[str, str, int]]
    parameters: list[tuple[str, str, int]]
    refused: dict[str, str]


def write_map(path: Path, index_map: IndexMap) -> None:
    """Keep a map, where that works: it can always be made again."""
    head = msgspec.json.encode(
        _Head(
            [(name, *rest) for name, rest in index_map.tensors.items()],
            [(name, *rest) for name, rest in index_map.parameters.items()],
            index_map.refused,
        )
    )
    data = MAGIC + _HEAD.pack(len(head)) + head + index_map.runs.astype("<i8").tobytes()
    digest = xxh3_64(np.frombuffer(data, np.uint8))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".map-") as file:
            file.write(data + _DIGEST.pack(digest))
            file.flush()
            # Ranks may run under another user than those of the next start.
            os.fchmod(file.fileno(), 0o644)
            # Ranks of one layout may write at once: either's is right.
            with suppress(FileNotFoundError):
                path.unlink()
            with suppress(FileExistsError):
                path.hardlink_to(file.name)
    except OSError as error:
        _LOG.warning("an index map could not be kept in %s: %s", path.parent, error)


def read_map(path: Path) -> IndexMap | None:
    """A kept map; None where there is none, or it is not sound: it can be made again."""
    with suppress(ThinwireError, ValueError, OverflowError, struct.error, msgspec.MsgspecError):
        data = map_file(path, follow_link=False)
        end = data.size - _DIGEST.size
        at = len(MAGIC) + _HEAD.size
        if data.size > MAX_FILE_BYTES or end < at or data[: len(MAGIC)].tobytes() != MAGIC:
            return None
        if _DIGEST.unpack_from(data.data, end)[0] != xxh3_64(data[:end]):
            return None
        (head_bytes,) = _HEAD.unpack_from(data.data, len(MAGIC))
        first = at + head_bytes
        if first > end or (end - first) % _ROW_BYTES:
            return None
        head = msgspec.json.decode(data[at:first].tobytes(), type=_Head)
        rows = np.frombuffer(data[first:end].tobytes(), "<i8").astype(np.int64)
        return IndexMap(
            {name: (dtype, count) for name, dtype, count in head.tensors},
            {name: (dtype, count) for name, dtype, count in head.parameters},
            rows.reshape(-1, len(Run._fields)),
            head.refused,
        )
    return None
