"""Targets `slime` and `skyrl`: zstd payloads in safetensors files, and an index or a manifest."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import xxhash
from blake3 import blake3

from fuzz.interop_bundle import BITS, Layout, pack, run, seed_of, stepped, unpack
from fuzz.interop_mutate import (
    ODD_VALUES,
    Weights,
    flip_some,
    mutate_files,
    mutate_numbers,
    mutate_text,
    mutate_weights,
    pack_zstd,
    put_numbers,
    put_weights,
    take_json,
    take_weights,
    unpack_zstd,
)
from fuzz.mutate import mutate_bytes
from fuzz.target import Target
from thinwire.interop import skyrl, slime

_INDEX = "weight_v000007/model.safetensors.index.json"
_MANIFEST = "delta-00000007/manifest.json"
_SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in range(2)]
_RANK_FILES = [f"delta-rank00000-file00000{number}.safetensors" for number in range(2)]
# Of both targets: the description, two files of payloads, and the description of the next version.
_SLIME = Layout(
    "slime",
    slime,
    (
        _INDEX,
        *(f"weight_v000007/{name}" for name in _SHARDS),
        "weight_v000008/model.safetensors.index.json",
    ),
    "weight_v000007",
    {"weight_v000006/model.safetensors": b""},
)
_SKYRL = Layout(
    "skyrl",
    skyrl,
    (
        _MANIFEST,
        *(f"delta-00000007/{name}" for name in _RANK_FILES),
        "delta-00000008/manifest.json",
    ),
    "delta-00000007",
)
_HASHES: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "blake3": lambda data: blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}
_WORD_BYTES = 4


# ---------------------------------------------------------------- what both do


def _mutate_payload(payload: bytes, random: Random) -> bytes:
    """Another payload of a tensor's bytes, mostly of as many."""
    plain = unpack_zstd(payload)
    if plain is None or random.random() < 0.1:
        return mutate_bytes(payload, random)
    if random.random() < 0.7:
        return pack_zstd(flip_some(plain, random), random)
    if random.random() < 0.3:
        plain = random.choice(list(BITS.values()))
    return pack_zstd(mutate_bytes(plain, random), random)


