"""Reads arc_v3 without running anything that the payload holds.

All numbers are compared with the base's size before memory is taken for them: a payload can never
unpack to more than ``_unpacked_limit``, a few times the tensor's own bytes.
"""

from __future__ import annotations

import bz2
from typing import Any, NamedTuple

import numpy as np

from thinwire.checkpoint.disk import ByteArray
from thinwire.checkpoint.safetensors_file import LENGTH_BYTES, parse_header
from thinwire.codec import zstd
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    FormatError,
    LimitExceeded,
    TensorMismatch,
    Truncated,
    Unsupported,
)
from thinwire.interop.fireworks.arc2 import decode_zstd
from thinwire.interop.fireworks.layout import (
    ARC3_VERSION,
    BLOB_FALLBACK,
    BLOB_FORMAT,
    BLOB_TENSOR,
    CODEBOOK_SIZE,
    ENVELOPE_MARK,
    ESCAPE_CODE,
    ITEM_BYTES,
    FloatLayout,
    checksum_of,
    read_layout,
    rows_of,
)
from thinwire.interop.foreign import rule_broken
from thinwire.interop.payloads import declared_bytes
from thinwire.interop.pickles import read_pickle

SYSTEM = "Fireworks arc_v3"
_MAX_OPCODES = 1 << 10
_FRAME_BYTES = 1 << 16
_MAX_BLOB_HEADER_BYTES = 1 << 16
_WIDTHS = (1, 2, 4, 8)
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def decode_arc3(
    base: ByteArray, dtype: str, shape: tuple[int, ...], payload: memoryview, where: str
) -> ByteArray:
    """The new bytes of an arc_v3 payload, verified by the checksum in it.

    Raises:
        FormatError: The payload breaks a rule of the format.
        TensorMismatch: It was made for another dtype or shape.
    """
    if bytes(payload[: len(ENVELOPE_MARK)]) != ENVELOPE_MARK:
        new, checksum = _decode_blob(base, payload, where)
    else:
        fields = _open_envelope(payload[len(ENVELOPE_MARK) :], dtype, base.size, shape, where)
        new = _decode_fields(base, dtype, shape, fields)
        checksum = fields.text("checksum")
    if (actual := checksum_of(new)) != checksum:
        rule = f"the new bytes have the Adler-32 {actual}, the payload says {checksum[:20]}"
        hint = "Give the checkpoint that it was made from, or fetch it again"
        raise rule_broken(SYSTEM, rule, file=where, error=ChecksumMismatch, hint=hint)
    return new


class _Fields(NamedTuple):
    """A table of the payload; what is asked of it must be there, and of that type."""

    table: dict[str | int, Any]
    where: str

    def number(self, key: str, limit: int) -> int:
        value = self._get(key)
        if type(value) is not int or value < 0:
            raise self.fault(f"its {key} is no count")
        if value > limit:
            raise self.fault(f"its {key} is {value}, beyond {limit}", LimitExceeded)
        return value

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self.fault(f"its {key} is no text")
        return value

    def data(self, key: str) -> ByteArray:
        value = self._get(key)
        if not isinstance(value, memoryview):
            raise self.fault(f"its {key} is no run of bytes")
        return np.frombuffer(value, np.uint8)

    def fields(self, key: str) -> _Fields:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.fault(f"its {key} is no table")
        return _Fields(value, self.where)

    def item_bytes(self, key: str) -> int:
        name = self.text(key)
        if name not in ITEM_BYTES:
            raise self.fault(f"its {key} is {name[:40]!r}, no unsigned integer", Unsupported)
        return ITEM_BYTES[name]

    def numbers(self, count: int) -> Numbers:
        """The ``count`` numbers in ``data``, of the type in ``dtype``."""
        width, data = self.item_bytes("dtype"), self.data("data")
        if data.size != count * width:
            raise self.fault(f"{data.size} bytes of numbers are not {count} of {width} bytes")
        return data.view(f"<u{width}").astype(np.int64)

    def fault(self, rule: str, error: type[FormatError] = Corrupt) -> FormatError:
        return rule_broken(SYSTEM, rule, file=self.where, error=error)

    def _get(self, key: str) -> Any:
        if key not in self.table:
            raise self.fault(f"it has no {key}")
        return self.table[key]


