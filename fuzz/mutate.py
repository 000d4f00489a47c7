"""Random damage to bytes and to JSON, repeatable from a `random.Random`."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

# Where integers go wrong: signs, widths, limits of the readers.
INTEGERS = [-1, 0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 2**20, 2**20 + 1, 2**31 - 1, 2**31]
INTEGERS += [2**32 - 1, 2**48, 2**48 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)]
TEXTS = ["", ".", "..", "../x", "a/b", "a\\b", "C:x", "\0", "\n", "x" * 1100, "\u00e9", "e\u0301"]
TEXTS += ["\U0001f600", "BF16", "F32", "F64", "U8", "F4", "BOOL", "C64", "F8_E4M3", "delta", "same"]
TEXTS += ["full", "removed", "header", "file", "model.safetensors", "__metadata__", "weight_map"]
# Values that Python's JSON writer would not write.
RAW_TEXTS = [b"NaN", b"1e999", b"-0", b"1.0", b"1" * 5000, b'"\\ud800"', b'"\xff"', b"[" * 3000]


def mutate_bytes(data: bytes, random: Random, times: int = 0) -> bytes:
    """``data`` after one to four small accidents, or ``times`` of them."""
    changed = bytearray(data)
    for _ in range(times or random.randint(1, 4)):
        at = random.randint(0, len(changed))
        run = random.randint(1, 16)
        match random.randrange(8):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 2 if at < len(changed):
                changed[at] = random.choice([0, 1, 127, 128, 254, 255, random.randrange(256)])
            case 3:
                del changed[at : at + run]
            case 4:
                changed[at:at] = random.randbytes(run)
            case 5:
                start = random.randint(0, len(changed))
                changed[at:at] = changed[start : start + 4 * run]
            case 6:
                width = random.choice([1, 2, 4, 8])
                value = random.choice(INTEGERS) % (1 << 8 * width)
                changed[at : at + width] = value.to_bytes(width, "little")
            case 7 if random.random() < 0.2:
                del changed[at:]
            case _:
                changed[at : at + run] = bytes(run)
    return bytes(changed)


def mutate_json(value: Any, random: Random, times: int = 0) -> Any:
    """A copy of a JSON value with one to three places changed, or ``times`` of them."""
    changed = copy.deepcopy(value)
    for _ in range(times or random.randint(1, 3)):
        changed = _mutate_somewhere(changed, random)
    return changed


def json_bytes(value: Any, random: Random) -> bytes:
    """The text of a JSON value, rarely with something in it that is not quite JSON."""
    text = json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if random.random() < 0.04:
        text = mutate_bytes(text, random, 1)
    if random.random() < 0.03 and (starts := [i for i, c in enumerate(text) if c in b":,["]):
        at = random.choice(starts) + 1
        text = text[:at] + random.choice(RAW_TEXTS) + text[at:]
    return text


def _mutate_somewhere(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        match random.randrange(20):
            case 0:
                del value[key]
            case 1:
                value[random.choice(TEXTS)] = copy.deepcopy(value[key])
            case 2:
                value[random.choice(TEXTS)] = value.pop(key)
            case 3:
                value[key] = copy.deepcopy(value[random.choice(list(value))])
            case _:
                value[key] = _mutate_somewhere(value[key], random)
        return value
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        match random.randrange(20):
            case 0:
                del value[at]
            case 1:
                value.insert(random.randint(0, len(value)), copy.deepcopy(value[at]))
            case 2:
                other = random.randrange(len(value))
                value[at], value[other] = value[other], value[at]
            case 3:
                value[at] = copy.deepcopy(random.choice(value))
            case _:
                value[at] = _mutate_somewhere(value[at], random)
        return value
    return _other_scalar(value, random)


def _other_scalar(value: Any, random: Random) -> Any:
    choice = random.randrange(20)
    if choice == 0:
        return random.choice([None, True, 1.5, [], {}, "", 0, [[]], {"": {}}])
    if isinstance(value, int) and choice < 12:
        return value + random.choice([-8, -2, -1, 1, 2, 8, value])
    if isinstance(value, str) and choice < 5:
        at = random.randint(0, len(value))
        return value[:at] + random.choice(TEXTS) + value[at:]
    return random.choice(TEXTS if isinstance(value, str) else INTEGERS)