def _mutate_changes(payload: bytes, random: Random) -> bytes:
    """Another payload of ``overwrite``: mostly with as many positions as its count says."""
    plain = unpack_zstd(payload)
    if plain is None or random.random() < 0.2:
        return _mutate_payload(payload, random)
    count = max(0, len(plain) - _WORD_BYTES) // (_WORD_BYTES + 1)
    positions, values = (
        plain[_WORD_BYTES : _WORD_BYTES * (1 + count)],
        plain[-count or len(plain) :],
    )
    positions = mutate_numbers(positions, _WORD_BYTES, random)
    if random.random() < 0.3:
        step = random.choice([0, 1, 2, 7])
        positions = put_numbers([number * step for number in range(len(positions) // 4)], 4)
    values = flip_some((values + bytes(64))[: len(positions) // _WORD_BYTES], random)
    said = len(values) + (random.choice([-1, 1, 2**31]) if random.random() < 0.1 else 0)
    return pack_zstd(put_numbers([said], _WORD_BYTES) + positions + values, random)


def _new_bytes(payload: bytes, name: str, is_xor: bool) -> bytes | None:
    """What becomes of the base, so that the checksum can be that of it; None: nothing."""
    plain, old = unpack_zstd(payload), BITS.get(name)
    if plain is None or old is None:
        return None
    if is_xor:
        return bytes(a ^ b for a, b in zip(old, plain, strict=False))
    count = max(0, len(plain) - _WORD_BYTES) // (_WORD_BYTES + 1)
    new = bytearray(old)
    for number in range(count):
        at = int.from_bytes(plain[_WORD_BYTES * (1 + number) :][:_WORD_BYTES], "little")
        if at < len(new):
            new[at] = plain[_WORD_BYTES * (1 + count) + number]
    return bytes(new)


# ---------------------------------------------------------------- slime


def _run_slime(data: bytes) -> None:
    run(_SLIME, data)


def _mutate_slime(data: bytes, random: Random) -> bytes:
    if random.random() < 0.03:
        return mutate_bytes(data, random)
    files = unpack(data, len(_SLIME.files))
    is_xor = b'"xor"' in (files[0] or b"")
    match random.randrange(20):
        case 0:
            files = mutate_files(files, random)
        case 1 | 2 | 3 | 4:
            files[0] = mutate_text(files[0], random)
        case 5:
            files[3] = mutate_text(files[3] or files[0], random)
        case _:
            at = random.choice([1, 2])
            change = _mutate_payload if is_xor else _mutate_changes
            files[at] = mutate_weights(files[at] or b"", random, change)
    if random.random() < 0.85:
        _mend_slime(files)
    return pack(files)


def _mend_slime(files: list[bytes | None]) -> None:
    """Bring checksums, and mostly homes, in line with the payloads that there are now."""
    index = take_json(files[0])
    try:
        metadata = index["metadata"]
        hash_of = _HASHES[metadata["checksum_format"]]
        is_xor = metadata["delta_encoding"] == "xor"
    except ODD_VALUES:
        return
    homes = {}
    for at, home in ((1, _SHARDS[0]), (2, _SHARDS[1])):
        weights = take_weights(files[at])
        if weights is None:
            continue
        for name, (_, _, payload) in weights.tensors.items():
            homes[name] = home
            new = _new_bytes(payload, name, is_xor)
            weights.metadata[name] = "" if new is None else hash_of(new)
        files[at] = put_weights(weights)
    if isinstance(index.get("weight_map"), dict) and index["weight_map"].keys() != homes.keys():
        files[0] = json.dumps(index | {"weight_map": homes}).encode()


def _seeds_slime() -> dict[str, bytes]:
    seeds = {}
    for name, options in {
        "xor": {},
        "xor-blake3": {"checksum": "blake3"},
        "overwrite": {"encoding": "overwrite"},
        "overwrite-adler32": {"encoding": "overwrite", "checksum": "adler32"},
    }.items():
        news = stepped("wfqhs" if name == "xor" else "wfs")
        seeds[name] = _two_files(_SLIME, news, options)
    files = unpack(seeds["xor"], len(_SLIME.files))
    # The next version, as a chain's list needs it: from 7 to 8.
    index = json.loads(files[0] or b"")
    index["metadata"] |= {"version": "000008", "base_version": "000007"}
    files[3] = json.dumps(index).encode()
    return seeds | {"chain": pack(files)}


def _two_files(layout: Layout, news: dict[str, bytes], options: dict[str, Any]) -> bytes:
    """A seed whose payloads are in two files: at which size that happens depends on them."""
    for limit in range(20, 4000, 20):
        try:
            seed = seed_of(layout, news, max_file_bytes=limit, **options)
        except AssertionError:
            continue
        if all(file is not None for file in unpack(seed, 4)[:3]):
            return seed
    raise AssertionError("no size of files gives two of them")


# ---------------------------------------------------------------- SkyRL


def _run_skyrl(data: bytes) -> None:
    run(_SKYRL, data)


def _mutate_skyrl(data: bytes, random: Random) -> bytes:
    if random.random() < 0.03:
        return mutate_bytes(data, random)
    files = unpack(data, len(_SKYRL.files))
    match random.randrange(20):
        case 0:
            files = mutate_files(files, random)
        case 1 | 2 | 3 | 4 | 5:
            files[0] = mutate_text(files[0], random)
        case 6:
            files[3] = mutate_text(files[3] or files[0], random)
        case _:
            at = random.choice([1, 2])
            files[at] = mutate_weights(files[at] or b"", random, _mutate_payload)
    if random.random() < 0.85:
        _mend_skyrl(files)
    return pack(files)


def _mend_skyrl(files: list[bytes | None]) -> None:
    """Bring sizes and checksums in line with the payloads that there are now."""
    manifest = take_json(files[0])
    shards: dict[str, Weights | None] = {
        name: take_weights(files[at]) for at, name in ((1, _RANK_FILES[0]), (2, _RANK_FILES[1]))
    }
    try:
        for record in list(manifest["tensors"]):
            shard = shards[record["payload_file"]]
            payload = None if shard is None else shard.tensors.get(record["payload_key"])
            if payload is None:
                manifest["tensors"].remove(record)
                continue
            record["compressed_num_bytes"] = len(payload[2])
            new = _new_bytes(payload[2], record["name"], True)
            if new is not None:
                record["checksum"] = _HASHES[record["checksum_algorithm"]](new)
        for key in ("uncompressed_num_bytes", "compressed_num_bytes"):
            manifest[f"total_{key}"] = sum(record[key] for record in manifest["tensors"])
    except ODD_VALUES:
        return
    files[0] = json.dumps(manifest).encode()


def _seeds_skyrl() -> dict[str, bytes]:
    seeds: dict[str, bytes] = {}
    for name, options in {"xxh3": {}, "sha256": {"checksum": "sha256"}}.items():
        news = stepped("wfqhs" if name == "xxh3" else "wq")
        seeds[name] = _two_files(_SKYRL, news, options)
    files = unpack(seeds["sha256"], len(_SKYRL.files))
    manifest = json.loads(files[0] or b"")
    files[3] = json.dumps(manifest | {"version": 8, "base_version": 7}).encode()
    return seeds | {"chain": pack(files)}


SLIME = Target("slime", _run_slime, _mutate_slime, _seeds_slime)
SKYRL = Target("skyrl", _run_skyrl, _mutate_skyrl, _seeds_skyrl)
