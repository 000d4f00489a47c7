"""A second decoder of the thinwire delta format, written from docs/format.md alone.

It shares nothing with the library and is slow. § 5.4 and the like are sections of the document.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import xxhash

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAGIC = b"\x89TWD\r\n\x1a\n"
CHUNK, BLOCK = 1 << 20, 128  # words; a digest's run is as long as a chunk
DIGESTS = {"delta": 2, "same": 1, "full": 1, "removed": 1}  # how many, by kind of tensor (§ 2)
COST = [round(2**24 * math.log2(1 + 2 ** ((56 - r) / 8))) for r in range(256)]
HIGH = [round(2**31 * 2 ** (-i / 256)) for i in range(256)]
LOW = [round(2**31 * 2 ** (-i / 65536)) for i in range(256)]
STEP = [round(65536 / (n + 1.5)) for n in range(159)]


class CorruptError(ValueError):
    """The file breaks a rule of the format."""


class TruncatedError(CorruptError):
    """The file is shorter than its header says."""


class BaseError(ValueError):
    """The base is not the one that the delta was made from."""


def check(condition: bool, message: str) -> None:
    """Raise CorruptError unless the condition holds."""
    if not condition:
        raise CorruptError(message)


class Dtype(NamedTuple):  # a row of § 3; `bits` are those of one element of a shape
    width: int  # bytes
    bits: int
    right: int = 0
    mask: int = 0
    ordered: bool = False


ROWS = {
    "BF16": Dtype(2, 16, 7, 0xFF, True),
    "F16": Dtype(2, 16, 10, 0x1F, True),
    "F32": Dtype(4, 32, 23, 0xFF, True),
    "C64": Dtype(4, 64, 23, 0xFF, True),
    "F64": Dtype(8, 64, 52, 0x7FF, True),
    "F8_E4M3 F8_E4M3FNUZ": Dtype(1, 8, 3, 0xF, True),
    "F8_E5M2 F8_E5M2FNUZ": Dtype(1, 8, 2, 0x1F, True),
    "F8_E8M0": Dtype(1, 8, 4, 0xF),
    "F6_E2M3 F6_E3M2": Dtype(1, 6, 4, 0xF),
    "F4": Dtype(1, 4, 4, 0xF),
    **{f"{'BOOL' if n == 1 else ''} I{8 * n} U{8 * n}": Dtype(n, 8 * n) for n in (1, 2, 4, 8)},
}
DTYPES = {name: row for names, row in ROWS.items() for name in names.split()}


@dataclass
class Tensor:  # of the index (§ 2); here and below, init=False is for what the JSON lacks
    name: str
    dtype: str
    shape: list[int]
    kind: str = "delta"
    changed: int = 0
    sizes: list[int] = field(default_factory=list)
    group: int | None = None
    length: int = field(default=0, init=False)
    digests: list[bytes] = field(default_factory=list, init=False)
    sections: list[bytes] = field(default_factory=list, init=False)


@dataclass
class Table:  # of rates
    dtype: str
    top: int
    rate: list[int]
    one: list[int]


@dataclass
class Group:  # of small tensors that form one chunk
    dtype: str
    size: int = 0
    section: bytes = field(default=b"", init=False)


@dataclass
class Attachment:  # without a section it equals the base's
    name: str
    kind: str
    size: int
    stored: int | None = None
    digest: bytes = field(default=b"", init=False)
    section: bytes | None = field(default=None, init=False)


@dataclass
class File:
    """A whole delta, verified as far as that is possible without the base."""

    tensors: list[Tensor]
    tables: list[Table] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)


def convert(value: Any, kind: str) -> Any:
    """A JSON value as what a field's annotation says; TypeError where a field is missing."""
    if kind == "int | None":
        return None if value is None else convert(value, "int")
    if kind in ("int", "str"):
        good = value >= 0 if type(value) is int else len(str(value).encode()) <= 1024
        check(good and type(value).__name__ == kind, f"not a natural number or name: {kind}")
        return value
    if kind.startswith("list"):
        check(isinstance(value, list), "not a list")
        return [convert(item, kind[5:-1]) for item in value]
    check(isinstance(value, dict), "not an object")
    known = {item.name: str(item.type) for item in fields(globals()[kind]) if item.init}
    check(value.keys() <= known.keys(), "unknown field")
    return globals()[kind](**{name: convert(value[name], known[name]) for name in value})


