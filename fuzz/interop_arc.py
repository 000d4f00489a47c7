"""Targets `arc_v1`, `arc_v2` and `arc_v3`: Fireworks' snapshots, in each of their codings."""

from __future__ import annotations

import json
import pickle
import zlib
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzz.interop_bundle import (
    BITS,
    SHAPES,
    Layout,
    check_delta,
    pack,
    run,
    seed_of,
    stepped,
    unpack,
)
from fuzz.interop_mutate import (
    ODD_VALUES,
    Weights,
    flip_some,
    mutate_files,
    mutate_header,
    mutate_numbers,
    mutate_weights,
    pack_bz2,
    pack_zlib,
    pack_zstd,
    put_numbers,
    put_weights,
    take_weights,
    unpack_bz2,
    unpack_zlib,
    unpack_zstd,
)
from fuzz.interop_opcodes import emit_pickle, mutate_pickle, mutate_value, take_value
from fuzz.mutate import mutate_bytes
from fuzz.target import Target
from thinwire.checkpoint import Checkpoint
from thinwire.interop.fireworks import arc3, arc3_read, folder, open_fireworks
from thinwire.interop.fireworks.layout import (
    BLOB_TENSOR,
    ENVELOPE_MARK,
    checksum_of,
    written_layout,
)

_WIDTHS = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}


def _open_as(name: str, path: Path, base: Checkpoint) -> None:
    """Read the file alone, as what it is meant to be: also where it no longer looks like that."""
    with open_fireworks(path / "model.safetensors", name) as delta:
        check_delta(delta, base)


_LAYOUTS = {
    name: Layout(
        name,
        folder,
        ("step-00000007/model.safetensors", "step-00000007/second.safetensors"),
        "step-00000007",
        {"step-00000006/model.safetensors": b""},
        also=partial(_open_as, name),
    )
    for name in ("arc_v1", "arc_v2", "arc_v3")
}


def _run(name: str, data: bytes) -> None:
    run(_LAYOUTS[name], data)


def _mutate(name: str, data: bytes, random: Random) -> bytes:
    if random.random() < 0.03:
        return mutate_bytes(data, random)
    files = unpack(data, 2)
    match random.randrange(20):
        case 0:
            files = mutate_files(files, random)
        case 1 | 2:
            files[0] = mutate_header(files[0] or b"", random)
        case _:
            change = {"arc_v1": _mutate_arc1, "arc_v2": _mutate_arc2, "arc_v3": _mutate_arc3}[name]
            files[0] = mutate_weights(files[0] or b"", random, change)
    if files[0] is not None and random.random() < 0.85:
        files[0] = _mend(files[0], take_weights(unpack(data, 2)[0]))
    return pack(files)


def _mutate_arc1(payload: bytes, random: Random) -> bytes:
    plain = unpack_zlib(payload)
    if plain is None or random.random() < 0.1:
        return mutate_bytes(payload, random)
    return pack_zlib(_other_bytes(plain, random), random)


def _mutate_arc2(payload: bytes, random: Random) -> bytes:
    plain = unpack_zstd(payload)
    if plain is None or random.random() < 0.1:
        return mutate_bytes(payload, random)
    return pack_zstd(_other_bytes(plain, random), random)


def _other_bytes(plain: bytes, random: Random) -> bytes:
    choice = random.random()
    if choice < 0.75:
        return flip_some(plain, random)
    return mutate_bytes(plain, random) if choice < 0.9 else random.choice(list(BITS.values()))


# ---------------------------------------------------------------- arc_v3


def _mutate_arc3(payload: bytes, random: Random) -> bytes:
    if random.random() < 0.03:
        return mutate_bytes(payload, random)
    if not payload.startswith(ENVELOPE_MARK):
        return mutate_weights(payload, random, _mutate_arc2)
    pickled = payload[len(ENVELOPE_MARK) :]
    opened = _open_envelope(payload)
    if opened is None or random.random() < 0.15:
        return ENVELOPE_MARK + mutate_pickle(pickled, random, None)
    codec, raw = opened
    body = take_value(raw, None) if random.random() < 0.65 else None
    if isinstance(body, dict):
        raw = _put_pickle(_mutate_body(body, random), random)
    else:
        raw = mutate_pickle(raw, random, None)
    if random.random() < 0.1:
        codec = random.choice(["zstd", "bz2", "none", ""])
    data = pack_bz2(raw, random) if codec == "bz2" else pack_zstd(raw, random)
    return ENVELOPE_MARK + _put_pickle({"codec": codec, "data": data}, random)


