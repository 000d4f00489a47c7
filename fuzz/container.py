"""Target `container`: a delta is opened, inspected and decoded against fixed bases."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np

import thinwire
from fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from fuzz.target import Target, require
from thinwire.codec import zstd
from thinwire.codec.delta import Delta
from thinwire.codec.digest import file_digest, tensor_digest, xxh3_64
from thinwire.codec.dtypes import dtype_named
from thinwire.codec.write import Attachment, Pair, write_delta
from thinwire.errors import ThinwireError

HEADER = struct.Struct("<8sHHIIIQQ")
# An attachment is bounded by the checkpoint reader, which knows their sum.
ATTACHMENT_BYTES = 1 << 24

Arrays = dict[str, np.ndarray]
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "": ("BF16", (96,)),
    "w": ("BF16", (40, 11)),
    "f": ("F32", (5, 7)),
    "d": ("F64", (9,)),
    "h": ("F16", (33,)),
    "q": ("F8_E4M3", (70,)),
    "m": ("BOOL", (3,)),
    "e": ("BF16", (0, 3)),
    "i": ("I64", (4,)),
    "z": ("U8", ((1 << 20) + 5,)),  # two chunks
}


def _bases() -> Arrays:
    random = Random(1)
    bases: Arrays = {}
    for name, (dtype, shape) in SHAPES.items():
        row = dtype_named(dtype)
        size = int(np.prod(shape)) * row.word_bytes
        bases[name] = np.frombuffer(random.randbytes(size if name != "z" else 0), np.uint8)
    bases[""] = (0x3A00 + 0x11 * np.arange(96)).astype("<u2").view(np.uint8)
    bases["z"] = (np.arange((1 << 20) + 5) // 999).astype(np.uint8)
    return {name: _placed(name, bits) for name, bits in bases.items()}


def _placed(name: str, bits: np.ndarray) -> np.ndarray:
    """A copy; of some tensors at an odd address, as in a file whose header has an odd length."""
    shift = 1 if name in ("d", "h") else 0
    memory = np.empty(bits.size + shift, np.uint8)
    memory[shift:] = bits
    return memory[shift:]


def _news() -> Arrays:
    random = Random(2)
    news: Arrays = {}
    for name, base in BASES.items():
        new = base.copy()
        words = new.reshape(-1, dtype_named(SHAPES[name][0]).word_bytes)
        for _ in range(min(len(words), 6)):
            words[random.randrange(len(words)), 0] ^= random.choice([1, 1, 1, 3, 0x80])
        news[name] = new
    return news


BASES = _bases()
_NEWS = _news()
# The only bits that may ever come out under the digests that the seeds hold.
_TRUTH = {
    (SHAPES[name][0], tensor_digest(SHAPES[name][0], bits)): bits
    for arrays in (BASES, _NEWS)
    for name, bits in arrays.items()
}


def _run(data: bytes) -> None:
    try:
        delta = Delta.open(data)
    except ThinwireError:
        return
    inspection = thinwire.inspect(data)
    require(len(inspection.tensors) == len(delta.tensors), "inspect and open disagree")
    for attachment in delta.attachments:
        if delta.is_carried(attachment) and attachment.size <= ATTACHMENT_BYTES:
            try:
                content = delta.attachment_data(attachment)
            except ThinwireError:
                continue
            require(xxh3_64(content) == attachment.digest, "an attachment is not its digest's")
    decoded = _decode(delta, data)
    scattered = _scatter(delta)
    if decoded is not None and scattered is not None:
        for name, bits in scattered.items():
            require(np.array_equal(bits, decoded[name]), f"changes and decode differ on {name!r}")
    require(decoded is None or scattered is not None, "decode takes what changes refuses")
    _decode_in_place(delta)
    _decode_array(delta, data)
    require(_untouched(), "a base was touched")


def _untouched() -> bool:
    return all(np.array_equal(BASES[name], bits) for name, bits in _COPIES.items())


def _decode(delta: Delta, data: bytes) -> Arrays | None:
    try:
        decoded = thinwire.decode_tensors(BASES, data)
    except ThinwireError:
        return None
    kept = {entry.name for entry in delta.tensors.values() if entry.kind != "removed"}
    require(decoded.keys() == kept, "decode returns other tensors than the index names")
    for name, bits in decoded.items():
        _check_true(delta, name, bits)
    return decoded


def _scatter(delta: Delta) -> Arrays | None:
    """New bits by way of the lists of changes."""
    both = {e.name: e for e in delta.tensors.values() if e.kind in ("delta", "same")}
    try:
        changes = list(delta.changes(BASES))
    except ThinwireError:
        return None
    news = {name: BASES[name].copy() for name in both}
    for change in changes:
        words = news[change.name].reshape(-1, dtype_named(both[change.name].dtype).word_bytes)
        places = change.positions.astype(np.int64) + change.first_word
        require(bool((np.diff(places) > 0).all()), "positions do not rise")
        words[places] = change.words.reshape(len(places), -1)
    for name, bits in news.items():
        _check_true(delta, name, bits)
    return news


def _decode_in_place(delta: Delta) -> None:
    targets = {n: _placed(n, bits) for n, bits in _COPIES.items() if n in delta.tensors}
    try:
        delta.apply_in_place(targets)
    except ThinwireError:
        for name, bits in targets.items():
            require(np.array_equal(bits, _COPIES[name]), f"{name!r} was not restored")
        return
    for name in delta.tensors:
        _check_true(delta, name, targets[name])


def _decode_array(delta: Delta, data: bytes) -> None:
    base = _COPIES[""].view(np.uint16).copy()
    results = []
    try:
        results.append(thinwire.decode(base, data))
        found = thinwire.changes(base, data)
        listed = base.copy()
        listed[found.indices] = found.values
        results.append(listed)
    except ThinwireError:
        pass
    written = base.copy()
    try:
        thinwire.decode_into(written, data)
        results.append(written)
    except ThinwireError:
        require(np.array_equal(written, base), "decode_into did not restore its base")
    for bits in results:
        _check_true(delta, "", bits.view(np.uint8).reshape(-1))


def _check_true(delta: Delta, name: str, bits: np.ndarray) -> None:
    entry = delta.tensors[name]
    require(entry.new_digest is not None, f"{name!r} was decoded though it was removed")
    require(bits.size == entry.byte_count, f"{name!r} has the wrong size")
    require(tensor_digest(entry.dtype, bits) == entry.new_digest, f"{name!r} holds wrong bits")
    truth = _TRUTH.get((entry.dtype, entry.new_digest or 0))
    require(truth is None or np.array_equal(truth, bits), f"{name!r} holds wrong bits")


_COPIES = {name: bits.copy() for name, bits in BASES.items()}


# ---------------------------------------------------------------- structure

# What comes of reading fields in JSON of any shape.
_ODD_JSON = (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError)


class _Parts(NamedTuple):
    """A container taken apart, leniently."""

    head: dict[str, Any]
    digests: bytes
    sections: list[bytes]


def _take_apart(data: bytes) -> _Parts | None:
    try:
        _, _, _, stored, plain, digest_bytes, _, _ = HEADER.unpack_from(data)
        if plain > 1 << 20:
            return None
        index = json.loads(zstd.decompress(data[HEADER.size : HEADER.size + stored], plain, ""))
        at = HEADER.size + stored
        digests = data[at : at + digest_bytes]
        at += digest_bytes
        sections = []
        for holder, key in _size_places(index):
            size = int(holder[key])
            sections.append(data[at : at + size])
            at += size
    except (ThinwireError, *_ODD_JSON, struct.error):
        return None
    return _Parts(index, digests, sections) if isinstance(index, dict) else None


def _size_places(index: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Where the index names the size of each section, in file order."""
    for tensor in index.get("tensors", []):
        sizes = tensor.get("sizes", [])
        yield from ((sizes, number) for number in range(len(sizes)))
    for group in index.get("groups", []):
        yield group, "size"
    for attachment in index.get("attachments", []):
        if attachment.get("stored") is not None:
            yield attachment, "stored"