def parse_index(content: bytes) -> File:
    """The index, verified in itself."""
    try:
        file: File = convert(json.loads(content.decode()), "File")
    except (RecursionError, TypeError) as error:
        raise CorruptError(f"index nested too deep, or a field is missing: {error}") from error
    check(len(file.steps) in (0, 2) and len(file.tensors) <= 1 << 20, "steps, or too many tensors")
    uses = Counter(table.dtype for table in file.tables)
    check(max(uses.values(), default=0) <= 128, "too many tables")
    dtypes = {*uses, *(t.dtype for t in file.tensors), *(g.dtype for g in file.groups)}
    check(dtypes <= DTYPES.keys(), "unknown dtype")
    for table in file.tables:
        good = len(table.rate) == len(table.one) == 32 and max(table.rate + table.one) < 256
        check(good, "malformed table")
    room = [CHUNK] * len(file.groups)
    for tensor in file.tensors:
        words = measure(tensor)
        if tensor.group is not None:
            check(tensor.group < len(room) and tensor.kind in ("delta", "same"), "bad group")
            check(file.groups[tensor.group].dtype == tensor.dtype, "group of another dtype")
            room[tensor.group] -= words
    check(min(room, default=0) >= 0, "group too large")
    for attachment in file.attachments:  # names: § 6
        name, kind, size = attachment.name, attachment.kind, attachment.size
        check(kind in ("header", "file", "removed") and size <= 1 << 30, "bad attachment")
        check(kind != "removed" or (size, attachment.stored) == (0, None), "removed, with content")
        bad = any(c < " " or "\x7f" <= c < "\xa0" or c in "/\\" for c in name)
        plain = name != "" and name[0] != "." and not bad
        check(plain or (kind, name) == ("header", "."), "bad name")
    for names in ([t.name for t in file.tensors], [a.name.lower() for a in file.attachments]):
        check(len(set(names)) == len(names), "name given twice")
    return file