def _put_pickle(value: Any, random: Random) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, UnicodeError, *ODD_VALUES):
        return emit_pickle(value)


def _open_envelope(payload: bytes) -> tuple[str, bytes] | None:
    """An envelope's codec, and the pickle in it."""
    table = take_value(payload[len(ENVELOPE_MARK) :], None)
    try:
        codec, data = table["codec"], table["data"]
        raw = unpack_bz2(data) if codec == "bz2" else unpack_zstd(data)
    except ODD_VALUES:
        return None
    return None if raw is None else (codec, raw)


def _mutate_body(body: dict[str, Any], random: Random) -> Any:
    choice = random.random()
    if choice < 0.35:
        return mutate_value(body, random)
    try:
        if choice < 0.65:
            # A run of numbers, maybe in other widths.
            table = random.choice([body["indices"], body["mantissa_stream"], _exceptions(body)])
            width = _WIDTHS[table["dtype"]]
            if random.random() < 0.3:
                table["dtype"] = random.choice(list(_WIDTHS))
            new_width = _WIDTHS[table["dtype"]]
            table["data"] = mutate_numbers(table["data"], width, random, new_width)
            if "count" in table and random.random() < 0.9:
                table["count"] = len(table["data"]) // new_width
        elif choice < 0.75:
            _use_codebook(body, random)
        elif choice < 0.85:
            table = body["indices"]
            if table["kind"] == "row":
                table["data"] = flip_some(table["data"], random)
            else:
                _spread(body, random)
        else:
            key = random.choice(["mantissa_stream", "exception_values", "transform"])
            if key == "mantissa_stream":
                stream = body[key]
                part = random.choice([k for k in ("data", "codes", "codebook") if k in stream])
                stream[part] = flip_some(stream[part], random)
            elif key == "transform":
                body[key] = random.choice(["raw", "xor", "zigzag"])
            else:
                body[key] = flip_some(body[key], random)
    except ODD_VALUES:
        return mutate_value(body, random)
    return body


def _exceptions(body: dict[str, Any]) -> dict[str, Any]:
    stream = body["mantissa_stream"]
    tables = [body["exception_positions"], stream.get("exception_positions")]
    found: dict[str, Any] = next(table for table in tables[::-1] if table is not None)
    return found


def _spread(body: dict[str, Any], random: Random) -> None:
    """Sound changes of other number, so that what comes of them is taken."""
    count, step = random.randint(0, 9), random.choice([1, 2, 3])
    width = random.choice([1, 2, 4, 8])
    numbers = [step] * count
    body["indices"] = {
        "kind": "flat",
        "count": count,
        "dtype": f"uint{8 * width}",
        "data": put_numbers(numbers, width),
    }
    body["mantissa_stream"] = {"kind": "raw", "dtype": "uint8", "data": bytes(count)}
    body["exception_positions"] = {"count": 0, "dtype": "uint8", "data": b""}
    body["exception_values"] = b""


def _use_codebook(body: dict[str, Any], random: Random) -> None:
    """The mantissas by a code book, as the package writes them where that is smaller."""
    stream = body["mantissa_stream"]
    width = _WIDTHS[stream["dtype"]]
    symbols = [symbol % 256 for symbol in stream["data"][::width]]
    book = sorted(set(symbols))[: random.randint(1, 7)]
    codes = [book.index(symbol) if symbol in book else 7 for symbol in symbols]
    escapes = [at for at, code in enumerate(codes) if code == 7]
    bits = np.array([code >> bit & 1 for code in codes for bit in range(3)], np.uint8)
    steps = [at - before for before, at in zip([0, *escapes], escapes, strict=False)]
    body["mantissa_stream"] = {
        "kind": "codebook3",
        "count": len(symbols),
        "codes": np.packbits(bits, bitorder="little").tobytes(),
        "codebook": bytes(book),
        "exception_positions": {
            "count": len(steps),
            "dtype": "uint16",
            "data": put_numbers(steps, 2),
        },
        "exception_values": bytes(symbols[at] for at in escapes),
    }


# ---------------------------------------------------------------- checksums


