"""One small container with every kind of record, and calls that read it in every way."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import xxhash

import thinwire
from thinwire.codec.delta import Delta
from thinwire.codec.write import Attachment, Pair, write_delta

Arrays = dict[str, np.ndarray]


def _bits(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)


def _make() -> tuple[Arrays, Arrays, bytes]:
    rng = np.random.default_rng(21)
    near_one = (0x3F00 + rng.integers(0, 0x200, 900)).astype("<u2")
    moved = near_one + (rng.random(900) < 0.02).astype("<u2")
    large = np.tile(np.arange(256, dtype=np.uint8), 257)
    large_moved = large.copy()
    large_moved[[5, 70, 40_000, 65_791]] ^= 3
    noise = rng.integers(0, 256, 40, dtype=np.uint8)
    pairs = [
        Pair("weights", "BF16", (30, 30), _bits(near_one), _bits(moved)),
        Pair("bias", "BF16", (30,), _bits(near_one[:30]), _bits(near_one[:30] ^ np.uint16(1))),
        Pair("frozen", "BF16", (5,), _bits(near_one[:5]), _bits(near_one[:5])),
        Pair("empty", "F32", (0, 3), noise[:0], noise[:0]),
        Pair("large", "U8", (257, 256), large, large_moved),
        Pair("frozen.large", "U8", (257, 256), large, large),
        Pair("noise", "I64", (5,), noise, noise[::-1].copy()),
        Pair("scalar", "F64", (), noise[:8], noise[8:16]),
        Pair("added", "F16", (7,), None, noise[:14]),
        Pair("removed", "F16", (7,), noise[:14], None),
    ]
    attachments = [
        Attachment(name, kind, data, len(content), xxhash.xxh3_64_intdigest(content))
        for name, kind, data, content in [
            ("model.safetensors", "header", b"head", b"head"),
            ("config.json", "file", b"{}" * 40, b"{}" * 40),
            ("tokenizer.json", "file", None, b"as the base has it"),
        ]
    ]
    out = io.BytesIO()
    write_delta(out, pairs, attachments)
    base = {pair.name: pair.base for pair in pairs if pair.base is not None}
    new = {pair.name: pair.new for pair in pairs if pair.new is not None}
    return base, new, out.getvalue()


BASE, NEW, PAYLOAD = _make()


def decode_all(payload: bytes) -> Arrays:
    """The new bits of every tensor; every attachment is read too."""
    with Delta.open(payload) as delta:
        for attachment in delta.attachments:
            if delta.is_carried(attachment):
                delta.attachment_data(attachment)
    return thinwire.decode_tensors(BASE, payload)


def list_changes(payload: bytes) -> Arrays:
    """The new bits of "delta" and "same" tensors, by their changes."""
    with Delta.open(payload) as delta:
        out = {
            name: BASE[name].copy()
            for name, entry in delta.tensors.items()
            if entry.kind in ("delta", "same") and name in BASE
        }
        for change in delta.changes(BASE):
            word_bytes = change.words.size // change.positions.size
            words = out[change.name].reshape(-1, word_bytes)
            words[change.first_word + change.positions] = change.words.reshape(-1, word_bytes)
    return out


READERS: list[Callable[[bytes], Arrays]] = [decode_all, list_changes]
