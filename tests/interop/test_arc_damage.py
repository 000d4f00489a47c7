"""Payloads that were cut, flipped, or meant for another tensor: never wrong weights."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from thinwire.errors import ChecksumMismatch, InvalidArgument, TensorMismatch, ThinwireError
from thinwire.interop.fireworks.coding import FORMATS, decode, encode, sniff_format
from thinwire.interop.fireworks.errors import BackendNotFoundError

from .arc_pairs import PAIR, make_pair, read

pytestmark = [
    pytest.mark.claim(name, "refuse", "every prefix, flipped bits, other bases")
    for name in ("arc_v1", "arc_v2", "arc_v3")
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["BF16", "I32"])
def test_every_prefix_is_an_error(name: str, dtype: str) -> None:
    pair = make_pair(dtype, (300,), "few", 2)
    payload = encode(name, pair.base, pair.new, pair.dtype, pair.shape).payload
    for size in range(len(payload)):
        with pytest.raises(ThinwireError):
            read(payload[:size], pair, name)
    with pytest.raises(ThinwireError):
        read(payload + b"\0", pair, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["BF16", "I32"])
def test_a_flipped_bit_never_gives_wrong_weights(name: str, dtype: str) -> None:
    pair = make_pair(dtype, (300,), "few", 2)
    payload = bytearray(encode(name, pair.base, pair.new, pair.dtype, pair.shape).payload)
    for place in range(0, 8 * len(payload), 3):
        payload[place // 8] ^= 1 << place % 8
        with contextlib.suppress(ThinwireError):
            np.testing.assert_array_equal(read(bytes(payload), pair, name), pair.new)
        payload[place // 8] ^= 1 << place % 8


@pytest.mark.parametrize("name", FORMATS)
def test_another_base_is_told(name: str) -> None:
    ours = encode(name, PAIR.base, PAIR.new, PAIR.dtype, PAIR.shape)
    other = make_pair("BF16", (40, 60), "few", 9)
    with pytest.raises(ThinwireError):
        decode(name, other.base, "BF16", (40, 60), *ours)
    with pytest.raises(ThinwireError):
        decode(name, PAIR.base[:-2], "BF16", (2399,), *ours)
    with pytest.raises(ChecksumMismatch):
        decode(name, PAIR.base, "BF16", (40, 60), ours.payload, str(int(ours.checksum) ^ 1))
    with pytest.raises(ChecksumMismatch, match="not 5 "):  # as an int has no beginning to show
        decode(name, PAIR.base, "BF16", (40, 60), ours.payload, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["arc_v1", "arc_v2", "arc_v3"])
def test_a_wrong_base_is_no_damage(name: str) -> None:
    """On the new weights a step can lead out of the mantissa; the payload is sound nonetheless."""
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(200_000, np.float32) * 0.02).view(np.uint32) >> 16
    base = weights.astype(np.uint16)
    is_changed = rng.random(base.size) < 0.01
    new = base + (is_changed * rng.choice([-1, 1], base.size)).astype(np.uint16)
    sides = base.view(np.uint8), new.view(np.uint8)
    ours = encode(name, *sides, "BF16", (400, 500))
    for wrong in (sides[1], np.random.default_rng(1).permutation(base).view(np.uint8)):
        with pytest.raises(ChecksumMismatch, match="Give the checkpoint that it was made from"):
            decode(name, wrong, "BF16", (400, 500), *ours)


def test_a_container_of_another_shape() -> None:
    ours = encode("thinwire", PAIR.base, PAIR.new, PAIR.dtype, PAIR.shape)
    with pytest.raises(TensorMismatch):
        decode("thinwire", PAIR.base, "BF16", (60, 40), *ours)
    with pytest.raises(TensorMismatch):
        decode("thinwire", PAIR.base, "F16", (40, 60), *ours)


def test_wrong_calls() -> None:
    with pytest.raises(BackendNotFoundError, match="arc_v4"):
        encode("arc_v4", PAIR.base, PAIR.new, PAIR.dtype, PAIR.shape)
    for shape, new in (((41, 60), PAIR.new), ((40, 60), PAIR.new[1:])):
        with pytest.raises(InvalidArgument):
            encode("ARC_V3", PAIR.base, new, "BF16", shape)
    twice = np.repeat(PAIR.base, 2)
    for wrong in (twice[::2], PAIR.base.reshape(2, -1), PAIR.base.view(np.int8)):
        for name in FORMATS:
            ours = encode(name, PAIR.base, PAIR.new, PAIR.dtype, PAIR.shape)
            with pytest.raises(InvalidArgument, match="no flat run of bytes"):
                encode(name, wrong, PAIR.new, PAIR.dtype, PAIR.shape)
            with pytest.raises(InvalidArgument, match="no flat run of bytes"):
                decode(name, wrong, PAIR.dtype, PAIR.shape, *ours)


def test_sniffing() -> None:
    for name in FORMATS:
        for dtype in ("BF16", "I64"):
            pair = make_pair(dtype, (40, 60), "few", 6)
            payload = encode(name, pair.base, pair.new, pair.dtype, pair.shape).payload
            assert sniff_format(payload) == name
            assert sniff_format(np.frombuffer(payload, np.uint8)) == name
    for payload in (b"", b"x", b"x\x00", bytes(40), b"ARC3_ENVELOP"):
        assert sniff_format(payload) is None
