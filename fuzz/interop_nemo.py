"""Target `nemo`: what ``torch.save`` made of positions, values and tables, in a zstd frame."""

from __future__ import annotations

import struct
import zlib
from random import Random
from typing import Any

from fuzz.interop_bundle import BITS, SHAPES, Layout, run
from fuzz.interop_mutate import (
    ODD_VALUES,
    flip_some,
    mutate_numbers,
    pack_zstd,
    put_numbers,
    unpack_zstd,
)
from fuzz.interop_opcodes import (
    GLOBALS,
    Global,
    emit_pickle,
    mutate_pickle,
    mutate_value,
    take_value,
)
from fuzz.mutate import INTEGERS, TEXTS, mutate_bytes
from fuzz.target import Target
from thinwire.interop import nemo
from thinwire.interop.pickles import Call, PersistentId

_LAYOUT = Layout("nemo", nemo, ("000000.pt",), "000000.pt")

_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_WIDE_LOCATOR = struct.Struct("<4sIQI")
_WIDE_END = struct.Struct("<4sQ2H2I4Q")
_WIDE = 0xFFFFFFFF
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
_WORD_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
_STORAGES = {1: "ByteStorage", 2: "ShortStorage", 4: "IntStorage", 8: "LongStorage"}

Members = dict[str, bytes]


def _run(data: bytes) -> None:
    run(_LAYOUT, len(data).to_bytes(4, "little") + data)


# ---------------------------------------------------------------- the archive


def _put_archive(members: Members, random: Random, is_odd: bool) -> bytes:
    """A zip archive of stored members; an odd one has one number wrong, or is a wide one."""
    is_wide = is_odd and random.random() < 0.4
    wrong = random.randrange(3 * len(members) + 2) if is_odd and random.random() < 0.7 else -1
    out = bytearray()
    entries = []
    for number, (name, data) in enumerate(members.items()):
        raw_name = name.encode("utf-8", "replace")
        checksum = zlib.crc32(data)
        sizes = [len(data), len(data), len(out)]
        if wrong in (3 * number, 3 * number + 1):
            sizes[random.randrange(3)] = random.choice(INTEGERS) % 2**32
        fields = [20, 0, 0, 0, 0, checksum, *sizes[:2], len(raw_name), 0]
        entry = [20, *fields, 0, 0, 0, 0, sizes[2]]
        extra = b""
        if is_wide and random.random() < 0.7:
            wide = [random.choice([size, size, random.choice(INTEGERS) % 2**64]) for size in sizes]
            extra = struct.pack("<2H3Q", 1, 24, *wide)
            entry[7] = entry[8] = entry[15] = _WIDE
            entry[10] = len(extra)
        if wrong == 3 * number + 2:
            at = random.randrange(len(entry))
            entry[at] = random.choice(INTEGERS) % (2**32 if at in (6, 7, 8, 14, 15) else 2**16)
        out += _LOCAL.pack(b"PK\3\4", *fields) + raw_name + data
        entries.append(_ENTRY.pack(b"PK\1\2", *entry) + raw_name + extra)
    if is_odd and random.random() < 0.3:
        entries = _other_entries(entries, members, out, random)
    directory = b"".join(entries)
    start, count, size = len(out), len(entries), len(directory)
    if wrong == 3 * len(members):
        start, count, size = (
            random.choice([n, n + 1, 0, 65535, 2**16]) for n in (start, count, size)
        )
    out += directory
    if is_wide and random.random() < 0.7:
        at = len(out)
        wide_size = size if random.random() < 0.8 else random.choice(INTEGERS) % 2**64
        out += _WIDE_END.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, wide_size, start)
        out += _WIDE_LOCATOR.pack(b"PK\6\7", 0, at if random.random() < 0.9 else at + 1, 1)
    out += _END.pack(b"PK\5\6", 0, 0, count % 2**16, count % 2**16, size % 2**32, start % 2**32, 0)
    return bytes(out)


def _other_entries(
    entries: list[bytes], members: Members, out: bytearray, random: Random
) -> list[bytes]:
    """A directory that has a member twice, or one that lies inside of another."""
    if random.random() < 0.5:
        return [*entries, random.choice(entries)]
    data = random.choice(list(members.values()))
    inner_name = b"archive/inner"
    sizes = (zlib.crc32(data), len(data), len(data), len(inner_name), 0)
    inner = _LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, 0, *sizes) + inner_name + data
    outer_name = b"archive/outer"
    outer_sizes = (zlib.crc32(inner), len(inner), len(inner), len(outer_name), 0)
    start = len(out)
    out += _LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, 0, *outer_sizes) + outer_name + inner
    inner_start = len(out) - len(inner)
    return [
        *entries,
        _ENTRY.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, *outer_sizes, 0, 0, 0, 0, start) + outer_name,
        _ENTRY.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, inner_start) + inner_name,
    ]


def _take_archive(data: bytes) -> Members | None:
    """The members of an archive whose directory is where it should be, leniently."""
    members = {}
    try:
        _, _, _, _, count, _, at, _ = _END.unpack(data[-_END.size :])
        for _ in range(min(count, 64)):
            fields = _ENTRY.unpack_from(data, at)
            size, name_bytes, extra_bytes, start = fields[9], fields[10], fields[11], fields[16]
            name = data[at + _ENTRY.size :][:name_bytes].decode()
            at += _ENTRY.size + name_bytes + extra_bytes + fields[12]
            local = _LOCAL.unpack_from(data, start)
            start += _LOCAL.size + local[9] + local[10]
            members[name] = data[start : start + size]
    except (struct.error, *ODD_VALUES):
        return None
    return members


