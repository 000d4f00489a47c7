"""The worked example of docs/stream.md: a whole stream of two versions, made with a fixed key.

    python tests/stream_format/example.py

prints the blocks of the document. A shard's bytes depend on the version of zstd, so the tests take
it from the document; all else is the same for every build.
"""

from __future__ import annotations

import io
import json

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from thinwire.codec.container import Attachment
from thinwire.codec.digest import tensor_digest, xxh3_64
from thinwire.codec.plan import Pair
from thinwire.codec.write import write_delta
from thinwire.stream.blocks import record_of
from thinwire.stream.encoding import digest_of_record, encode, link_of, sign
from thinwire.stream.records import FileRecord, Manifest, Policy, StreamRecord
from thinwire.stream.signing import SigningKey
from thinwire.stream.weights import layout_digest, weights_digest

SEED = bytes(range(32))
STREAM = "0123456789abcdef" * 2
LINEAGE = "fedcba9876543210" * 2
SESSION = "00112233445566778899aabbccddeeff"
CREATED_MS = 1_760_000_000_000
SHAPE = (96,)


def key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.from_private_bytes(SEED))


def words(version: int) -> np.ndarray:
    """The words of the only tensor, as little-endian bytes."""
    found = (0x3A00 + 0x11 * np.arange(96)).astype("<u2")
    if version == 2:
        found[[9, 40, 77]] += np.array([1, -1, 5]).astype("<u2")
    return found.view(np.uint8)


def weights_file() -> bytes:
    """model.safetensors of version 1."""
    entry = {"dtype": "BF16", "shape": list(SHAPE), "data_offsets": [0, 192]}
    text = json.dumps({"w": entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + words(1).tobytes()


def make_shard() -> bytes:
    """The delta from version 1 to version 2."""
    header = weights_file()[:-192]
    out = io.BytesIO()
    write_delta(
        out,
        [Pair("w", "BF16", SHAPE, words(1), words(2))],
        [Attachment("model.safetensors", "header", None, len(header), xxh3_64(header))],
    )
    return out.getvalue()


def weights_of(version: int) -> str:
    digest = f"{tensor_digest('BF16', words(version)):016x}"
    return weights_digest([("w", "BF16", list(SHAPE), digest)])


def layout() -> str:
    header = weights_file()[:-192]
    return layout_digest([("model.safetensors", "header", len(header), f"{xxh3_64(header):016x}")])


def stream_record() -> StreamRecord:
    made = StreamRecord(
        format=1,
        type="stream",
        stream=STREAM,
        created_ms=CREATED_MS,
        lineage=LINEAGE,
        model="example",
        policy=Policy(anchor_every=100, merge_levels=[4, 16]),
    )
    return sign(made, key())


def manifests(shard: bytes) -> list[Manifest]:
    """Those of versions 1 and 2."""
    data = weights_file()
    file = record_of(data)
    first = Manifest(
        format=1,
        type="version",
        stream=STREAM,
        created_ms=CREATED_MS + 1000,
        kind="anchor",
        lineage=LINEAGE,
        first=1,
        version=1,
        session=SESSION,
        step=10,
        weights=weights_of(1),
        layout=layout(),
        raw_bytes=192,
        word_count=96,
        files=[
            FileRecord(
                size=file.size, block=file.block, blocks=file.blocks, name="model.safetensors"
            )
        ],
    )
    first = sign(first, key())
    second = Manifest(
        format=1,
        type="version",
        stream=STREAM,
        created_ms=CREATED_MS + 61_000,
        kind="delta",
        lineage=LINEAGE,
        first=1,
        version=2,
        session=SESSION,
        base=link_of(first),
        step=20,
        weights=weights_of(2),
        layout=layout(),
        raw_bytes=192,
        word_count=96,
        changed_count=3,
        shards=[record_of(shard)],
        metadata={"reward": 0.5, "note": "größer"},
    )
    return [first, sign(second, key())]


def hex_lines(data: bytes) -> str:
    rows = [data[at : at + 24] for at in range(0, len(data), 24)]
    return "\n".join(row.hex(" ") for row in rows)


if __name__ == "__main__":
    shard = make_shard()
    print("public key", key().public)
    for record in (stream_record(), *manifests(shard)):
        print(f"\n{len(encode(record))} bytes, digest {digest_of_record(record)}\n")
        print(encode(record).decode())
    print(f"\nshard: {len(shard)} bytes\n")
    print(hex_lines(shard))
