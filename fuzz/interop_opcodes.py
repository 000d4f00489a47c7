"""Damage to pickles: as values, written out again by the small writer here, and as opcodes.

Some ask for something to be called: see :mod:`fuzz.interop_watch`.
"""

from __future__ import annotations

import pickletools
import struct
from random import Random
from typing import Any, NamedTuple

from fuzz.interop_mutate import ODD_VALUES, flip_some
from fuzz.mutate import INTEGERS, TEXTS, mutate_bytes, mutate_json
from thinwire.interop.pickles import Call, PersistentId, read_pickle

_MARK = "fuzz.interop_watch\nexecuted\n"
_PROTO, _FRAME, _STOP = 0x80, 0x95, 0x2E


class Global(NamedTuple):
    """A name in a pickle, where a torch file may have it."""

    module: str
    name: str


GLOBALS = {
    place: Global(*place)
    for place in [
        ("torch._utils", "_rebuild_tensor_v2"),
        ("collections", "OrderedDict"),
        *(("torch", f"{kind}Storage") for kind in ("Byte", "Short", "Int", "Long")),
    ]
}


# ---------------------------------------------------------------- values


def thaw(value: Any) -> Any:
    """What a reader gave, with bytes of its own instead of views."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {key: thaw(part) for key, part in value.items()}
    if isinstance(value, list):
        return [thaw(part) for part in value]
    if isinstance(value, Global):
        return value
    if isinstance(value, tuple):
        return tuple(thaw(part) for part in value)
    if isinstance(value, Call):
        return Call(value.target, thaw(value.args), thaw(value.items), thaw(value.state))
    if isinstance(value, PersistentId):
        return PersistentId(thaw(value.identity))
    return value


def mutate_value(value: Any, random: Random) -> Any:
    """A value with one place of it changed; bytes mostly keep their size."""
    if isinstance(value, Global):
        return random.choice(list(GLOBALS.values()))
    if isinstance(value, bytes):
        return flip_some(value, random) if random.random() < 0.6 else mutate_bytes(value, random)
    if isinstance(value, Call):
        if random.random() < 0.1:
            return Call(random.choice(list(GLOBALS.values())), value.args)
        return Call(value.target, mutate_value(value.args, random), value.items, value.state)
    if isinstance(value, PersistentId):
        return PersistentId(mutate_value(value.identity, random))
    if isinstance(value, list | tuple) and value and random.random() < 0.95:
        parts = list(value)
        at = random.randrange(len(parts))
        match random.randrange(16):
            case 0:
                del parts[at]
            case 1:
                parts.insert(at, parts[random.randrange(len(parts))])
            case 2:
                parts[at] = parts[random.randrange(len(parts))]
            case _:
                parts[at] = mutate_value(parts[at], random)
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict) and value and random.random() < 0.95:
        changed = dict(value)
        key = random.choice(list(changed))
        match random.randrange(16):
            case 0:
                del changed[key]
            case 1:
                changed[random.choice([*TEXTS, *changed])] = changed.pop(key)
            case 2:
                changed[key] = changed[random.choice(list(changed))]
            case _:
                changed[key] = mutate_value(changed[key], random)
        return changed
    if random.random() < 0.02:
        return random.choice([value, [value], (value,), {"": value}, b"", 1.5])
    return mutate_json(value, random, 1) if not isinstance(value, tuple) else ()


def emit_pickle(value: Any) -> bytes:
    """A pickle of a value, also of names and calls, in protocol 4."""
    return b"\x80\x04" + _emit(value) + b"."


def _emit(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _emit_int(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + len(data).to_bytes(4, "little") + data
    if isinstance(value, bytes):
        return b"B" + len(value).to_bytes(4, "little") + value
    if isinstance(value, Global):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Call):
        built = b"" if value.state is None else _emit(value.state) + b"b"
        return _emit(value.target) + _emit(value.args) + b"R" + built
    if isinstance(value, PersistentId):
        return _emit(value.identity) + b"Q"
    if isinstance(value, tuple):
        return b"(" + b"".join(_emit(part) for part in value) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(_emit(part) for part in value) + b"e"
    items = b"".join(_emit(key) + _emit(part) for key, part in value.items())
    return b"}(" + items + b"u"


def _emit_int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)[:255]
    return b"\x8a" + bytes((len(data),)) + data


def take_value(data: bytes, globals: dict[tuple[str, str], Global] | None) -> Any:
    """The value of a pickle, so that it can be changed; None: it is not one that is taken.

    The reader under test does this; what goes wrong in it is found when it reads in earnest.
    """
    try:
        return thaw(read_pickle(data, globals=globals))
    except Exception:
        return None


# ---------------------------------------------------------------- opcodes


def mutate_pickle(
    data: bytes, random: Random, globals: dict[tuple[str, str], Global] | None
) -> bytes:
    """Another pickle: of another value, or of other opcodes."""
    choice = random.random()
    if choice < 0.05:
        return mutate_bytes(data, random)
    if choice < 0.45 and (value := take_value(data, globals)) is not None:
        for _ in range(random.randint(1, 2)):
            value = mutate_value(value, random)
        return emit_pickle(value)
    opcodes = _split(data)
    if opcodes is None:
        return mutate_bytes(data, random)
    for _ in range(random.randint(1, 3)):
        opcodes = _mutate_opcodes(opcodes, random)
    return _join(opcodes, random)


def _split(data: bytes) -> list[bytes] | None:
    """The opcodes with their arguments, without frames."""
    try:
        starts = [at for _, _, at in pickletools.genops(data)]
    except (*ODD_VALUES, struct.error):
        return None
    if any(at is None for at in starts):
        return None
    ends = [*starts[1:], len(data)]
    pieces = [data[start:end] for start, end in zip(starts, ends, strict=True) if start is not None]
    return [piece for piece in pieces if piece[0] != _FRAME]


def _join(opcodes: list[bytes], random: Random) -> bytes:
    data = b"".join(opcodes)
    if random.random() < 0.15 and data[:1] == bytes((_PROTO,)):
        size = len(data) - 2 + (random.choice(INTEGERS) if random.random() < 0.3 else 0)
        return data[:2] + bytes((_FRAME,)) + (size % 2**64).to_bytes(8, "little") + data[2:]
    return data


def _mutate_opcodes(opcodes: list[bytes], random: Random) -> list[bytes]:
    changed = list(opcodes) or [b"."]
    at = random.randrange(len(changed))
    # Behind the protocol and before the end, mostly.
    inner = random.randint(min(1, len(changed) - 1), max(1, len(changed) - 1))
    match random.randrange(12):
        case 0:
            del changed[at]
        case 1:
            changed.insert(inner, changed[at])
        case 2:
            other = random.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
        case 3:
            changed[at] = _any_opcode(random)
        case 4:
            changed.insert(inner, _any_opcode(random))
        case 5 | 6:
            changed[inner:inner] = [*_planted(random), random.choice([b"0", b"", b"a", b"s"])]
        case 7:
            start = random.randrange(len(changed))
            changed[inner:inner] = changed[start : start + random.randint(1, 8)]
        case 8:
            # A value that is used again, and may hold itself.
            number = bytes((random.randrange(8),))
            changed.insert(inner, random.choice([b"\x94", b"h" + number, b"q" + number]))
        case 9:
            deep = random.choice([30, 33, 200])
            changed[inner:inner] = [random.choice([b"]", b"}", b"(", b")", b"]("]) * deep]
        case _:
            changed[at] = _other_argument(changed[at], random)
    return changed


def _other_argument(opcode: bytes, random: Random) -> bytes:
    argument = opcode[1:]
    if opcode[:1] in b"XTB" and len(argument) >= 4:
        return opcode[:1] + _sized(argument[4:], 4, random)
    if opcode[:1] in b"\x8cUC" and argument:
        return opcode[:1] + _sized(argument[1:], 1, random)
    if opcode[:1] in b"\x8d\x8e\x96" and len(argument) >= 8:
        return opcode[:1] + _sized(argument[8:], 8, random)
    if argument and len(argument) <= 8:
        value = random.choice(INTEGERS) % (1 << 8 * len(argument))
        return opcode[:1] + value.to_bytes(len(argument), "little")
    return opcode[:1] + mutate_bytes(argument, random, 1)


def _sized(data: bytes, width: int, random: Random) -> bytes:
    if random.random() < 0.7:
        data = flip_some(data, random) if random.random() < 0.5 else mutate_bytes(data, random, 1)
        size = len(data)
    else:
        size = random.choice(INTEGERS)
    return (size % (1 << 8 * width)).to_bytes(width, "little") + data


def _any_opcode(random: Random) -> bytes:
    """One opcode of all that there are, with an argument of its kind."""
    opcode = random.choice(pickletools.opcodes)
    code = opcode.code.encode("latin-1")
    if opcode.arg is None:
        return code
    size = opcode.arg.n
    if size >= 0:
        return code + random.choice([bytes(size), b"\xff" * size, random.randbytes(size)])
    if size == pickletools.UP_TO_NEWLINE:
        lines = 2 if opcode.name in ("GLOBAL", "INST") else 1
        texts = [_MARK, "os\nmkdir\n", "1\nx\n", "torch\nByteStorage\n", "-1\nL\n"]
        return code + b"".join(random.choice(texts).encode().splitlines(True)[:lines])
    width = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    }.get(size, 8)
    return code + _sized(random.choice([b"", b"w", b"data", bytes(40)]), width, random)


def _planted(random: Random) -> list[bytes]:
    """Opcodes that make of nothing something that was called, were this the real machine."""
    place = random.choice([_MARK, "os\nmkdir\n", "posix\nsystem\n", "builtins\nexec\n"])
    module, name = place.split("\n")[:2]
    by_name = [_emit(module), _emit(name), b"\x93"]
    text = _emit("thinwire-fuzz-executed")
    allowed = random.choice([g for g in GLOBALS.values() if g.module != "torch"])
    return random.choice(
        [
            [b"c" + place.encode(), text, b"\x85", b"R"],
            [*by_name, text, b"\x85", b"R"],
            [*by_name, text, b"\x85", b"\x81"],
            [*by_name, text, b"\x85", b"}", b"\x92"],
            [b"(", text, b"i" + place.encode()],
            [b"(", b"c" + place.encode(), text, b"o"],
            [b"(", *by_name, b"t", b"R"],
            [_emit(allowed), text, b"\x85", b"R"],
            [_emit(allowed), b")", b"R", b"c" + place.encode(), b"b"],
            [_emit(allowed), b")", b"\x81", b"}", b"b"],
            [_emit(allowed), b")", b"R", text, b"c" + place.encode(), b"s"],
            [b"P" + name.encode() + b"\n"],
            [text, b"Q"],
            [b"\x82\x01"],
            [b"\x84\xff\xff\xff\x7f"],
            [b"c" + place.encode()],
        ]
    )