def _decode_blob(base: ByteArray, payload: memoryview, where: str) -> tuple[ByteArray, str]:
    """The new bytes where an arc_v2 payload travels as arc_v3, and their checksum."""
    head = int.from_bytes(payload[:LENGTH_BYTES], "little")
    if len(payload) < LENGTH_BYTES or head > len(payload) - LENGTH_BYTES:
        rule = "it is neither an ARC3 envelope nor a safetensors blob, or ends too early"
        raise rule_broken(SYSTEM, rule, file=where, error=Truncated)
    if head > _MAX_BLOB_HEADER_BYTES:
        rule = f"the blob's header has {head} bytes; the limit is {_MAX_BLOB_HEADER_BYTES}"
        raise rule_broken(SYSTEM, rule, file=where, error=LimitExceeded)
    header = parse_header(bytes(payload[: LENGTH_BYTES + head]), where)
    if header.file_bytes != len(payload):
        rule = f"the blob has {len(payload)} bytes where its header says {header.file_bytes}"
        raise rule_broken(SYSTEM, rule, file=where, error=Truncated)
    if list(header.spans) != [BLOB_TENSOR] or header.spans[BLOB_TENSOR].dtype != "U8":
        raise rule_broken(SYSTEM, "the blob does not hold one tensor of bytes", file=where)
    coded_as = header.metadata.get(BLOB_FALLBACK, BLOB_FORMAT)
    if coded_as != BLOB_FORMAT:
        rule = f"the blob is coded as {coded_as[:40]!r}, not as {BLOB_FORMAT}"
        raise rule_broken(SYSTEM, rule, file=where, error=Unsupported)
    if BLOB_TENSOR not in header.metadata:
        raise rule_broken(SYSTEM, "the blob has no checksum", file=where)
    span = header.spans[BLOB_TENSOR]
    new = decode_zstd(base, payload[span.start : span.stop], where)
    return new, header.metadata[BLOB_TENSOR]


def _open_envelope(
    envelope: memoryview, dtype: str, size_bytes: int, shape: tuple[int, ...], where: str
) -> _Fields:
    table = read_pickle(envelope, what=f"{where}: the envelope", max_opcodes=_MAX_OPCODES)
    if not isinstance(table, dict):
        raise rule_broken(SYSTEM, "the envelope is no table", file=where)
    outer = _Fields(table, where)
    codec, packed = outer.text("codec"), outer.data("data")
    limit = _unpacked_limit(dtype, size_bytes, shape)
    if codec == "zstd":
        raw = _unpack_zstd(packed, limit, outer)
    elif codec == "bz2":
        raw = _unpack_bz2(packed.data, limit, outer)
    else:
        raise outer.fault(f"the envelope's codec is {codec[:40]!r}", Unsupported)
    inner = read_pickle(raw, what=f"{where}: the body", max_opcodes=_MAX_OPCODES)
    if not isinstance(inner, dict):
        raise rule_broken(SYSTEM, "the body is no table", file=where)
    return _Fields(inner, where)


