"""The document suffices: a decoder written from docs/format.md alone agrees with the library.

The library is a black box here. Where files are made by hand, both have to take or refuse them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("thinwire_independent_decoder", HERE / "decoder.py")
decoder = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = decoder
SPEC.loader.exec_module(decoder)

DOCUMENT = (HERE.parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
REFUSALS = (thinwire.errors.FormatError, thinwire.errors.ApplyError)

KINDS = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "BOOL": np.bool_,
    **{f"{k}{8 * n}": np.dtype(f"{k.lower()}{n}") for k in "IU" for n in (1, 2, 4, 8)},
}


def bits_of(array: np.ndarray) -> np.ndarray:
    width = 4 if array.dtype.kind == "c" else array.dtype.itemsize
    return array.view(f"u{width}")


def make(kind: str, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(KINDS[kind])
    if kind == "BOOL":
        return rng.random(size) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype)
    return (rng.standard_normal(size) * 0.02).astype(dtype)


def change(array: np.ndarray, share: float, seed: int = 1, *, any_bits: bool = False) -> np.ndarray:
    """The array with this share of its words changed: by few steps, or to any bits."""
    rng = np.random.default_rng(seed)
    new = array.copy()
    words = bits_of(new.reshape(-1))
    where = np.flatnonzero(rng.random(words.size) < share)
    if array.dtype.kind == "b":
        words[where] ^= 1
        return new
    high = 8 * words.itemsize - 1 if any_bits else 3
    size = (2.0 ** rng.uniform(0, high, where.size)).astype(np.uint64).astype(words.dtype)
    words[where] += np.where(rng.random(where.size) < 0.5, size, -size)
    return new


def compare(payload: bytes, base: dict[str, Any], new: dict[str, Any]) -> None:
    old = {name: array.tobytes() for name, array in base.items()}
    got = decoder.decode(payload, old)
    want = {name: array.tobytes() for name, array in new.items()}
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] == want[name], name


def round_trip(base: np.ndarray, new: np.ndarray, dtype: str | None = None) -> bytes:
    payload = thinwire.encode(base, new, dtype=dtype)
    compare(payload, {"": base}, {"": new})
    return payload


# The document's own example


@pytest.fixture(scope="module")
def example() -> tuple[bytes, np.ndarray]:
    listing = re.search(r"## 8\..*?```hex\n(.*?)```", DOCUMENT, re.DOTALL)
    return bytes.fromhex(listing[1]), (0x3A00 + 0x11 * np.arange(96)).astype(np.uint16)


def test_worked_example(example):
    payload, base = example
    assert len(payload) == 245
    new = base.copy()
    new[9] += 1
    new[40] -= 1
    new[77] += 5
    assert decoder.decode(payload, {"": base.tobytes()}) == {"": new.tobytes()}
    index = decoder.read(payload)
    written = json.loads(re.search(r"## 8\..*?```json\n(.*?)```", DOCUMENT, re.DOTALL)[1])
    assert [entry.name for entry in index.tensors] == [t["name"] for t in written["tensors"]]
    assert index.tables == [decoder.Table(**table) for table in written["tables"]]
    assert index.steps == written["steps"]
    digests = re.search(r"Its digests are `(\w+)` \(base\) and `(\w+)` \(new\)", DOCUMENT)
    assert [digest[::-1].hex() for digest in index.tensors[0].digests] == [*digests.groups()]


def test_worked_example_is_what_the_library_writes(example):
    payload, base = example
    new = np.frombuffer(decoder.decode(payload, {"": base.tobytes()})[""], np.uint16)
    assert decoder.decode(thinwire.encode(base, new, dtype="BF16"), {"": base.tobytes()}) == {
        "": new.tobytes()
    }


def test_every_truncation_and_flipped_bit_is_an_error(example):
    payload, base = example
    old = {"": base.tobytes()}
    for length in range(len(payload)):
        with pytest.raises(decoder.TruncatedError):
            decoder.read(payload[:length])
    with pytest.raises(decoder.CorruptError):
        decoder.read(payload + b"\0")
    for bit in range(8 * len(payload)):
        broken = bytearray(payload)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(decoder.CorruptError):
            decoder.decode(bytes(broken), old)


def test_another_base_is_an_error(example):
    payload, base = example
    for other in ({}, {"": base[:-1].tobytes()}, {"": (base + 1).tobytes()}):
        with pytest.raises(decoder.BaseError):
            decoder.decode(payload, other)


# What the library writes


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 70_000])
@pytest.mark.parametrize("share", [0, 0.002, 0.1, 1])
def test_sizes_and_shares(size, share):
    base = make("BF16", size)
    round_trip(base, change(base, share))


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind):
    for size, share, any_bits in ((0, 0, False), (1, 1, True), (129, 0, False), (3000, 1, True)):
        base = make(kind, size)
        round_trip(base, change(base, share, any_bits=any_bits))
    base = make(kind, 70_000)
    payload = round_trip(base, change(base, 0.002))
    assert decoder.read(payload).tensors[0].sections[0][0] == 0, "class coding"
    round_trip(base, change(base, 0.002, any_bits=True))


@pytest.mark.parametrize(("kind", "bits"), [("BF16", 16), ("F16", 16), ("F32", 32), ("U64", 64)])
def test_hand_made_words(kind, bits):
    edges = {
        0,
        1,
        2,
        2 ** (bits - 1),
        2 ** (bits - 1) - 1,
        2**bits - 1,
        2**bits - 2,
        0x7F80,
        0xFF80,
    }
    edges |= {1 << i for i in range(bits)} | {(1 << i) - 1 for i in range(bits)}
    base = np.repeat(np.array(sorted(edges), f"u{bits // 8}"), 20)
    new = base.copy()
    for i, word in enumerate(sorted(edges)):  # one change in each 20 equal words
        new[20 * i + i % 20] = sorted(edges)[(7 * i + 3) % len(edges)] if i % 2 else word ^ 1
    round_trip(base, new, kind)


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3"])
def test_two_chunks(kind):
    base = make(kind, (1 << 20) + 77)
    new = change(base, 0.002)
    bits_of(new)[(1 << 20) + 5] ^= 1
    payload = round_trip(base, new)
    assert len(decoder.read(payload).tensors[0].sections) == 2
    assert decoder.read(round_trip(base, base)).tensors[0].kind == "same"


def test_dictionaries():
    base = {
        **{f"small.{i}": make("BF16", 50 * i, i) for i in range(30)},
        **{f"scale.{i}": make("F32", 10, i) for i in range(5)},
        "equal.large": make("F16", 70_000),
        "large": make("F16", 70_000, 7).reshape(700, 100),
        "scalar": make("F64", 1).reshape(()),
        "removed": make("I32", 10),
        "other.shape": make("I32", 12),
        "other.dtype": make("I32", 12),
    }
    new = {name: array if "equal" in name else change(array, 0.01) for name, array in base.items()}
    new |= {f"small.{i}": base[f"small.{i}"] for i in range(0, 30, 3)}
    new |= {"other.shape": base["other.shape"].reshape(3, 4), "other.dtype": make("U32", 12)}
    new |= {"added": make("BF16", 70_000, 9), "added.empty": make("BF16", 0)}
    new |= {"added.zeros": np.zeros((1 << 20) + 5, np.uint8)}
    del new["removed"]
    payload = thinwire.encode_tensors(base, new)
    compare(payload, base, new)
    file = decoder.read(payload)
    assert {tensor.kind for tensor in file.tensors} == {"delta", "same", "full", "removed"}
    assert len(file.groups) > 1
    assert decoder.decode(thinwire.encode_tensors({}, {}), {}) == {}
    compare(thinwire.encode_tensors({}, new), {}, new)
    compare(thinwire.encode_tensors(base, {}), base, {})


@st.composite
def pairs(draw) -> tuple[np.ndarray, np.ndarray]:
    base = make(draw(st.sampled_from(sorted(KINDS))), draw(st.integers(0, 700)), draw(SEEDS))
    share = draw(st.sampled_from([0, 0.002, 0.02, 0.3, 1]))
    return base, change(base, share, draw(SEEDS), any_bits=draw(st.booleans()))


SEEDS = st.integers(0, 2**32 - 1)
SIDES = st.sampled_from(["both", "both", "both", "base", "new"])


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_random_arrays(pair):
    round_trip(*pair)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.tuples(pairs(), SIDES), max_size=6), st.data())
def test_random_dictionaries(tensors, data):
    base = {name: old for name, ((old, _), side) in tensors.items() if side != "new"}
    new = {name: new for name, ((_, new), side) in tensors.items() if side != "base"}
    payload = thinwire.encode_tensors(base, new)
    compare(payload, base, new)
    at = data.draw(st.integers(0, 8 * len(payload) - 1))
    broken = bytearray(payload)
    broken[at // 8] ^= 1 << at % 8
    with pytest.raises(decoder.CorruptError):
        decoder.read(bytes(broken))
    with pytest.raises(decoder.TruncatedError):
        decoder.read(payload[: at // 8])


# Files made by hand


def seal(
    index: Any, digests: tuple[bytes, ...] = (), sections: bytes = b"", flags: int = 0
) -> bytes:
    """A file of these parts, with right sizes and digests of the file."""
    content = index if isinstance(index, bytes) else json.dumps(index).encode()
    stored, digest = decoder.zstd.compress(content), b"".join(digests)
    total = 40 + len(stored) + len(digest) + len(sections) + 8
    sizes = ((1, 2), (flags, 2), (len(stored), 4), (len(content), 4), (len(digest), 4), (total, 8))
    head = decoder.MAGIC + b"".join(number.to_bytes(width, "little") for number, width in sizes)
    body = head + decoder.hash64(head + stored + digest) + stored + digest + sections
    return body + decoder.run_digest(body)


def agree(payload: bytes, base: dict[str, bytes]) -> dict[str, bytes] | None:
    """What both decoders say; None: both refuse."""
    arrays = {name: np.frombuffer(old, np.uint8) for name, old in base.items()}
    try:
        library = thinwire.decode_tensors(arrays, payload)
    except REFUSALS:
        with pytest.raises(ValueError):
            decoder.decode(payload, base)
        return None
    got = decoder.decode(payload, base)
    assert got == {name: array.tobytes() for name, array in library.items()}
    return got


OLD, NEW = bytes(range(10)), bytes([*range(9), 77])
OLD_DIGEST, NEW_DIGEST = decoder.run_digest(OLD), decoder.run_digest(NEW)
NONE = decoder.run_digest(b"")
TENSOR = {"name": "t", "dtype": "U8", "shape": [10], "changed": 1, "sizes": [11]}
TABLE = {"dtype": "U8", "top": 0, "rate": [50] * 32, "one": [100] * 32}
RAW = b"\xff" + NEW
PLANES = b"\xfe" + decoder.zstd.compress(bytes(a ^ b for a, b in zip(OLD, NEW, strict=True)))


def by_hand(
    digests: tuple[bytes, ...] = (OLD_DIGEST, NEW_DIGEST), section: bytes = RAW, **fields: Any
) -> bytes:
    """A file of one tensor; fields of the index begin with a capital letter, None leaves out."""
    tensor = {**TENSOR, **{k: v for k, v in fields.items() if k.islower()}}
    index = {"tensors": [tensor], **{k.lower(): v for k, v in fields.items() if not k.islower()}}
    tensor = {k: v for k, v in tensor.items() if v is not None}
    return seal({**index, "tensors": [tensor]}, digests, section)


GROUP = [{"dtype": "U8", "size": 11}]
GOOD = {
    "plain": by_hand(),
    "planes": by_hand(section=PLANES, sizes=[len(PLANES)]),
    "group": by_hand(sizes=None, group=0, Groups=GROUP),
    "unused group and table": by_hand(Groups=[{"dtype": "F32"}], Tables=[TABLE] * 128),
    "no change": by_hand((OLD_DIGEST,) * 2, b"", changed=0, sizes=[0]),
    "same": by_hand((OLD_DIGEST,), b"", kind="same", changed=0, sizes=None),
    "full": by_hand((NEW_DIGEST,), kind="full"),
    "removed": by_hand((OLD_DIGEST,), b"", kind="removed", changed=0, sizes=None),
    "packed": by_hand((NEW_DIGEST,), kind="full", dtype="F4", shape=[4, 5]),
    "six bits": by_hand(
        (decoder.run_digest(NEW[:9]),),
        RAW[:10],
        kind="full",
        dtype="F6_E2M3",
        shape=[12],
        sizes=[10],
    ),
    "32 dimensions": by_hand(shape=[10] + [1] * 31),
    "shift": by_hand((OLD_DIGEST,) * 2, b"\0\xc0\xff", changed=0, sizes=[3], Tables=[TABLE]),
}
BAD = {
    "raw of another size": by_hand(section=RAW + b"a", sizes=[12]),
    "planes of another size": by_hand(section=PLANES + b"a", sizes=[len(PLANES) + 1]),
    "gap": by_hand(section=RAW + b"a"),
    "missing digest": by_hand((OLD_DIGEST,)),
    "surplus digest": by_hand((OLD_DIGEST, NEW_DIGEST, NEW_DIGEST)),
    "wrong digest": by_hand((OLD_DIGEST, OLD_DIGEST)),
    "no sections": by_hand((OLD_DIGEST,) * 2, b"", changed=0, sizes=None),
    "section of a same tensor": by_hand((OLD_DIGEST,), b"", kind="same", changed=0, sizes=[0]),
    "empty section of a full tensor": by_hand((OLD_DIGEST,), b"", kind="full", sizes=[0]),
    "section of an empty tensor": by_hand((NONE,) * 2, b"", shape=[0], changed=0, sizes=[0]),
    "more changes than words": by_hand(changed=11),
    "unknown group": by_hand(sizes=None, group=1, Groups=GROUP),
    "group of another dtype": by_hand(sizes=None, group=0, Groups=[{"dtype": "I8", "size": 11}]),
    "full tensor in a group": by_hand(
        (NEW_DIGEST,), sizes=None, group=0, kind="full", changed=0, Groups=GROUP
    ),
    "unknown kind": by_hand(kind="other"),
    "unknown dtype": by_hand(dtype="C128"),
    "dtype of another type": by_hand(dtype=["U8"]),
    "unknown field": by_hand(x=1),
    "unknown field of the index": by_hand(X=1),
    "missing field": by_hand(shape=None),
    "float": by_hand(shape=[10.0]),
    "bool": by_hand(shape=[True, 10]),
    "negative": by_hand(group=-1, sizes=None, Groups=GROUP),
    "ends within a byte": by_hand((NEW_DIGEST,), kind="full", dtype="F4", shape=[19]),
    "33 dimensions": by_hand(shape=[10] + [1] * 32),
    "long name": by_hand(name="é" * 513),
    "large tensor": by_hand(shape=[1 << 49]),
    "129 tables": by_hand(Tables=[TABLE] * 129),
    "31 rates": by_hand(Tables=[{**TABLE, "rate": [1] * 31}]),
    "large rate": by_hand(Tables=[{**TABLE, "one": [256] * 32}]),
    "negative top": by_hand(Tables=[{**TABLE, "top": -1}]),
    "large group": by_hand(sizes=None, group=0, shape=[(1 << 20) + 1], Groups=GROUP),
    "unknown method": by_hand(section=b"\x80" + NEW),
    "no such table": by_hand((OLD_DIGEST,) * 2, b"\1\x80\xff", sizes=[3], Tables=[TABLE]),
    "no shift": by_hand((OLD_DIGEST,) * 2, b"\0", sizes=[1], Tables=[TABLE]),
    "large shift": by_hand((OLD_DIGEST,) * 2, b"\0\xc1\xff", sizes=[3], Tables=[TABLE]),
    "class coding of a full tensor": by_hand(
        (OLD_DIGEST,), b"\0\x80\xff", kind="full", sizes=[3], Tables=[TABLE]
    ),
    "name twice": seal({"tensors": [TENSOR] * 2}, (OLD_DIGEST, NEW_DIGEST) * 2, RAW * 2),
    "flag": seal({"tensors": []}, flags=1),
    "one list of steps": seal({"tensors": [], "steps": [[1]]}),
    "no tensors": seal({}),
    "a list": seal([]),
    "no JSON": seal(b"{"),
    "no UTF-8": seal(b'{"tensors": ["\xff"]}'),
    "deep": seal(b"[" * 5000),
    "bomb": seal(b'{"tensors": []}' + b" " * 3_000_000),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_by_hand(name):
    got = agree(GOOD[name], {"t": OLD})
    assert got is not None
    assert all(set(new) <= set(NEW + OLD) for new in got.values())


@pytest.mark.parametrize("name", BAD)
def test_bad_by_hand(name):
    assert agree(BAD[name], {"t": OLD}) is None


RATES = st.lists(st.integers(0, 255), min_size=32, max_size=32)
CODES = st.builds(
    lambda start, rest: start + rest,
    st.sampled_from([b"", b"\0\0\0", b"\xff\xff\xff", b"\xff" * 7, b"\xff" * 8, b"\xff" * 11]),
    st.binary(max_size=400),
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(decoder.DTYPES)),
    st.integers(1, 600),
    SEEDS,
    RATES,
    RATES,
    CODES,
    st.integers(64, 192),
    st.data(),
)
def test_any_range_code(dtype, elements, seed, rate, one, code, shift, data):
    """Any bytes after the shift say the same to both, or are corrupt to both."""
    row = decoder.DTYPES[dtype]
    elements += -elements * row.bits % 8 and 4 - elements % 4
    size = elements * row.bits // 8
    old = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
    top = data.draw(st.integers(0, row.mask))
    table = {"dtype": dtype, "top": top, "rate": rate, "one": one}
    agree_on_section(bytes([0, shift]) + code, table, elements, old)


def agree_on_section(section: bytes, table: dict[str, Any], elements: int, old: bytes) -> bool:
    """Both decoders say the same of a class coded section; whether they take it."""
    dtype = table["dtype"]
    file = decoder.File([], [decoder.Table(**table)])
    try:
        new = decoder.decode_chunk(section, dtype, file, old)
    except decoder.CorruptError:
        new = None
    entry = {"name": "t", "dtype": dtype, "shape": [elements], "sizes": [len(section)]}
    digests = (decoder.run_digest(old), decoder.run_digest(old if new is None else new))
    payload = seal({"tensors": [entry], "tables": [table]}, digests, section)
    assert (new is None) == (agree(payload, {"t": old}) is None)
    return new is not None


def test_every_length_of_a_range_code():
    """A section that is too short by one byte is so for both."""
    code = np.random.default_rng(5).integers(0, 256, 400, dtype=np.uint8).tobytes()
    table = {"dtype": "U8", "top": 0, "rate": [70] * 32, "one": [100] * 32}
    for elements in (1, 5, 40, 128, 200, 300):
        length = taken = 0
        # Up to some more than the first that is enough, and then far more.
        while taken < 5 and length < len(code):
            section = b"\0\x80" + code[:length]
            taken += agree_on_section(section, table, elements, bytes(elements))
            length += 1
        assert taken == 5
        assert agree_on_section(b"\0\x80" + code, table, elements, bytes(elements))


# Attachments


def attach(*entries: dict[str, Any], contents: tuple[bytes, ...]) -> bytes:
    frames = [decoder.zstd.compress(content) for content in contents]
    carried = [entry.pop("carried", True) for entry in entries]
    for entry, frame, content, inside in zip(entries, frames, contents, carried, strict=True):
        entry.setdefault("size", len(content))
        entry["stored"] = len(frame) if inside else None
    digests = tuple(decoder.hash64(content) for content in contents)
    sections = b"".join(f for f, inside in zip(frames, carried, strict=True) if inside)
    return seal({"tensors": [], "attachments": list(entries)}, digests, sections)


def test_attachments():
    payload = attach(
        {"name": "model.safetensors", "kind": "header"},
        {"name": "config.json", "kind": "file", "carried": False},
        {"name": "empty", "kind": "file"},
        {"name": "old", "kind": "removed", "carried": False},
        contents=(b"head", b"{}", b"", b""),
    )
    want = {"model.safetensors": b"head", "config.json": b"{}", "empty": b""}
    assert decoder.attachments(payload, {"config.json": b"{}"}) == want
    assert [entry.name for entry in thinwire.inspect(payload).attachments] == [*want, "old"]
    for base in ({}, {"config.json": b"{ }"}):
        with pytest.raises(decoder.BaseError):
            decoder.attachments(payload, base)
    single = attach({"name": ".", "kind": "header"}, contents=(b"head",))
    assert decoder.attachments(single, {}) == {".": b"head"}


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\\b", "/", "a\n", "a\0", "a\x7f"])
def test_attachment_names(name):
    payload = attach({"name": name, "kind": "file"}, contents=(b"x",))
    with pytest.raises(decoder.CorruptError):
        decoder.read(payload)


def test_bad_attachments():
    for entries in (
        [{"name": "a", "kind": "file"}, {"name": "A", "kind": "file"}],
        [{"name": "a", "kind": "other"}],
        [{"name": "a", "kind": "removed"}],
        [{"name": "a", "kind": "file", "size": (1 << 30) + 1}],
    ):
        with pytest.raises(decoder.CorruptError):
            decoder.read(attach(*entries, contents=(b"x",) * len(entries)))
    payload = attach({"name": "a", "kind": "file", "size": 2}, contents=(b"x",))
    with pytest.raises(decoder.CorruptError):
        decoder.attachments(payload, {})


def test_constants_are_far_from_halves():
    """§ 5.1 says that double precision computes them exactly."""
    numbers = [2**24 * math.log2(1 + 2 ** ((56 - r) / 8)) for r in range(256)]
    numbers += [2**31 * 2 ** (-i / 256) for i in range(256)]
    numbers += [2**31 * 2 ** (-i / 65536) for i in range(256)]
    numbers += [65536 / (n + 1.5) for n in range(159)]
    assert min(abs(number % 1 - 0.5) for number in numbers) > 1e-4