# ---------------------------------------------------------------- payloads


def _tensor(members: Members, data: bytes, width: int) -> Call:
    """A flat tensor of integers, its bytes put into the members."""
    key = str(sum("/data/" in name for name in members))
    members[f"archive/data/{key}"] = data
    count = len(data) // width
    storage = ("storage", GLOBALS["torch", _STORAGES[width]], key, "cpu", count)
    hooks = Call(Global("collections", "OrderedDict"), ())
    args = (PersistentId(storage), 0, (count,), (1,), False, hooks)
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)


def _fresh(random: Random, is_odd: bool) -> Members:
    """A payload of changes made up here; an odd one has positions or values that do not fit."""
    packed = b""
    groups: dict[int, bytes] = {}
    tables = []
    operation = random.choice(["xor", "overwrite"])
    for name in random.sample("qwfhs", random.randint(1, 4)):
        dtype, shape = SHAPES[name]
        width = _WORD_BYTES[dtype]
        group = groups.setdefault(width, b"")
        element_count = len(BITS[name]) // width
        count = random.randint(1, min(9, element_count))
        start = random.randint(0, element_count - count)
        positions = sorted(random.sample(range(element_count), count))
        table: dict[str, Any] = {
            "name": name,
            "shape": shape,
            "dtype": _TORCH_NAMES[dtype],
            "operation": operation,
            "index_start": len(packed),
            "index_end": len(packed),
            "value_group": list(groups).index(width),
            "value_start": len(group) // width,
            "value_end": len(group) // width + count,
        }
        if random.random() < 0.3:
            table |= {"index_encoding": "range", "range_start": start}
            if is_odd and random.random() < 0.3:
                table["range_start"] = random.choice([-1, element_count, 2**62, 2**63 - 1])
        else:
            before = [-1, *positions]
            gaps = [at - last - 1 for last, at in zip(before, positions, strict=False)]
            gap_width = random.choice([2, 4, 8])
            raw = put_numbers(gaps, gap_width)
            if is_odd and random.random() < 0.5:
                raw = (mutate_numbers(raw, gap_width, random) + bytes(80))[: len(raw)]
            packed += raw
            table |= {"index_end": len(packed), "index_encoding": "deltas"}
        groups[width] = group + random.randbytes(count * width)
        tables.append(table)
    members: Members = {"archive/data.pkl": b"", "archive/byteorder": b"little"}
    index = _tensor(members, packed, 1)
    values = tuple(_tensor(members, data, width) for width, data in groups.items())
    value: Any = (index, values, tables)
    if is_odd and random.random() < 0.3:
        value = mutate_value(value, random)
    members["archive/data.pkl"] = emit_pickle(value)
    return members | {"archive/version": b"3\n"}


def _mutate(data: bytes, random: Random) -> bytes:
    plain = unpack_zstd(data)
    if plain is None or random.random() < 0.05:
        return mutate_bytes(data, random)
    if random.random() < 0.1:
        # Its end, where the directory is.
        cut = random.randrange(len(plain) + 1)
        return pack_zstd(plain[:cut] + mutate_bytes(plain[cut:], random), random)
    members = _take_archive(plain)
    if not members or random.random() < 0.3:
        members = _fresh(random, is_odd=random.random() < 0.6)
    else:
        members = _mutate_members(members, random)
    return pack_zstd(_put_archive(members, random, random.random() < 0.1), random)


def _mutate_members(members: Members, random: Random) -> Members:
    pickled = next((name for name in members if name.endswith("data.pkl")), None)
    choice = random.random()
    if pickled is not None and choice < 0.003:
        # Little when packed, many times as much when read.
        many = random.choice([b"]", b"}", b")", b"N"]) * random.choice([1 << 12, 1 << 20])
        return members | {pickled: b"\x80\x04" + many + b"."}
    if pickled is not None and choice < 0.35:
        return members | {pickled: mutate_pickle(members[pickled], random, GLOBALS)}
    if pickled is not None and choice < 0.7:
        value = take_value(members[pickled], GLOBALS)
        if value is not None:
            return members | {pickled: emit_pickle(_mutate_saved(value, random))}
    name = random.choice(list(members))
    match random.randrange(8):
        case 0:
            del members[name]
        case 1:
            members[random.choice(TEXTS) + random.choice(["", "/data.pkl"])] = members[name]
        case 2:
            members[name] = members[random.choice(list(members))]
        case 3:
            members[name] = mutate_bytes(members[name], random)
        case _:
            members[name] = flip_some(members[name], random)
    return members


def _mutate_saved(value: Any, random: Random) -> Any:
    """Another payload; mostly one field of one table is another."""
    try:
        index, groups, tables = value
        table = random.choice(tables)
        if random.random() < 0.2:
            return mutate_value(value, random)
        key = random.choice(list(table))
        table[key] = mutate_value(table[key], random)
        if random.random() < 0.1:
            table[random.choice(["range_start", "verification_samples", "x"])] = 0
    except ODD_VALUES:
        return mutate_value(value, random)
    return (index, groups, tables)


def _seeds() -> dict[str, bytes]:
    still = Random(1)
    return {
        f"made-{number}": pack_zstd(
            _put_archive(_fresh(Random(number), is_odd=False), still, is_odd=False), still
        )
        for number in range(4)
    }


NEMO = Target("nemo", _run, _mutate, _seeds)
