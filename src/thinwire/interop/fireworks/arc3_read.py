"""Reads arc_v3 without running anything that the payload holds.

All numbers are compared with the base's size before memory is taken for them: a payload can never
unpack to more than ``_unpacked_limit``, nine times a BF16 tensor's own bytes, 21 times those of an
8-bit one whose rows are of one element. A hostile payload can ask for that. What is written where
all of a BF16 tensor changed unpacks to about its own bytes, and reading it takes four times them.
"""

from __future__ import annotations

import bz2
from typing import Any

import numpy as np

from thinwire.checkpoint.disk import ByteArray
from thinwire.checkpoint.safetensors_file import LENGTH_BYTES, parse_header
from thinwire.codec import zstd
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    LimitExceeded,
    TensorMismatch,
    Truncated,
    Unsupported,
)
from thinwire.interop.fireworks.arc2 import decode_zstd
from thinwire.interop.fireworks.arc3_fields import SYSTEM, Fields, Numbers
from thinwire.interop.fireworks.arc3_positions import CHUNK, read_indices, read_rising
from thinwire.interop.fireworks.layout import (
    ARC3_VERSION,
    BLOB_FALLBACK,
    BLOB_FORMAT,
    BLOB_TENSOR,
    CODEBOOK_SIZE,
    ENVELOPE_MARK,
    ESCAPE_CODE,
    FloatLayout,
    checksum_of,
    read_layout,
    rows_of,
)
from thinwire.interop.foreign import rule_broken
from thinwire.interop.payload_files import declared_bytes
from thinwire.interop.pickles import read_pickle

_MAX_OPCODES = 1 << 10
_FRAME_BYTES = 1 << 16
_MAX_BLOB_HEADER_BYTES = 1 << 16
_MAX_SHOWN_EXTENTS = 16
_BASE_HINT = "Give the checkpoint that it was made from, or fetch it again"


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
        raise rule_broken(SYSTEM, rule, file=where, error=ChecksumMismatch, hint=_BASE_HINT)
    return new


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
) -> Fields:
    table = read_pickle(envelope, what=f"{where}: the envelope", max_opcodes=_MAX_OPCODES)
    if not isinstance(table, dict):
        raise rule_broken(SYSTEM, "the envelope is no table", file=where)
    outer = Fields(table, where)
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
    return Fields(inner, where)


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


def _unpack_zstd(packed: ByteArray, limit: int, fields: Fields) -> bytes:
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


def _unpack_bz2(packed: memoryview, limit: int, fields: Fields) -> bytes:
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
    base: ByteArray, dtype: str, shape: tuple[int, ...], fields: Fields
) -> ByteArray:
    if fields.table.get("version", ARC3_VERSION) != ARC3_VERSION:
        raise fields.fault("its version is not 1", Unsupported)
    made_for, made_shape = fields.text("dtype"), fields.table.get("shape")
    layout = read_layout(dtype)
    if layout is None or made_for not in layout.torch_names or made_shape != shape:
        shown = _shown_shape(made_shape)
        raise TensorMismatch(
            f"{fields.where}: made for {made_for[:40]} {shown}; the base is {dtype} {shape}"
            f" ({SYSTEM} format)",
            hint="Give the checkpoint that it was made from",
        )
    strategy = fields.text("strategy")
    if strategy == "none":
        return base.copy()
    if strategy != "mantissa_xor":
        raise fields.fault(f"its strategy is {strategy[:40]!r}", Unsupported)
    return _decode_changes(base, layout, shape, fields)


def _shown_shape(shape: Any) -> str:
    """A shape for a message. What is none is not shown: it may be of any size and depth."""
    if type(shape) is not tuple or len(shape) > _MAX_SHOWN_EXTENTS:
        return "of no shape"
    return str(shape) if all(type(extent) is int for extent in shape) else "of no shape"


def _decode_changes(
    base: ByteArray, layout: FloatLayout, shape: tuple[int, ...], fields: Fields
) -> ByteArray:
    for key, bits in (("mantissa_bits", layout.mantissa_bits), ("total_bits", layout.total_bits)):
        if fields.number(key, layout.total_bits) != bits:
            raise fields.fault(f"its {key} are not the {bits} of its dtype")
    new = base.copy()
    words = new.view(layout.word)
    positions = read_indices(fields.fields("indices"), words.size, shape)
    stream = fields.fields("mantissa_stream")
    symbols = _read_symbols(stream, positions.size)
    exceptions = read_rising(fields.fields("exception_positions"), positions.size)
    values = fields.data("exception_values")
    if fields.text("exception_dtype") != layout.word:
        raise fields.fault("its exceptions are not of its dtype's width")
    if values.size * 8 != exceptions.size * layout.total_bits:
        raise fields.fault(f"{values.size} bytes of exceptions are not {exceptions.size} of them")
    transform = fields.text("transform")
    for start in range(0, positions.size, CHUNK):
        places = positions[start : start + CHUNK]
        old = words[places].astype(np.int64)
        coded = symbols[start : start + CHUNK].astype(np.int64)
        words[places] = _with_mantissas(old, coded, transform, layout, fields)
    new_words = values.view(layout.word)
    for start in range(0, exceptions.size, CHUNK):
        places = positions[exceptions[start : start + CHUNK]]
        words[places] = new_words[start : start + CHUNK]
    return new


def _with_mantissas(
    old: Numbers, symbols: Numbers, transform: str, layout: FloatLayout, fields: Fields
) -> Numbers:
    """Old words with their new mantissas."""
    mask = (1 << layout.mantissa_bits) - 1
    largest = {"raw": mask, "xor": mask, "zigzag": 2 * mask}.get(transform)
    if largest is None:
        raise fields.fault(f"its transform is {transform[:40]!r}", Unsupported)
    if symbols.size and not 0 <= int(symbols.min()) <= int(symbols.max()) <= largest:
        raise fields.fault("a mantissa leaves its bits")
    mantissas: Numbers = symbols
    if transform == "xor":
        mantissas = (old & mask) ^ symbols
    elif transform == "zigzag":
        mantissas = (old & mask) + ((symbols >> 1) ^ -(symbols & 1))
        if mantissas.size and not 0 <= int(mantissas.min()) <= int(mantissas.max()) <= mask:
            # Such a step is possible, but not from what the base has there.
            rule = "a mantissa leaves its bits: the base is not the one that it was made from"
            where = fields.where
            raise rule_broken(SYSTEM, rule, file=where, error=ChecksumMismatch, hint=_BASE_HINT)
    return (old & ~mask) | mantissas


def _read_symbols(fields: Fields, count: int) -> Numbers:
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
    exceptions = read_rising(fields.fields("exception_positions"), count)
    values = fields.data("exception_values")
    if not np.array_equal(escapes, exceptions) or values.size != escapes.size:
        raise fields.fault("its escape codes are not its exceptions")
    codes[escapes] = 0
    if (codes >= max(book.size, 1)).any() or (book.size == 0 and escapes.size < count):
        raise fields.fault("a code is not in its code book")
    known = book if book.size else np.zeros(1, np.uint8)
    symbols: Numbers = known[codes]
    symbols[escapes] = values
    return symbols
