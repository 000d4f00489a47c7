"""Writes arc_v3: every way that the package tries is tried, and the smallest payload is kept.

The package keeps the smallest of those that are done within 1.5 times the time of the first, so
its bytes vary from run to run. Here size alone decides, and of equals the first: the same tensors
give the same bytes.
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from thinwire.checkpoint.disk import ByteArray
from thinwire.checkpoint.safetensors_file import build_header
from thinwire.codec import _native
from thinwire.codec.digest import CHUNK_WORDS
from thinwire.interop.fireworks.arc2 import encode_zstd, encode_zstd_as_package
from thinwire.interop.fireworks.layout import (
    ARC3_VERSION,
    BLOB_FALLBACK,
    BLOB_FORMAT,
    BLOB_TENSOR,
    ENVELOPE_MARK,
    ITEM_BYTES,
    FloatLayout,
    rows_of,
    written_layout,
)
from thinwire.interop.fireworks.pickle_write import OpenTable, Unshared, bytes_head, write_pickle
from thinwire.interop.fireworks.zstd_jobs import compress_as_package

_ZSTD_LEVEL = 1
_SMALL_BYTES = 1 << 16


# So many changes are put into rows at once.
_CHUNK = 1 << 20


class _Changes(NamedTuple):
    """Where words differ (rising), and there the old and the new ones."""

    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray


def encode_arc3(
    base: ByteArray, new: ByteArray, dtype: str, shape: tuple[int, ...], checksum: str
) -> bytes:
    """An arc_v3 payload.

    Args:
        base: The old bits.
        new: The new bits.
        dtype: Of both.
        shape: Of both.
        checksum: Of ``new``.
    """
    layout = written_layout(dtype)
    candidates = _envelopes(base, new, layout, shape, checksum) if layout and new.size else iter(())
    # Only small tensors, or none of a layout, are worth a second level: others win by their list.
    is_small = layout is None or new.size <= _SMALL_BYTES
    packed = (encode_zstd if is_small else encode_zstd_as_package)(base, new)
    return min(chain(candidates, (_blob(packed, checksum),)), key=len)


def _envelopes(
    base: ByteArray, new: ByteArray, layout: FloatLayout, shape: tuple[int, ...], checksum: str
) -> Iterator[bytes]:
    changes = _find_changes(base, new, np.dtype(layout.word))
    fields: dict[str, Any] = {
        "version": ARC3_VERSION,
        "strategy": "mantissa_xor" if changes.positions.size else "none",
        "shape": shape,
        "dtype": Unshared(layout.torch_names[0]),
        "checksum": Unshared(checksum),
    }
    if not changes.positions.size:
        yield from _packed(write_pickle(fields))
        return
    positions = changes.positions
    table = OpenTable(fields | _values(changes, layout))
    # The words are in the table now; several times their bytes follow.
    del changes
    yield from _packed(table.write_with("indices", _flat_indices(positions)))
    yield from _packed(table.write_with("indices", _row_indices(positions, shape)))


def _packed(raw: bytes) -> Iterator[bytes]:
    for codec, data in (
        ("zstd", compress_as_package(raw, _ZSTD_LEVEL)),
        ("bz2", bz2.compress(raw, 9)),
    ):
        yield _envelope(codec.encode(), data)


def _envelope(codec: bytes, data: bytes) -> bytes:
    """The pickle of codec and data around a compressed pickle, without what no reader needs."""
    head = ENVELOPE_MARK + b"\x80\x04}(\x8c\x05codec\x8c" + bytes((len(codec),)) + codec
    return head + b"\x8c\x04data" + bytes_head(len(data)) + data + b"u."


def _blob(payload: bytes, checksum: str) -> bytes:
    """A safetensors file of one tensor, in which an arc_v2 payload travels as arc_v3."""
    metadata = {BLOB_TENSOR: checksum, BLOB_FALLBACK: BLOB_FORMAT}
    return build_header([(BLOB_TENSOR, "U8", (len(payload),))], metadata) + payload


def _find_changes(base: ByteArray, new: ByteArray, word: np.dtype[Any]) -> _Changes:
    old_words, new_words = _as_words(base, word), _as_words(new, word)
    room = min(old_words.size, CHUNK_WORDS)
    places, found = np.empty(room, np.uint32), np.empty(room * word.itemsize, np.uint8)
    positions, values = [], []
    kind = np.dtype(np.int32 if old_words.size < 1 << 31 else np.int64)
    for start in range(0, old_words.size, CHUNK_WORDS):
        old, changed = (
            words[start : start + CHUNK_WORDS].view(np.uint8) for words in (old_words, new_words)
        )
        count = _native.find_changes(old, changed, word.itemsize, places, found)
        positions.append(places[:count].astype(kind) + kind.type(start))
        values.append(found[: count * word.itemsize].view(word).copy())
    all_positions = np.concatenate(positions)
    return _Changes(all_positions, old_words[all_positions], np.concatenate(values))


def _as_words(data: ByteArray, word: np.dtype[Any]) -> np.ndarray:
    words = data.view(word)
    return words if words.flags.aligned else words.copy()


def _values(changes: _Changes, layout: FloatLayout) -> dict[str, Any]:
    """What becomes of the changed elements: their mantissas, and whole words where more changed."""
    mask = (1 << layout.mantissa_bits) - 1
    is_exception = (changes.old ^ changes.new) > mask
    best: tuple[str, dict[str, Any]] | None = None
    best_bytes = 0
    for transform in ("raw", "xor", "zigzag"):
        symbols = _symbols(transform, changes, mask)
        symbols[is_exception] = 0
        numbers = _numbers(symbols)
        # As the package chooses: by what zstd alone would make of them.
        pickled = _stream_table(numbers["dtype"]).write_with("data", numbers["data"])
        packed_bytes = len(compress_as_package(pickled, _ZSTD_LEVEL))
        if best is None or packed_bytes < best_bytes:
            best, best_bytes = (transform, numbers), packed_bytes
    assert best is not None
    transform, mantissas = best
    exceptions = np.flatnonzero(is_exception)
    return {
        "mantissa_bits": layout.mantissa_bits,
        "total_bits": layout.total_bits,
        "transform": transform,
        "mantissa_dtype": mantissas["dtype"],
        "mantissa_stream": _stream_head(mantissas["dtype"]) | {"data": mantissas["data"]},
        "exception_positions": _counted(_differences(exceptions)),
        "exception_dtype": Unshared(layout.word),
        "exception_values": changes.new[exceptions].tobytes(),
        "uint_dtype": Unshared(layout.word),
    }


def _symbols(transform: str, changes: _Changes, mask: int) -> np.ndarray:
    """What is written for each changed mantissa: it fits a word, as a sign takes one bit more."""
    symbols = np.empty_like(changes.new)
    if transform == "raw":
        np.bitwise_and(changes.new, mask, out=symbols)
        return symbols
    if transform == "xor":
        np.bitwise_xor(changes.old, changes.new, out=symbols)
        symbols &= mask
        return symbols
    for start in range(0, symbols.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        old, new = ((words[piece] & mask).astype(np.int32) for words in changes[1:])
        difference = new - old
        symbols[piece] = (difference << 1) ^ (difference >> 31)
    return symbols


def _stream_head(dtype: str) -> dict[str, Any]:
    return {"kind": "raw", "dtype": Unshared(dtype)}


@cache
def _stream_table(dtype: str) -> OpenTable:
    return OpenTable(_stream_head(dtype))


def _flat_indices(positions: np.ndarray) -> dict[str, Any]:
    return _counted(_differences(positions)) | {"kind": "flat"}


def _row_indices(positions: np.ndarray, shape: tuple[int, ...]) -> dict[str, Any]:
    """How many changes each row has; then of each that has some, their width and differences."""
    row_count, row_width = rows_of(shape)
    counts = np.zeros(row_count, positions.dtype)
    rows = b"".join(_write_rows(positions, row_width, counts))
    counted = _numbers(counts)
    return {
        "kind": "row",
        "shape": shape,
        "n_rows": row_count,
        "row_width": row_width,
        "count_dtype": counted["dtype"],
        "data": counted["data"] + rows,
    }


def _write_rows(positions: np.ndarray, row_width: int, counts: np.ndarray) -> Iterator[bytes]:
    """The bytes of some whole rows at a time; notes how many changes each row has."""
    start = 0
    while start < positions.size:
        stop = min(start + _CHUNK, positions.size)
        if stop < positions.size:
            row = int(positions[stop]) // row_width
            stop = int(np.searchsorted(positions, positions.dtype.type(row * row_width)))
            if stop <= start:  # one row is larger
                after = positions[start] // row_width * row_width + (row_width - 1)
                stop = int(np.searchsorted(positions, after, "right"))
        yield _row_group(positions[start:stop], row_width, counts)
        start = stop


def _row_group(positions: np.ndarray, row_width: int, counts: np.ndarray) -> bytes:
    first = int(positions[0]) // row_width
    if int(positions[-1]) // row_width == first:
        counts[first] = positions.size
        differences = _differences(positions)
        differences[0] -= first * row_width
        numbers = _numbers(differences)
        data: bytes = numbers["data"]
        return bytes((ITEM_BYTES[numbers["dtype"]],)) + data
    rows, columns = np.divmod(positions, row_width)
    held = np.bincount(rows - first)
    counts[first : first + held.size] = held
    starts = np.concatenate(([0], np.flatnonzero(rows[1:] != rows[:-1]) + 1))
    lengths = _differences(np.append(starts, positions.size))[1:]
    differences = _differences(columns)
    differences[starts] = columns[starts]
    widths = _widths(np.maximum.reduceat(differences, starts))
    # Each row has one byte for its width before its differences.
    row_bytes = 1 + lengths * widths
    heads = np.cumsum(row_bytes) - row_bytes
    stream = np.empty(int(heads[-1] + row_bytes[-1]), np.uint8)
    stream[heads] = widths
    width_of = np.repeat(widths, lengths)
    places = np.arange(positions.size) * width_of + np.repeat(heads + 1 - starts * widths, lengths)
    stream[places] = differences.astype(np.uint8)
    for number in range(1, int(widths.max())):
        has_byte = np.flatnonzero(width_of > number)
        stream[places[has_byte] + number] = (differences[has_byte] >> (8 * number)).astype(np.uint8)
    return stream.tobytes()


def _differences(rising: np.ndarray) -> np.ndarray:
    """The first number, then from each to the next."""
    steps = rising.copy()
    steps[1:] -= rising[:-1]
    return steps


def _widths(largest: np.ndarray) -> np.ndarray:
    """Bytes that numbers up to these need: 1, 2, 4 or 8."""
    return np.array([1, 2, 4, 8])[np.searchsorted([1 << 8, 1 << 16, 1 << 32], largest, "right")]


def _numbers(values: np.ndarray) -> dict[str, Any]:
    """Numbers in the narrowest integers that hold all of them."""
    width = 1 if values.size == 0 else int(_widths(values.max(keepdims=True))[0])
    return {"dtype": f"uint{8 * width}", "data": values.astype(f"<u{width}").tobytes()}


def _counted(values: np.ndarray) -> dict[str, Any]:
    return {"count": int(values.size)} | _numbers(values)