def _unpacked_limit(dtype: str, size_bytes: int, shape: tuple[int, ...]) -> int:
    """The most bytes that any writer would make of a tensor in which everything changed.

    Per element one index, one position and one value of an exception, one mantissa, and as much
    again for mantissas coded by a code book.
    """
    layout = read_layout(dtype)
    if layout is None:
        return _FRAME_BYTES
    count = size_bytes * 8 // layout.total_bits
    index_bytes = 4 if count <= 1 << 32 else 8
    # A tensor without elements may have any number of rows.
    row_bytes = min(rows_of(shape)[0], count) * (1 + index_bytes)
    return count * (3 * index_bytes + 2 * layout.total_bits // 8 + 2) + row_bytes + _FRAME_BYTES


def _unpack_zstd(packed: ByteArray, limit: int, fields: _Fields) -> bytes:
    size_bytes = declared_bytes(packed)
    if size_bytes is None:
        raise fields.fault("the body is no zstd frame that says its size")
    if size_bytes > limit:
        rule = f"the body unpacks to {size_bytes} bytes; {limit} are the most for this tensor"
        raise fields.fault(rule, LimitExceeded)
    try:
        return zstd.decompress(packed.data, size_bytes, "the body")
    except Corrupt as error:
        raise fields.fault(error.message) from None


def _unpack_bz2(packed: memoryview, limit: int, fields: _Fields) -> bytes:
    unpacker = bz2.BZ2Decompressor()
    try:
        raw = unpacker.decompress(packed, limit + 1)
    except (OSError, ValueError) as error:
        raise fields.fault(f"the body is no bz2 stream: {error}") from None
    if len(raw) > limit:
        rule = f"the body unpacks to more than the {limit} bytes that this tensor can take"
        raise fields.fault(rule, LimitExceeded)
    if not unpacker.eof:
        raise fields.fault("the body's bz2 stream ends too early", Truncated)
    if unpacker.unused_data:
        raise fields.fault("other bytes follow the body's bz2 stream")
    return raw


def _decode_fields(
    base: ByteArray, dtype: str, shape: tuple[int, ...], fields: _Fields
) -> ByteArray:
    if fields.table.get("version", ARC3_VERSION) != ARC3_VERSION:
        raise fields.fault("its version is not 1", Unsupported)
    made_for, made_shape = fields.text("dtype"), fields.table.get("shape")
    layout = read_layout(dtype)
    if layout is None or made_for not in layout.torch_names or made_shape != shape:
        raise TensorMismatch(
            f"{fields.where}: made for {made_for[:40]} {str(made_shape)[:80]}; the base is {dtype}"
            f" {shape} ({SYSTEM} format)",
            hint="Give the checkpoint that it was made from",
        )
    strategy = fields.text("strategy")
    if strategy == "none":
        return base.copy()
    if strategy != "mantissa_xor":
        raise fields.fault(f"its strategy is {strategy[:40]!r}", Unsupported)
    return _decode_changes(base, layout, shape, fields)


def _decode_changes(
    base: ByteArray, layout: FloatLayout, shape: tuple[int, ...], fields: _Fields
) -> ByteArray:
    for key, bits in (("mantissa_bits", layout.mantissa_bits), ("total_bits", layout.total_bits)):
        if fields.number(key, layout.total_bits) != bits:
            raise fields.fault(f"its {key} are not the {bits} of its dtype")
    new = base.copy()
    words = new.view(layout.word)
    positions = _read_indices(fields.fields("indices"), words.size, shape)
    stream = fields.fields("mantissa_stream")
    symbols = _read_symbols(stream, positions.size)
    exceptions = _read_rising(fields.fields("exception_positions"), positions.size)
    values = fields.data("exception_values")
    if fields.text("exception_dtype") != layout.word:
        raise fields.fault("its exceptions are not of its dtype's width")
    if values.size * 8 != exceptions.size * layout.total_bits:
        raise fields.fault(f"{values.size} bytes of exceptions are not {exceptions.size} of them")
    mask = (1 << layout.mantissa_bits) - 1
    old = words[positions].astype(np.int64)
    mantissas = _mantissas(old & mask, symbols, fields)
    if mantissas.size and not 0 <= int(mantissas.min()) <= int(mantissas.max()) <= mask:
        raise fields.fault("a mantissa leaves its bits")
    words[positions] = (old & ~mask) | mantissas
    words[positions[exceptions]] = values.view(layout.word)
    return new


def _mantissas(old: Numbers, symbols: Numbers, fields: _Fields) -> Numbers:
    transform = fields.text("transform")
    if transform == "raw":
        return symbols
    if transform == "xor":
        return old ^ symbols
    if transform == "zigzag":
        return old + ((symbols >> 1) ^ -(symbols & 1))
    raise fields.fault(f"its transform is {transform[:40]!r}", Unsupported)


def _read_rising(fields: _Fields, limit: int) -> Numbers:
    """Rising numbers below ``limit``, from the differences between them."""
    differences = fields.numbers(fields.number("count", limit))
    _check_steps(differences, np.zeros(min(differences.size, 1), np.int64), limit, fields)
    rising = np.cumsum(differences)
    # No step is larger than the limit, so a sum that wraps around was seen beyond it before.
    if rising.size and (int(rising.min()) < 0 or int(rising.max()) >= limit):
        raise fields.fault(f"a position lies beyond {limit}")
    return rising


def _check_steps(differences: Numbers, starts: Numbers, limit: int, fields: _Fields) -> None:
    """Every difference but the first of a run must be a step up, and none beyond the limit."""
    is_wrong = differences < 1
    is_wrong[starts] = differences[starts] < 0
    if is_wrong.any() or (differences >= max(limit, 1)).any():
        raise fields.fault("positions do not rise, or lie beyond the tensor")


def _read_indices(fields: _Fields, word_count: int, shape: tuple[int, ...]) -> Numbers:
    kind = fields.text("kind") if "kind" in fields.table else "flat"
    if kind == "flat":
        return _read_rising(fields, word_count)
    if kind != "row":
        raise fields.fault(f"its indices are of the kind {kind[:40]!r}", Unsupported)
    row_count, row_width = rows_of(shape)
    if (fields.number("n_rows", row_count), fields.number("row_width", row_width)) != (
        row_count,
        row_width,
    ):
        raise fields.fault(f"its rows are not the {row_count} of {row_width} that its shape has")
    return _read_rows(fields, row_count, row_width)


def _read_rows(fields: _Fields, row_count: int, row_width: int) -> Numbers:
    width, data = fields.item_bytes("count_dtype"), fields.data("data")
    at = row_count * width
    if data.size < at:
        raise fields.fault("its indices end among the rows' counts", Truncated)
    counts = data[:at].view(f"<u{width}").astype(np.int64)
    if (counts < 0).any() or (counts > row_width).any():
        raise fields.fault(f"a row of {row_width} elements has more changes than that")
    rows = np.flatnonzero(counts)
    lengths = counts[rows]
    # Only what lies before a row says where it is, so its widths are found one by one.
    widths = np.empty(rows.size, np.int64)
    heads = np.empty(rows.size, np.int64)
    raw = data.data
    for number, length in enumerate(lengths.tolist()):
        if at >= len(raw) or raw[at] not in _WIDTHS:
            raise fields.fault("its indices end early, or a row's numbers have no known width")
        widths[number] = raw[at]
        heads[number] = at + 1
        at += 1 + length * raw[at]
    if at != len(raw):
        raise fields.fault(f"its indices take {at} bytes of {len(raw)}")
    starts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    width_of = np.repeat(widths, lengths)
    places = np.repeat(heads, lengths) + within * width_of
    differences = np.zeros(within.size, np.int64)
    for number in range(int(widths.max(initial=0))):
        has_byte = width_of > number
        differences[has_byte] |= data[places[has_byte] + number].astype(np.int64) << (8 * number)
    _check_steps(differences, starts, row_width, fields)
    running = np.cumsum(differences)
    before = running[starts] - differences[starts]
    columns = running - np.repeat(before, lengths)
    if columns.size and (int(columns.min()) < 0 or int(columns.max()) >= row_width):
        raise fields.fault(f"a position lies beyond a row of {row_width}")
    positions: Numbers = columns + np.repeat(rows, lengths) * row_width
    return positions


def _read_symbols(fields: _Fields, count: int) -> Numbers:
    """One number per change: a mantissa, or its difference from the old one."""
    kind = fields.text("kind")
    if kind == "raw":
        return fields.numbers(count)
    if kind != "codebook3":
        raise fields.fault(f"its mantissas are of the kind {kind[:40]!r}", Unsupported)
    if fields.number("count", count) != count:
        raise fields.fault("its mantissas are not as many as its changes")
    packed, book = fields.data("codes"), fields.data("codebook")
    if packed.size != -(-3 * count // 8) or book.size > CODEBOOK_SIZE:
        raise fields.fault("its codes or its code book have another size")
    bits = np.unpackbits(packed, count=3 * count, bitorder="little").reshape(count, 3)
    codes = bits @ np.array([1, 2, 4], np.uint8)
    escapes = np.flatnonzero(codes == ESCAPE_CODE)
    exceptions = _read_rising(fields.fields("exception_positions"), count)
    values = fields.data("exception_values")
    if not np.array_equal(escapes, exceptions) or values.size != escapes.size:
        raise fields.fault("its escape codes are not its exceptions")
    codes[escapes] = 0
    if (codes >= max(book.size, 1)).any() or (book.size == 0 and escapes.size < count):
        raise fields.fault("a code is not in its code book")
    known = book if book.size else np.zeros(1, np.uint8)
    symbols: Numbers = known[codes].astype(np.int64)
    symbols[escapes] = values
    return symbols
