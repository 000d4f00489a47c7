"""Targets `trl` and `grail`: positions and values."""

from __future__ import annotations

import hashlib
import json
from random import Random
from typing import Any

from fuzz.interop_bundle import BITS, SHAPES, Layout, pack, run, seed_of, stepped, unpack
from fuzz.interop_mutate import (
    ODD_VALUES,
    Weights,
    flip_some,
    mutate_files,
    mutate_header,
    mutate_numbers,
    mutate_table,
    mutate_text,
    mutate_weights,
    pack_zstd,
    put_numbers,
    put_weights,
    take_json,
    take_weights,
    unpack_zstd,
)
from fuzz.mutate import json_bytes, mutate_bytes
from fuzz.target import Target
from thinwire.checkpoint import Checkpoint
from thinwire.interop import grail, trl
from thinwire.interop.grail import GrailDelta

_TRL = Layout(
    "trl",
    trl,
    (
        "deltas/step_000007.safetensors",
        "deltas/step_000008.safetensors",
        "anchors/step_000006.safetensors",
    ),
    "deltas/step_000007.safetensors",
    check=lambda delta, base: delta.check_weights(base),
)
_DELTA = "checkpoint-7/DELTA"


def _check_grail(delta: GrailDelta, base: Checkpoint) -> None:
    delta.check_base(base)
    delta.check_weights(base)
    # What it unpacks is bounded otherwise now.
    delta.close()
    for name in list(delta.tensors)[:1]:
        delta.new_tensor(name, base.tensors[name])


_GRAIL = Layout(
    "grail",
    grail,
    (
        f"{_DELTA}/metadata.json",
        f"{_DELTA}/delta_metadata.json",
        f"{_DELTA}/delta_sparse.bin.zst",
        "checkpoint-6/FULL/metadata.json",
    ),
    _DELTA,
    {"checkpoint-7/READY-7": b"", "checkpoint-6/READY-6": b"", f"{_DELTA}/DELTA": b""},
    _check_grail,
)
_WIDTHS = {"I32": 4, "U16": 2, "U32": 4, "BF16": 2}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint16": 2, "uint8": 1}


# ---------------------------------------------------------------- TRL


def _run_trl(data: bytes) -> None:
    run(_TRL, data)


def _mutate_trl(data: bytes, random: Random) -> bytes:
    if random.random() < 0.03:
        return mutate_bytes(data, random)
    files = unpack(data, len(_TRL.files))
    match random.randrange(20):
        case 0:
            files = mutate_files(files, random)
        case 1:
            at = random.choice([1, 2])
            files[at] = mutate_header(files[at] or files[0] or b"", random)
        case 2 | 3:
            files[0] = mutate_header(files[0] or b"", random)
        case 4 | 5 | 6:
            files[0] = mutate_weights(files[0] or b"", random, mutate_bytes)
        case _:
            files[0] = _mutate_pairs(files[0] or b"", random)
    return pack(files)