def measure(tensor: Tensor) -> int:
    """Verify a tensor in itself and set its length; the number of its words."""
    check(tensor.kind in DIGESTS, "unknown kind of tensor")
    dtype, own = DTYPES[tensor.dtype], tensor.group is None and tensor.kind in ("delta", "full")
    tensor.length, rest = divmod(math.prod(tensor.shape) * dtype.bits, 8)
    check(rest == 0 and tensor.length <= 1 << 48 and len(tensor.shape) <= 32, "bad shape")
    words = tensor.length // dtype.width
    check(tensor.changed <= words, "more changes than words")
    check(len(tensor.sizes) == (-(-words // CHUNK) if own else 0), "number of sections")
    check(tensor.kind != "full" or 0 not in tensor.sizes, "empty section of a full tensor")
    return words


def hash64(data: bytes) -> bytes:
    """XXH3-64 as 8 bytes, little-endian."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def run_digest(data: bytes, run: int = CHUNK) -> bytes:
    """The digest of two levels, over runs of so many bytes."""
    return hash64(b"".join(hash64(data[i : i + run]) for i in range(0, len(data), run)))


def unpack(frame: bytes, size: int) -> bytes:
    """The content of exactly one zstd frame, which must have this size."""
    decompressor = zstd.ZstdDecompressor()
    try:
        content = bytes(decompressor.decompress(frame, max_length=size + 1))
    except zstd.ZstdError as error:
        raise CorruptError(f"zstd: {error}") from error
    whole = decompressor.eof and not decompressor.unused_data
    check(whole and len(content) == size, "not one zstd frame of that size")
    return content


def read(payload: bytes) -> File:
    """Verify a file as far as that is possible without the base and cut it into parts (§ 1, 2)."""
    if len(payload) < 40:
        raise TruncatedError("no whole header")
    header = struct.unpack_from("<8sHHIIIQ8s", payload)
    magic, version, flags, stored, unpacked, digests, total, digest = header
    check((magic, version, flags) == (MAGIC, 1, 0), "unknown magic, version or flags")
    if len(payload) < total:
        raise TruncatedError(f"{len(payload)} of {total} bytes")
    check(len(payload) == total, "bytes after the end")
    at, sections = 40, 40 + stored + digests
    check(hash64(payload[:32] + payload[40:sections]) == digest, "digest of the header")
    check(run_digest(payload[:-8]) == payload[-8:], "trailer")
    check(unpacked <= min(1 << 26, (1 << 20) + 300 * stored), "index too large")

    def cut(size: int) -> bytes:
        nonlocal at
        at += size
        return payload[at - size : at]

    file = parse_index(unpack(cut(stored), unpacked))
    for tensor in file.tensors:
        tensor.digests = [cut(8) for _ in range(DIGESTS[tensor.kind])]
    for attachment in file.attachments:
        attachment.digest = cut(8)
    check(at == sections, "number of digests")
    for tensor in file.tensors:
        tensor.sections = [cut(size) for size in tensor.sizes]
    for group in file.groups:
        group.section = cut(group.size)
    for attachment in file.attachments:
        attachment.section = None if attachment.stored is None else cut(attachment.stored)
    check(at == total - 8, "sections do not fill the file")
    return file


def decode(payload: bytes, base: Mapping[str, bytes]) -> dict[str, bytes]:
    """The bytes of the new tensors by name, in order, each verified by its digest (§ 2)."""
    file = read(payload)
    new = {t.name: base_bytes(t, base) for t in file.tensors if t.kind != "removed"}
    for index, group in enumerate(file.groups):
        members = [tensor for tensor in file.tensors if tensor.group == index]
        old = b"".join(new[tensor.name] for tensor in members)
        chunk = decode_chunk(group.section, group.dtype, file, old)
        for tensor in members:
            new[tensor.name], chunk = chunk[: tensor.length], chunk[tensor.length :]
    for tensor in file.tensors:
        run = CHUNK * DTYPES[tensor.dtype].width
        if tensor.sections:
            olds = [new[tensor.name][i : i + run] for i in range(0, tensor.length, run)]
            pairs = zip(tensor.sections, olds, strict=True)
            new[tensor.name] = b"".join(decode_chunk(s, tensor.dtype, file, o) for s, o in pairs)
        good = tensor.kind == "removed" or run_digest(new[tensor.name], run) == tensor.digests[-1]
        check(good, f"digest of the new tensor {tensor.name!r}")
    return new


def base_bytes(tensor: Tensor, base: Mapping[str, bytes]) -> bytes:
    """The verified bytes of a tensor in the base; zeros for one that is carried in full."""
    if tensor.kind == "full":
        check(all(section[0] >= 254 for section in tensor.sections), "class coding without a base")
        return bytes(tensor.length)
    old, run = base.get(tensor.name), CHUNK * DTYPES[tensor.dtype].width
    if old is None or len(old) != tensor.length or run_digest(old, run) != tensor.digests[0]:
        raise BaseError(f"tensor {tensor.name!r} of the base is missing or differs")
    return old


def decode_chunk(section: bytes, dtype: str, file: File, old: bytes) -> bytes:
    """The new bytes of a chunk given the old ones, zeros in a full tensor (§ 4)."""
    method, rest, width = section[:1], section[1:], DTYPES[dtype].width
    if not method:
        return old
    if method == b"\xff":
        check(len(rest) == len(old), "raw chunk of another size")
        return rest
    if method == b"\xfe":
        planes = np.frombuffer(unpack(rest, len(old)), np.uint8).reshape(width, -1)
        return (planes.T.reshape(-1) ^ np.frombuffer(old, np.uint8)).tobytes()
    tables = [table for table in file.tables if table.dtype == dtype]
    check(method[0] < len(tables), "no such method or table")
    check(len(rest) >= 1 and 64 <= rest[0] <= 192, "bad shift")
    words = np.frombuffer(old, f"<u{width}").copy()
    coder = ClassDecoder(rest[1:], rest[0] - 128, tables[method[0]], DTYPES[dtype])
    for index, word in coder.changes(words):
        words[index] = word
    return words.tobytes()


class ClassDecoder:
    """Class coding (§ 5) of one chunk."""

    def __init__(self, data: bytes, shift: int, table: Table, dtype: Dtype):
        self.data, self.table, self.dtype, self.bits = data, table, dtype, 8 * dtype.width
        self.range, self.at = 2**64 - 1, 8
        self.code = int.from_bytes(data[:8].ljust(8, b"\0"), "big")
        cost24, s = [COST[min(255, max(0, rate + shift))] for rate in table.rate], 0
        while (max(cost24) + (1 << (7 + s))) >> (8 + s) > 65535:
            s += 1
        self.y = np.array([(cost + (1 << (7 + s))) >> (8 + s) << s for cost in cost24])
        self.direction = [32768, 30]
        self.top = [[[32768, 6] for _ in range(4)] for _ in range(64)]
        self.one = [[256 * one + 128, 14] for one in table.one]
        self.octave = [
            [[128 * table.one[max(0, c - o)] + 18064, 2] for o in range(64)] for c in range(32)
        ]

    def step(self, start: int, size: int) -> None:
        """Go to a part of the range; `code` has 64 bits also where it is not below `range`."""
        self.code, self.range = self.code - start, size
        if size < 1 << 32:
            piece = self.data[self.at : self.at + 4].ljust(4, b"\0")
            self.range, self.at = size << 32, self.at + 4
            check(self.at <= len(self.data) + 8, "section ends too early")
            self.code = (self.code << 32 | int.from_bytes(piece, "big")) & 2**64 - 1

    def adaptive(self, state: list[int]) -> int:
        """An adaptive bit; the state is [p, n]."""
        p, n = state
        bound = (self.range >> 16) * p
        v = int(self.code < bound)
        self.step(*((0, bound) if v else (bound, self.range - bound)))
        state[:] = p + (((65472 if v else 64) - p) * STEP[n] >> 16), min(n + 1, 158)
        return v

    def direct(self, n: int) -> int:
        """That many plain bits."""
        value = 0
        while n > 0:
            m = min(n, 16)
            size = self.range >> m
            v = min(self.code // size, (1 << m) - 1)
            self.step(v * size, size)
            value, n = value << m | v, n - m
        return value

    def changes(self, old: np.ndarray) -> Iterator[tuple[int, int]]:
        """The changed words as (index, new word) (§ 5.4)."""
        class_fields = (old >> self.dtype.right & self.dtype.mask).astype(np.int64)
        classes = np.clip(self.table.top - class_fields, 0, 31)
        sums = np.concatenate(([0], np.cumsum(self.y[classes]))).tolist()

        def weight(i: int) -> int:  # W(i), with `from` = start
            y = sums[i] - sums[start]
            e = 0 if y >> 16 >= 31 else (HIGH[(y >> 8) & 255] * LOW[y & 255] >> 31) >> (y >> 16)
            t = (2**31 - e) >> 7
            return t - (t >> 16) + i - start

        for block in range(0, len(old), BLOCK):
            start, end = block, min(block + BLOCK, len(old))
            while start < end:
                unit = self.range >> 24
                target, last = self.code // unit, unit * weight(end)
                if self.code >= last:
                    self.step(last, self.range - last)
                    break
                low, high = start, end  # W(low) <= target < W(high)
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if weight(middle) <= target else (low, middle)
                self.step(unit * weight(low), unit * (weight(high) - weight(low)))
                yield low, self.change(int(old[low]), int(classes[low]))
                start = low + 1
        check(self.code < self.range, "number outside of the last interval")

    def change(self, old: int, c: int) -> int:
        """The new word in place of an old one of class c (§ 5.5)."""
        up, size = self.adaptive(self.direction), 1
        if not self.adaptive(self.one[c]):
            o = 1
            while o < self.bits - 1 and not self.adaptive(self.octave[c][o]):
                o += 1
            node, learnt = 1, min(o, 2)
            for _ in range(learnt):
                node = 2 * node + self.adaptive(self.top[o][node])
            size = (node << (o - learnt)) + self.direct(o - learnt)
        ones, sign = (1 << self.bits) - 1, 1 << (self.bits - 1)
        if not self.dtype.ordered:
            return (old + size if up else old - size) & ones
        order = ~old & ones if old & sign else old | sign
        order = (order + size if up else order - size) & ones
        return order & ~sign if order & sign else ~order & ones


def attachments(payload: bytes, base: Mapping[str, bytes]) -> dict[str, bytes]:
    """The new checkpoint's attachments by name, verified (§ 6); `base` has those not carried."""
    result = {}
    for entry in (entry for entry in read(payload).attachments if entry.kind != "removed"):
        carried = entry.section is not None
        content = unpack(entry.section or b"", entry.size) if carried else base.get(entry.name, b"")
        if len(content) != entry.size or hash64(content) != entry.digest:
            raise (CorruptError if carried else BaseError)(f"content of {entry.name!r}")
        result[entry.name] = content
    return result