def _put_together(text: bytes, digests: bytes, sections: bytes) -> bytes:
    """A container whose lengths and checksums are right, whatever it says."""
    stored = zstd.compress(text, 1)
    file_bytes = HEADER.size + len(stored) + len(digests) + len(sections) + 8
    fields = (b"\x89TWD\r\n\x1a\n", 1, 0, len(stored), len(text), len(digests), file_bytes)
    return seal(HEADER.pack(*fields, 0) + stored + digests + sections + bytes(8))


def seal(data: bytes) -> bytes:
    """``data`` with the digest of its head and its trailer set right."""
    _, _, _, stored, _, digest_bytes, _, _ = HEADER.unpack_from(data)
    head = data[: HEADER.size - 8]
    body = data[HEADER.size : HEADER.size + stored + digest_bytes]
    sealed = head + struct.pack("<Q", xxh3_64(head + body)) + data[HEADER.size : -8]
    return sealed + struct.pack("<Q", file_digest(sealed))


def _mutate(data: bytes, random: Random) -> bytes:
    parts = _take_apart(data)
    if parts is None and random.random() < 0.7:
        return data  # broken by an earlier mutation: more of it shows nothing new
    if parts is None or random.random() < 0.03:
        changed = mutate_bytes(data, random)
        # The whole length is a lie that every accident but a flip tells: mend it too.
        if len(changed) < HEADER.size + 8 or random.random() < 0.3:
            return changed
        return seal(changed[:24] + struct.pack("<Q", len(changed)) + changed[32:])
    index, digests, sections = parts
    plan = random.random()
    if plan < 0.45 and sections:
        at = random.randrange(len(sections))
        sections[at] = _mutate_section(sections[at], sections, random)
    elif plan < 0.6:
        index = _regroup(index, random)
    elif plan < 0.9:
        index = mutate_json(index, random)
    else:
        at = random.randrange(len(digests) + 1)
        byte = random.choice([b"", b"\0", b"\x01", b"\x7f", b"\xff"])
        digests = digests[:at] + byte + digests[at + 1 :]
    if random.random() < 0.8:
        _mend_sizes(index, sections)
    return _put_together(json_bytes(index, random), digests, b"".join(sections))