def _mutate_pairs(data: bytes, random: Random) -> bytes:
    """Other positions or values of one tensor, mostly as many of the one as of the other."""
    weights = take_weights(data)
    try:
        assert weights is not None
        index_key = random.choice([k for k in weights.tensors if k.endswith((".idx", ".indices"))])
        is_v2 = index_key.endswith(".idx")
        value_key = index_key.removesuffix(".idx" if is_v2 else ".indices")
        value_key += ".val" if is_v2 else ".values"
        dtype, _, index = weights.tensors[index_key]
        width = _WIDTHS[dtype]
        choice = random.random()
        if choice < 0.2:
            dtype = random.choice(["I32", "U16", "U32"])
            index = mutate_numbers(index, width, random, _WIDTHS[dtype])
        elif choice < 0.4:
            # Sound ones: so that what comes of it is taken.
            count, step = random.randint(0, 9), random.choice([0, 1, 2, 30])
            index = put_numbers([number * step for number in range(count)], width)
        else:
            index = mutate_numbers(index, width, random)
        count = len(index) // _WIDTHS[dtype]
        value_dtype, _, values = weights.tensors[value_key]
        values = flip_some((values + random.randbytes(64) * 9)[: 2 * count], random)
        if random.random() < 0.05:
            values = mutate_bytes(values, random, 1)
    except (AssertionError, *ODD_VALUES):
        return mutate_bytes(data, random)
    weights.tensors[index_key] = (dtype, [count], index)
    weights.tensors[value_key] = (value_dtype, [len(values) // 2], values)
    _mend_counts(weights, value_key[len(value_key.rpartition(".")[0]) :])
    return put_weights(weights)


def _mend_counts(weights: Weights, suffix: str) -> None:
    counts = [len(row[2]) // 2 for key, row in weights.tensors.items() if key.endswith(suffix)]
    for key, count in {
        "num_changed_params": len(counts),
        "total_changed_elements": sum(counts),
    }.items():
        if key in weights.metadata:
            weights.metadata[key] = str(count)


def _seeds_trl() -> dict[str, bytes]:
    news = stepped("ws")
    seeds = {
        "v1": seed_of(_TRL, news, layout="v1"),
        "v2-gaps": seed_of(_TRL, news, layout="v2"),
        "v2-raw": seed_of(_TRL, news, layout="v2", encoding="raw"),
        "v1-empty": seed_of(_TRL, BITS, layout="v1"),
    }
    delta = unpack(seeds["v1"], len(_TRL.files))[0]
    weights = take_weights(delta)
    assert weights is not None
    # As the first drafts of v1 do it: a hash of all new weights, where all are BF16.
    weights.metadata.update({"checksum_sha256": "0" * 64, "prev_model_version": "6"})
    later = Weights(weights.metadata | {"model_version": "8", "prev_model_version": "7"}, {})
    anchor = put_weights(Weights({"format": "pt"}, {"s": ("BF16", [], BITS["s"])}))
    return seeds | {"chain": pack([put_weights(weights), put_weights(later), anchor])}


# ---------------------------------------------------------------- grail


def _run_grail(data: bytes) -> None:
    run(_GRAIL, data)


def _mutate_grail(data: bytes, random: Random) -> bytes:
    if random.random() < 0.03:
        return mutate_bytes(data, random)
    files = unpack(data, len(_GRAIL.files))
    match random.randrange(20):
        case 0:
            files = mutate_files(files, random)
        case 1 | 2:
            files[0] = mutate_text(files[0], random)
        case 3:
            files[1] = mutate_text(files[1], random)
        case 4:
            files[3] = mutate_text(files[3] or files[0], random)
        case _:
            files[2] = _mutate_data(files, random)
    if random.random() < 0.9:
        _mend_manifest(files)
    return pack(files)


def _mutate_data(files: list[bytes | None], random: Random) -> bytes:
    """Another binary in its zstd frame; says so in ``delta_metadata.json`` mostly, too."""
    plain = unpack_zstd(files[2] or b"")
    if plain is None or random.random() < 0.05:
        return mutate_bytes(files[2] or b"", random)
    size = int.from_bytes(plain[:4], "little")
    if random.random() < 0.003:
        # Little when packed, many times as much when parsed.
        text = b'{"version":2,"tensors":[' + b"[]," * random.choice([1 << 12, 1 << 20]) + b"0]}"
        return pack_zstd(len(text).to_bytes(4, "little") + text, random)
    header, body = take_json(plain[4 : 4 + size]), plain[4 + size :]
    if not isinstance(header, dict) or random.random() < 0.05:
        return pack_zstd(mutate_bytes(plain, random), random)
    if random.random() < 0.25:
        header = mutate_table(header, random)
    elif random.random() < 0.2:
        body = flip_some(body, random) if random.random() < 0.8 else mutate_bytes(body, random)
    else:
        header, body = _mutate_entry(header, body, random)
    if random.random() < 0.9:
        _mend_said(files, header)
    text = json_bytes(header, random)
    claimed = len(text) + (random.choice([-1, 1, 2**26, 2**31]) if random.random() < 0.05 else 0)
    return pack_zstd((claimed % 2**32).to_bytes(4, "little") + text + body, random)


def _mutate_entry(header: dict[str, Any], body: bytes, random: Random) -> tuple[Any, bytes]:
    """Other arrays of one tensor, laid out anew: sizes and offsets are right."""
    try:
        rows = header["tensors"]
        chosen = random.choice(rows)
        parts = {id(row): _arrays(row, body) for row in rows}
        parts[id(chosen)] = _other_arrays(chosen, parts[id(chosen)], random)
        laid_out = b""
        for row in rows:
            index, columns, values = parts[id(row)]
            row["indices_offset"], row["indices_size"] = len(laid_out), len(index + columns)
            if "rows_size" in row:
                row["rows_size"], row["cols_size"] = len(index), len(columns)
            laid_out += index + columns
            row["values_offset"], row["values_size"] = len(laid_out), len(values)
            laid_out += values
    except ODD_VALUES:
        return mutate_table(header, random), body
    return header, laid_out


def _arrays(row: dict[str, Any], body: bytes) -> tuple[bytes, bytes, bytes]:
    start, stop = row["indices_offset"], row["indices_offset"] + row["indices_size"]
    middle = start + row.get("rows_size", row["indices_size"])
    values = body[row["values_offset"] :][: row["values_size"]]
    return body[start:middle], body[middle:stop], values


def _other_arrays(
    row: dict[str, Any], arrays: tuple[bytes, bytes, bytes], random: Random
) -> tuple[bytes, bytes, bytes]:
    index, columns, values = arrays
    width = _ITEM_BYTES[row.get("row_dtype", "int32")]
    column_width = _ITEM_BYTES[row.get("col_dtype", "int32")] if "rows_size" in row else 0
    if random.random() < 0.2:
        row["name"] = random.choice("whf")
        dtype, row["shape"] = SHAPES[row["name"]]
        names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        row["value_dtype"] = names[dtype]
    value_width = _ITEM_BYTES[row["value_dtype"]]
    if random.random() < 0.3:
        # Rising ones, so that what comes of it is taken.
        count = random.randint(1, 9)
        index = put_numbers([random.choice([0, 1]) for _ in range(count)], width)
        columns = put_numbers([random.choice([1, 2]) for _ in range(count)], column_width or 1)
    else:
        new_width = width
        if column_width and "row_dtype" in row and random.random() < 0.2:
            row["row_dtype"] = random.choice(["int32", "uint16", "uint8"])
            new_width = _ITEM_BYTES[row["row_dtype"]]
        index = mutate_numbers(index, width, random, new_width)
        count = len(index) // new_width
        if column_width and random.random() < 0.5:
            columns = mutate_numbers(columns, column_width, random)
    columns = (columns + bytes(256))[: count * column_width]
    values = flip_some((values + random.randbytes(256))[: count * value_width], random)
    row["num_nonzero"] = len(values) // value_width
    return index, columns, values


def _mend_said(files: list[bytes | None], header: Any) -> None:
    said = take_json(files[1])
    try:
        said["nonzero_params"] = sum(row["num_nonzero"] for row in header["tensors"])
        said["shapes"] = {row["name"]: row["shape"] for row in header["tensors"]}
        formats = {2: "sparse_codec_v2", 3: "sparse_codec_v3", 31: "sparse_codec_v3.1"}
        said["format"] = formats[header["version"]]
        files[1] = json.dumps(said).encode()
    except ODD_VALUES:
        return


def _mend_manifest(files: list[bytes | None]) -> None:
    """Bring the digests of the manifest in line with the files that there are now."""
    metadata = take_json(files[0])
    try:
        for at, name in ((1, "delta_metadata.json"), (2, "delta_sparse.bin.zst")):
            if name in metadata["file_manifest"]:
                digest = hashlib.sha256(files[at] or b"").hexdigest()
                metadata["file_manifest"][name] = digest
    except ODD_VALUES:
        return
    files[0] = json.dumps(metadata).encode()


def _seeds_grail() -> dict[str, bytes]:
    news = stepped("wfh")
    full = {"file_manifest": {"model.safetensors": "0" * 64}, "checkpoint_type": "FULL"}
    more = {"checkpoint-6/FULL/metadata.json": json.dumps(full).encode()}
    seeds = {}
    for layout in ("v2", "v3", "v3.1"):
        seeds[layout] = seed_of(_GRAIL, news, more, layout=layout, anchor_version=6)
    return seeds


TRL = Target("trl", _run_trl, _mutate_trl, _seeds_trl)
GRAIL = Target("grail", _run_grail, _mutate_grail, _seeds_grail)
