"""Containers taken apart and put together without thinwire; the digests fit what they name."""

from __future__ import annotations

import json
import struct
import sys
from typing import Any, NamedTuple

import numpy as np
import xxhash

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAGIC = b"\x89TWD\r\n\x1a\n"
HEADER = struct.Struct("<8sHHIIIQQ")
TRAILER_BYTES = 8
RUN_BYTES = 1 << 20


class Parts(NamedTuple):
    """What a container is made of."""

    index: dict[str, Any]
    digests: list[int]
    sections: bytes


def unpack(payload: bytes) -> Parts:
    """The parts of a sound container."""
    _, _, _, stored, _, digest_bytes, _, _ = HEADER.unpack_from(payload)
    index_end = HEADER.size + stored
    sections_start = index_end + digest_bytes
    return Parts(
        json.loads(zstd.decompress(payload[HEADER.size : index_end])),
        np.frombuffer(payload[index_end:sections_start], "<u8").tolist(),
        payload[sections_start:-TRAILER_BYTES],
    )


def pack(
    index: dict[str, Any] | bytes,
    digests: list[int] | bytes,
    sections: bytes,
    *,
    version: int = 1,
    flags: int = 0,
    magic: bytes = MAGIC,
    stored: bytes | None = None,
    plain_bytes: int | None = None,
    file_bytes: int | None = None,
) -> bytes:
    """A container of any parts, however hostile; head digest and trailer are right."""
    plain = index if isinstance(index, bytes) else json.dumps(index).encode()
    stored = zstd.compress(plain) if stored is None else stored
    packed = digests if isinstance(digests, bytes) else np.array(digests, "<u8").tobytes()
    body = stored + packed
    fields = (
        magic,
        version,
        flags,
        len(stored),
        len(plain) if plain_bytes is None else plain_bytes,
        len(packed),
        HEADER.size + len(body) + len(sections) + TRAILER_BYTES
        if file_bytes is None
        else file_bytes,
    )
    digest = xxhash.xxh3_64_intdigest(HEADER.pack(*fields, 0)[:-8] + body)
    return seal(HEADER.pack(*fields, digest) + body + sections)


def seal(body: bytes) -> bytes:
    """The trailer added that fits all before it."""
    return body + digest_of_runs(body, RUN_BYTES).to_bytes(8, "little")


def digest_of_runs(data: bytes, run_bytes: int) -> int:
    """The digest of the digests of a container's or a tensor's runs."""
    runs = [data[at : at + run_bytes] for at in range(0, len(data), run_bytes)]
    digests = np.array([xxhash.xxh3_64_intdigest(run) for run in runs], "<u8")
    return xxhash.xxh3_64_intdigest(digests.tobytes())


def with_sections(payload: bytes, sections: bytes) -> bytes:
    """The same head before other sections, with the trailer that fits."""
    old = unpack(payload).sections
    assert len(sections) == len(old)
    return seal(payload[: len(payload) - TRAILER_BYTES - len(old)] + sections)
