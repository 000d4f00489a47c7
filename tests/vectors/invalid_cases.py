"""The invalid golden files: how each is made of a valid one, and the error it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codec.writer import pack, unpack, with_sections, zstd

WIDE_WINDOW = bytes.fromhex("28b52ffd008809000078")  # asks for 128 MiB, holds one byte


def index_with(payload: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The same delta with another index."""
    parts = unpack(payload)
    change(parts.index)
    return pack(*parts)


def first_tensor(payload: bytes, **fields: Any) -> bytes:
    """The same delta with other fields of its first tensor."""
    return index_with(payload, lambda index: index["tensors"][0].update(fields))


def first_table(payload: bytes, **fields: Any) -> bytes:
    """The same delta with other fields of its first table."""
    return index_with(payload, lambda index: index["tables"][0].update(fields))


def section_byte(payload: bytes, at: int, value: int) -> bytes:
    """The same delta with one byte of its first section replaced, its trailer made to fit."""
    sections = bytearray(unpack(payload).sections)
    sections[at] = value
    return with_sections(payload, bytes(sections))


def flipped(payload: bytes, at: int) -> bytes:
    """One bit of the file flipped."""
    return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]


def digests_with(payload: bytes, change: Callable[[list[int]], list[int]]) -> bytes:
    """The same delta with other digests."""
    index, digests, sections = unpack(payload)
    return pack(index, change(digests), sections)


def duplicate_name(payload: bytes) -> bytes:
    """Two tensors of one name."""
    return index_with(payload, lambda i: i["tensors"][1].update(name=i["tensors"][0]["name"]))


def grouped(payload: bytes, group_number: int) -> bytes:
    """The first tensor in another group."""
    return first_tensor(payload, group=group_number)


def stored(payload: bytes, data: bytes, plain_bytes: int | None = None) -> bytes:
    """The same delta with another stored index."""
    return pack(*unpack(payload), stored=data, plain_bytes=plain_bytes)


# name: which valid file it is made of, the error's code, how
INVALID: dict[str, tuple[str, str, Callable[[bytes], bytes]]] = {
    "truncated-to-nothing": ("bf16-sparse", "truncated", lambda p: b""),
    "truncated-magic": ("bf16-sparse", "truncated", lambda p: p[:7]),
    "truncated-header": ("bf16-sparse", "truncated", lambda p: p[:39]),
    "truncated-index": ("bf16-sparse", "truncated", lambda p: p[:60]),
    "truncated-trailer": ("bf16-sparse", "truncated", lambda p: p[:-1]),
    "trailing-byte": ("bf16-sparse", "corrupt", lambda p: p + b"\0"),
    "another-magic": ("bf16-sparse", "format", lambda p: b"\x89PNG" + p[4:]),
    "line-ends-changed": ("bf16-sparse", "format", lambda p: p.replace(b"\r\n", b"\n", 1)),
    "version-2": ("bf16-sparse", "unsupported", lambda p: pack(*unpack(p), version=2)),
    "flag-1": ("bf16-sparse", "unsupported", lambda p: pack(*unpack(p), flags=1)),
    "flipped-header-bit": ("bf16-sparse", "checksum-mismatch", lambda p: flipped(p, 16)),
    "flipped-index-bit": ("bf16-sparse", "checksum-mismatch", lambda p: flipped(p, 50)),
    "flipped-section-bit": ("bf16-sparse", "checksum-mismatch", lambda p: flipped(p, len(p) - 20)),
    "flipped-trailer-bit": ("bf16-sparse", "checksum-mismatch", lambda p: flipped(p, len(p) - 1)),
    "index-of-4-gib": (
        "group",
        "limit-exceeded",
        lambda p: pack(*unpack(p), plain_bytes=2**32 - 1),
    ),
    "index-ratio": ("group", "limit-exceeded", lambda p: pack(*unpack(p), plain_bytes=2**24)),
    "index-bomb": ("group", "corrupt", lambda p: stored(p, zstd.compress(bytes(2**20)), 4096)),
    "index-wide-window": ("group", "corrupt", lambda p: stored(p, WIDE_WINDOW, 1)),
    "index-not-zstd": ("group", "corrupt", lambda p: stored(p, b"{}" * 40)),
    "index-not-json": ("group", "corrupt", lambda p: pack(b"tensors", *unpack(p)[1:])),
    "unknown-field": ("group", "corrupt", lambda p: first_tensor(p, offset=0)),
    "unknown-dtype": ("group", "unsupported", lambda p: first_tensor(p, dtype="F128")),
    "unknown-kind": ("group", "corrupt", lambda p: first_tensor(p, kind="link")),
    "negative-dimension": ("group", "format", lambda p: first_tensor(p, shape=[-1, -1])),
    "rank-33": ("group", "limit-exceeded", lambda p: first_tensor(p, shape=[1] * 33)),
    "huge-shape": ("group", "limit-exceeded", lambda p: first_tensor(p, shape=[2**40, 2**40])),
    "long-name": ("group", "limit-exceeded", lambda p: first_tensor(p, name="x" * 1025)),
    "duplicate-name": ("group", "corrupt", duplicate_name),
    "too-many-changes": ("group", "corrupt", lambda p: first_tensor(p, changed=2)),
    "group-out-of-range": ("group", "corrupt", lambda p: grouped(p, 9)),
    "group-of-another-dtype": ("group", "corrupt", lambda p: grouped(p, 1)),
    "sections-missing": ("large", "corrupt", lambda p: first_tensor(p, sizes=[])),
    "sections-too-long": ("large", "corrupt", lambda p: first_tensor(p, sizes=[10**6])),
    "section-of-negative-size": ("large", "corrupt", lambda p: first_tensor(p, sizes=[-1])),
    "table-too-short": ("bf16-sparse", "corrupt", lambda p: first_table(p, rate=[0] * 31)),
    "table-beyond-field": ("bf16-sparse", "corrupt", lambda p: first_table(p, top=256)),
    "rate-beyond-byte": ("bf16-sparse", "corrupt", lambda p: first_table(p, one=[256] * 32)),
    "digest-missing": ("bf16-sparse", "corrupt", lambda p: digests_with(p, lambda d: d[:1])),
    "digest-of-new-wrong": (
        "bf16-sparse",
        "checksum-mismatch",
        lambda p: digests_with(p, lambda d: [d[0], d[1] ^ 1]),
    ),
    "made-from-another-base": (
        "bf16-sparse",
        "base-mismatch",
        lambda p: digests_with(p, lambda d: [d[0] ^ 1, d[1] ^ 1]),
    ),
    "base-lacks-tensor": ("bf16-sparse", "tensor-mismatch", lambda p: first_tensor(p, name="v")),
    "another-shape": ("bf16-sparse", "tensor-mismatch", lambda p: first_tensor(p, shape=[4001])),
    "unknown-method": ("bf16-sparse", "unsupported", lambda p: section_byte(p, 0, 200)),
    "table-out-of-range": ("bf16-sparse", "checksum-mismatch", lambda p: section_byte(p, 0, 9)),
    "shift-out-of-range": ("bf16-sparse", "checksum-mismatch", lambda p: section_byte(p, 1, 255)),
    "range-coder-damaged": ("bf16-sparse", "checksum-mismatch", lambda p: section_byte(p, 2, 0)),
    "raw-too-short": ("bf16-sparse", "corrupt", lambda p: section_byte(p, 0, 255)),
    "planes-not-zstd": ("bf16-sparse", "corrupt", lambda p: section_byte(p, 0, 254)),
}