def _mend(data: bytes, before: Weights | None) -> bytes:
    """Bring checksums in line with what the payloads that changed make of the base now."""
    weights = take_weights(data)
    if weights is None:
        return data
    for name, (dtype, shape, payload) in list(weights.tensors.items()):
        if name not in BITS or (before and before.tensors.get(name, ())[2:] == (payload,)):
            continue
        new = _new_bytes(name, payload)
        if new is None:
            continue
        checksum = str(zlib.adler32(new))
        weights.metadata[name] = checksum
        weights.tensors[name] = (dtype, shape, _with_checksum(payload, checksum))
    return put_weights(weights)


def _new_bytes(name: str, payload: bytes) -> bytes | None:
    """What becomes of the base; the reader under test says, where it is an envelope."""
    if not payload.startswith(ENVELOPE_MARK):
        inner = take_weights(payload)
        if inner is not None and BLOB_TENSOR in inner.tensors:
            payload = inner.tensors[BLOB_TENSOR][2]
        plain = unpack_zlib(payload) if payload[:1] == b"\x78" else unpack_zstd(payload)
        if plain is None:
            return None
        return bytes(a ^ b for a, b in zip(BITS[name], plain, strict=False))
    dtype, shape = SHAPES[name]
    base = np.frombuffer(BITS[name], np.uint8)
    envelope = memoryview(payload)[len(ENVELOPE_MARK) :]
    try:
        fields = arc3_read._open_envelope(envelope, dtype, base.size, shape, "")
        return arc3_read._decode_fields(base, dtype, shape, fields).tobytes()
    except Exception:
        # It is a refusal, or will be found when it is read in earnest.
        return None


def _with_checksum(payload: bytes, checksum: str) -> bytes:
    if not payload.startswith(ENVELOPE_MARK):
        inner = take_weights(payload)
        if inner is None or inner.metadata.get(BLOB_TENSOR) == checksum:
            return payload
        inner.metadata[BLOB_TENSOR] = checksum
        return put_weights(inner)
    opened = _open_envelope(payload)
    body = None if opened is None else take_value(opened[1], None)
    if opened is None or not isinstance(body, dict) or body.get("checksum") == checksum:
        return payload
    # Never changed again: the same pickle each time.
    still = Random(0)
    raw = _put_pickle(body | {"checksum": checksum}, still)
    packed = pack_bz2(raw, Random(1)) if opened[0] == "bz2" else pack_zstd(raw, Random(1))
    return ENVELOPE_MARK + _put_pickle({"codec": opened[0], "data": packed}, still)


# ---------------------------------------------------------------- seeds


def _seeds(name: str) -> dict[str, bytes]:
    news = stepped("wfqhs")
    seeds = {"few": seed_of(_LAYOUTS[name], news, compression_format=name)}
    if name != "arc_v3":
        return seeds | {"none": seed_of(_LAYOUTS[name], BITS, compression_format=name)}
    seeds["none"] = _envelopes_seed(BITS, 1)
    many = stepped("wfqh", 0.4)
    for number, kind in enumerate(("flat-zstd", "flat-bz2", "row-zstd", "row-bz2")):
        seeds[kind] = _envelopes_seed(many if number == 0 else news, number)
    seeds["codebook"] = _envelopes_seed(many, 0, use_codebook=True)
    return seeds


def _envelopes_seed(news: dict[str, bytes], number: int, use_codebook: bool = False) -> bytes:
    """A snapshot of one kind of envelope, also where another one is smaller."""
    tensors: dict[str, Any] = {}
    metadata = {}
    for name in "wfqh":
        dtype, shape = SHAPES[name]
        old, new = (np.frombuffer(bits[name], np.uint8) for bits in (BITS, news))
        layout = written_layout(dtype)
        assert layout is not None
        metadata[name] = checksum_of(new)
        payload = list(arc3._envelopes(old, new, layout, shape, metadata[name]))[number]
        opened = _open_envelope(payload)
        assert opened is not None
        body = take_value(opened[1], None)
        if use_codebook and body["mantissa_stream"]["dtype"] == "uint8":
            _use_codebook(body, Random(3))
            packed = pack_zstd(_put_pickle(body, Random(1)), Random(1))
            payload = ENVELOPE_MARK + _put_pickle({"codec": "zstd", "data": packed}, Random(1))
        tensors[name] = payload
    return pack([_file(tensors, metadata), None])


def _file(payloads: dict[str, bytes], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    stop = 0
    for name, payload in payloads.items():
        start, stop = stop, stop + len(payload)
        header[name] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(payloads.values())


ARC_V1, ARC_V2, ARC_V3 = (
    Target(name, partial(_run, name), partial(_mutate, name), partial(_seeds, name))
    for name in _LAYOUTS
)