def _mutate_section(section: bytes, sections: list[bytes], random: Random) -> bytes:
    match random.randrange(6):
        case 0:
            return random.choice(sections)
        case 1:
            method = random.choice([0, 1, 2, 127, 128, 253, 254, 255])
            return bytes([method]) + section[1:]
        case 2:
            plain = bytes(random.choice([96, 192, 193, 880, 1 << 20]))
            return b"\xfe" + zstd.compress(mutate_bytes(plain, random, 1), 1)
        case 3:
            return b"\xff" + random.choice(list(BASES.values()))[:2000].tobytes()
        case _:
            return mutate_bytes(section, random)


def _regroup(index: dict[str, Any], random: Random) -> dict[str, Any]:
    """Moves tensors between kinds and groups, which few blind changes would do consistently."""
    if random.random() < 0.3:
        index = mutate_json(index, random, 1)
    tensors = index.get("tensors") if isinstance(index, dict) else None
    tensor = random.choice(tensors) if tensors and isinstance(tensors, list) else None
    if not isinstance(tensor, dict):
        return index
    match random.randrange(4):
        case 0:
            tensor["kind"] = random.choice(["delta", "same", "full", "removed"])
        case 1:
            tensor.pop("group", None)
            tensor["sizes"] = [1] * random.choice([0, 1, 1, 2])
        case 2:
            tensor.pop("sizes", None)
            tensor["group"] = random.choice([0, 0, 1, 2])
        case _:
            tensor["dtype"], tensor["shape"] = random.choice(list(SHAPES.values()))
    return index


def _mend_sizes(index: dict[str, Any], sections: list[bytes]) -> None:
    try:
        for place, section in zip(_size_places(index), sections, strict=False):
            place[0][place[1]] = len(section)
    except _ODD_JSON:
        return  # the index no longer has the shape that names sizes


# ---------------------------------------------------------------- seeds


def _seeds() -> dict[str, bytes]:
    def pair(name: str, base: bool = True, new: bool = True) -> Pair:
        dtype, shape = SHAPES[name]
        return Pair(name, dtype, shape, BASES[name] if base else None, _NEWS[name] if new else None)

    text = b'{"model_type": "none"}'
    attachments = [
        Attachment("config.json", "file", text, len(text), xxh3_64(text)),
        Attachment("kept.txt", "file", None, 3, xxh3_64(b"abc")),
    ]
    same = Pair("i", "I64", (4,), BASES["i"], BASES["i"])
    mixed = [pair(name) for name in ("w", "f", "d", "h", "q", "m", "e")]
    inputs = {
        "array": [pair("")],
        "large": [pair("z")],
        "mixed": mixed,
        "kinds": [pair("w"), pair("d", base=False), pair("q", new=False), same, pair("m")],
    }
    seeds = {}
    for name, pairs in inputs.items():
        out = io.BytesIO()
        write_delta(out, pairs, attachments if name == "kinds" else ())
        seeds[name] = out.getvalue()
    return seeds


CONTAINER = Target("container", _run, _mutate, _seeds)
