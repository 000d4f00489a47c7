"""Payloads that lie: an error each, nothing run, no memory taken for what they claim."""

from __future__ import annotations

import bz2
import contextlib
import pickle
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    FormatError,
    LimitExceeded,
    TensorMismatch,
    ThinwireError,
    Truncated,
    Unsupported,
)
from thinwire.interop.fireworks.coding import encode
from thinwire.interop.fireworks.layout import ENVELOPE_MARK, checksum_of

from .arc_pairs import PAIR, Body, Pair, body_of, enveloped, packed, read

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


pytestmark = [
    pytest.mark.claim("arc_v1", "refuse", "bombs"),
    pytest.mark.claim("arc_v2", "refuse", "bombs"),
    pytest.mark.claim(
        "arc_v3", "refuse", "bombs, pickles that would run something, bodies that lie"
    ),
]


def changed(*keys: str, to: Any) -> Callable[[Body], None]:
    """A change of one field, by its path."""

    def change(body: Body) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to(body.get(keys[-1])) if callable(to) else to

    return change


def removed(*keys: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        for key in keys[:-1]:
            body = body[key]
        del body[keys[-1]]

    return change


def test_what_is_changed_below_is_sound_at_first() -> None:
    for codec in ("zstd", "bz2"):
        np.testing.assert_array_equal(read(packed(body_of(), codec)), PAIR.new)
    assert body_of()["indices"]["kind"] == "flat"


FLAT = [
    (removed("shape"), TensorMismatch),
    (removed("strategy"), Corrupt),
    (removed("checksum"), Corrupt),
    (removed("indices"), Corrupt),
    (removed("transform"), Corrupt),
    (removed("mantissa_stream"), Corrupt),
    (removed("exception_values"), Corrupt),
    (changed("version", to=2), Unsupported),
    (changed("shape", to=(60, 40)), TensorMismatch),
    (changed("shape", to=[40, 60]), TensorMismatch),
    (changed("dtype", to="torch.float16"), TensorMismatch),
    (changed("dtype", to=5), Corrupt),
    (changed("strategy", to="lz4"), Unsupported),
    (changed("strategy", to="none"), ChecksumMismatch),
    (changed("checksum", to="1"), ChecksumMismatch),
    (changed("checksum", to=1), Corrupt),
    (changed("mantissa_bits", to=8), Corrupt),
    (changed("mantissa_bits", to=99), LimitExceeded),
    (changed("total_bits", to=True), Corrupt),
    (changed("transform", to="rot13"), Unsupported),
    (changed("indices", to=None), Corrupt),
    (changed("indices", "kind", to="column"), Unsupported),
    (changed("indices", "count", to=-1), Corrupt),
    (changed("indices", "count", to=1 << 60), LimitExceeded),
    (changed("indices", "count", to=lambda n: n - 1), Corrupt),
    (changed("indices", "dtype", to="float64"), Unsupported),
    (changed("indices", "dtype", to="uint32"), Corrupt),
    (changed("indices", "data", to="text"), Corrupt),
    (changed("indices", "data", to=lambda d: bytes(len(d))), Corrupt),
    (changed("indices", "data", to=lambda d: b"\xff" * len(d)), Corrupt),
    (changed("indices", "data", to=lambda d: d[:-1]), Corrupt),
    (changed("mantissa_stream", "kind", to="huffman"), Unsupported),
    (changed("mantissa_stream", "data", to=lambda d: d[:-1]), Corrupt),
    (changed("mantissa_stream", "data", to=lambda d: b"\xff" * len(d)), Corrupt),
    (changed("exception_dtype", to="uint32"), Corrupt),
    (changed("exception_values", to=b"\0"), Corrupt),
    (changed("exception_values", to=b"\0\0"), Corrupt),
    (changed("exception_positions", "count", to=5000), LimitExceeded),
]


@pytest.mark.parametrize("number", range(len(FLAT)))
def test_a_body_that_lies(number: int) -> None:
    change, error = FLAT[number]
    body = body_of()
    change(body)
    before = PAIR.base.copy()
    with pytest.raises(error, match="'w'") as raised:
        read(packed(body))
    assert type(raised.value) is error
    assert "arc_v3" in str(raised.value)
    np.testing.assert_array_equal(PAIR.base, before)


def row_body() -> Body:
    body = body_of()
    positions = np.flatnonzero(PAIR.base.view("<u2") != PAIR.new.view("<u2"))
    rows, columns = np.divmod(positions, 60)
    stream = bytes(np.bincount(rows, minlength=40).astype(np.uint8))
    for row in range(40):
        mine = columns[rows == row]
        if mine.size:
            stream += b"\x01" + bytes(np.diff(mine, prepend=0).astype(np.uint8))
    kind = {"kind": "row", "n_rows": 40, "row_width": 60, "count_dtype": "uint8"}
    return body | {"indices": kind | {"shape": (40, 60), "data": stream}}


ROW = [
    (changed("indices", "n_rows", to=39), Corrupt),
    (changed("indices", "n_rows", to=1 << 50), LimitExceeded),
    (changed("indices", "row_width", to=1), Corrupt),
    (changed("indices", "row_width", to=1 << 50), LimitExceeded),
    (changed("indices", "count_dtype", to="uint64"), Truncated),
    (changed("indices", "count_dtype", to="int8"), Unsupported),
    (changed("indices", "data", to=lambda d: d[:30]), Truncated),
    (changed("indices", "data", to=lambda d: d[:-1]), Corrupt),
    (changed("indices", "data", to=lambda d: d + b"\0"), Corrupt),
    (changed("indices", "data", to=lambda d: b"\xff" + d[1:]), Corrupt),
    (changed("indices", "data", to=lambda d: d[:40] + b"\x03" + d[41:]), Corrupt),
    (changed("indices", "data", to=lambda d: d[:41] + b"\x3c" + d[42:]), Corrupt),
]


@pytest.mark.parametrize("number", range(len(ROW)))
def test_rows_that_lie(number: int) -> None:
    change, error = ROW[number]
    body = row_body()
    np.testing.assert_array_equal(read(packed(body)), PAIR.new)
    change(body)
    with pytest.raises(error):
        read(packed(body))


def test_positions_that_wrap_around() -> None:
    """Differences whose 64-bit sum comes back into the tensor."""
    body = body_of()
    huge = np.array([5, (1 << 64) - 3, 10], np.uint64)
    body["indices"] = {"kind": "flat", "count": 3, "dtype": "uint64", "data": huge.tobytes()}
    body["mantissa_stream"] = {"kind": "raw", "dtype": "uint8", "data": bytes(3)}
    with pytest.raises(Corrupt, match="do not rise"):
        read(packed(body))


def codebook_body() -> tuple[Pair, Body]:
    """Mantissas by a code book, as the package reads them but never writes them."""
    base = np.arange(64, dtype=np.uint16) << 7
    new = base + np.tile(np.array([1, 2, 1, 9], np.uint16), 16)
    pair = Pair("BF16", (64,), base.view(np.uint8), new.view(np.uint8))
    codes = np.tile(np.array([0, 1, 0, 7], np.uint8), 16)
    bits = (codes[:, None] >> np.arange(3) & 1).astype(np.uint8)
    stream = {
        "kind": "codebook3",
        "count": 64,
        "codebook": bytes([1, 2, 3, 4, 5, 6, 7]),
        "codes": np.packbits(bits.reshape(-1), bitorder="little").tobytes(),
        "exception_positions": {"count": 16, "dtype": "uint8", "data": b"\x03" + b"\x04" * 15},
        "exception_values": b"\x09" * 16,
    }
    return pair, body_of(pair) | {"transform": "raw", "mantissa_stream": stream}


def test_a_code_book_is_read() -> None:
    pair, body = codebook_body()
    np.testing.assert_array_equal(read(packed(body), pair), pair.new)


@pytest.mark.parametrize(
    "change",
    [
        changed("mantissa_stream", "count", to=63),
        changed("mantissa_stream", "codes", to=lambda d: d[:-1]),
        changed("mantissa_stream", "codes", to=lambda d: b"\xff" * len(d)),
        changed("mantissa_stream", "codebook", to=bytes(300)),
        changed("mantissa_stream", "codebook", to=b"\x01"),
        changed("mantissa_stream", "codebook", to=b""),
        changed("mantissa_stream", "exception_values", to=b""),
        changed("mantissa_stream", "exception_positions", "data", to=b"\x02" + b"\x04" * 15),
    ],
)
def test_a_code_book_that_lies(change: Callable[[Body], None]) -> None:
    pair, body = codebook_body()
    change(body)
    with pytest.raises(Corrupt):
        read(packed(body), pair)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


NO_SHAPES = [
    ((1,), (2,)),
    ("x" * 1000,) * 10,
    (True, 60),
    tuple(range(300)),
    {"a": 1},
    b"xy",
    None,
]


@pytest.mark.parametrize("number", range(len(NO_SHAPES)))
def test_what_is_no_shape_is_not_shown(number: int) -> None:
    with pytest.raises(TensorMismatch, match=r"made for torch\.bfloat16 of no shape;") as raised:
        read(packed(body_of() | {"shape": NO_SHAPES[number]}))
    assert len(str(raised.value)) < 300


def test_shared_parts_of_a_shape() -> None:
    """208 bytes that were 2**29 values to whoever shows them."""
    shape: tuple[Any, ...] = ()
    for _ in range(29):
        shape = (shape, shape)
    with pytest.raises(LimitExceeded, match="more than 1024 values"):
        read(packed(body_of() | {"shape": shape}))


def test_nothing_in_a_payload_is_run(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    for payload in (
        packed(body_of() | {"shape": evil}),
        packed(evil),
        ENVELOPE_MARK + pickle.dumps(evil),
        ENVELOPE_MARK + pickle.dumps({"codec": evil, "data": b""}, protocol=5),
    ):
        with pytest.raises(FormatError):
            read(payload)
    assert not (tmp_path / "ran").exists()


def peak_bytes(payload: bytes, name: str) -> int:
    """Refuses the payload; returns how much memory that took at most."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read(payload, name=name)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        ("arc_v1", zlib.compress(bytes(1 << 28))),
        ("arc_v2", zstd.compress(bytes(1 << 28))),
        ("arc_v3", enveloped(zstd.compress(bytes(1 << 28)), "zstd")),
        ("arc_v3", enveloped(bz2.compress(bytes(1 << 26)), "bz2")),
        ("arc_v3", packed(body_of() | {"more": bytes(1 << 26)})),
        ("arc_v3", packed(body_of() | {"more": list(range(100_000))}, "bz2")),
    ],
)
def test_bombs_take_no_memory(name: str, bomb: bytes) -> None:
    read(encode(name, *PAIR[2:], *PAIR[:2]).payload, name=name)
    assert peak_bytes(bomb, name) < 2_000_000 + 4 * len(bomb)


def test_a_frame_that_does_not_say_its_size() -> None:
    packer = zstd.ZstdCompressor()
    raw = pickle.dumps(body_of(), protocol=5)
    frame = packer.compress(raw) + packer.flush()
    with pytest.raises(Corrupt, match="says its size"):
        read(enveloped(frame, "zstd"))


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"", Truncated),
        (b"ARC3", Truncated),
        (ENVELOPE_MARK, Truncated),
        (ENVELOPE_MARK + pickle.dumps([1], protocol=5), Corrupt),
        (packed([1]), Corrupt),
        (enveloped(b"", "zstd"), Corrupt),
        (enveloped(b"", "lz4"), Unsupported),
        (enveloped(b"", "bz2"), Truncated),
        (enveloped(bz2.compress(b"")[:-1], "bz2"), Truncated),
        (enveloped(bz2.compress(b"x") * 2, "bz2"), Corrupt),
        (enveloped(b"x" * 40, "bz2"), Corrupt),
        (enveloped(zstd.compress(b"x") * 2, "zstd"), Corrupt),
        (packed(body_of()) + b"x", Corrupt),
    ],
)
def test_envelopes(payload: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error):
        read(payload)


def blob(header: str, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


ONE = '"tensor":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}'


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (blob("{" + ONE + "}", b"x" * 9), Corrupt),
        (blob('{"__metadata__":{"tensor":"1"},' + ONE + "}", b"x" * 8), Truncated),
        (blob('{"__metadata__":{"tensor":"1"},' + ONE + "}", b"x" * 9), Corrupt),
        (blob('{"__metadata__":{"tensor":"1"}}', b""), Corrupt),
        (blob('{"__metadata__":{"fallback_name":"x"},' + ONE + "}", b"x" * 9), Unsupported),
        (blob("{" + ONE.replace("U8", "I8") + "}", b"x" * 9), Corrupt),
        (blob("{" + ONE.replace("tensor", "other") + "}", b"x" * 9), Corrupt),
        (blob("{", b""), Corrupt),
        (b"\xff" * 8 + b"{", Truncated),
        ((1 << 20).to_bytes(8, "little") + b"{" * (1 << 20), LimitExceeded),
    ],
)  # fmt: skip
def test_blobs(payload: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error):
        read(payload)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_mutated_bodies(data: st.DataObject) -> None:
    """Changed behind the compression: an error, or what has the Adler-32, which is all there is.

    Four bytes far apart, one up, two down, one up, can keep it: so it is no proof of the bits.
    """
    body = data.draw(st.sampled_from([body_of(), row_body()]))
    raw = bytearray(pickle.dumps(body, protocol=5))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ThinwireError):
        new = read(enveloped(zstd.compress(bytes(raw)), "zstd"))
        assert checksum_of(new) == checksum_of(PAIR.new)
        assert new.size == PAIR.new.size
