"""One tensor's payload in any format of Fireworks', by name; and in thinwire's own."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np

from thinwire.checkpoint.disk import ByteArray
from thinwire.codec.api import ARRAY_NAME
from thinwire.codec.container import MAGIC
from thinwire.codec.delta import Delta
from thinwire.codec.dtypes import byte_count
from thinwire.codec.write import Pair, write_delta
from thinwire.errors import ChecksumMismatch, InvalidArgument, TensorMismatch, ThinwireError
from thinwire.interop.fireworks.arc2 import decode_zlib, decode_zstd, encode_zlib, encode_zstd
from thinwire.interop.fireworks.arc3 import encode_arc3
from thinwire.interop.fireworks.arc3_read import decode_arc3
from thinwire.interop.fireworks.errors import BackendNotFoundError
from thinwire.interop.fireworks.layout import ENVELOPE_MARK, ZSTD_MAGIC, checksum_of
from thinwire.interop.foreign import rule_broken

ARC_FORMATS = ("arc_v1", "arc_v2", "arc_v3")
FORMATS = (*ARC_FORMATS, "thinwire")
_ALIASES = {"xor_one_to_one_zlib": "arc_v1", "xor_one_to_one_zstd": "arc_v2"}

_ZLIB_DEFLATE = 0x78


class Encoded(NamedTuple):
    """A tensor's change: the payload, and the Adler-32 of its new bytes, decimal."""

    payload: bytes
    checksum: str


def format_named(name: str) -> str:
    """One of ``FORMATS``, also from its older name, in any case.

    Raises:
        BackendNotFoundError: There is none of that name.
    """
    lowered = name.lower()
    found = _ALIASES.get(lowered, lowered)
    if found not in FORMATS:
        raise BackendNotFoundError(
            f"there is no compression format {name[:40]!r}",
            hint=f"Choose one of {', '.join((*FORMATS, *_ALIASES))}",
            compression_format=name[:40],
        )
    return found


def encode(
    compression_format: str, base: ByteArray, new: ByteArray, dtype: str, shape: tuple[int, ...]
) -> Encoded:
    """One tensor's payload: the same bytes each time where zlib, zstd and bz2 are the same.

    Args:
        compression_format: One of ``FORMATS``, or an older name.
        base: The old bits, uint8.
        new: The new bits, uint8.
        dtype: Of both, as safetensors calls it.
        shape: Of both.

    Raises:
        BackendNotFoundError: There is no such format.
        InvalidArgument: The bytes do not fit dtype and shape, or are no flat run of uint8.
    """
    name = format_named(compression_format)
    _check_bits(base, new)
    if not base.size == new.size == byte_count(dtype, shape):
        raise InvalidArgument(
            f"{base.size} and {new.size} bytes are no two tensors of {dtype} {list(shape)}",
            hint="Pass the bytes of whole tensors of that dtype and shape",
        )
    checksum = checksum_of(new)
    if name == "arc_v1":
        return Encoded(encode_zlib(base, new), checksum)
    if name == "arc_v2":
        return Encoded(encode_zstd(base, new), checksum)
    if name == "arc_v3":
        return Encoded(encode_arc3(base, new, dtype, shape, checksum), checksum)
    out = io.BytesIO()
    write_delta(out, [Pair(ARRAY_NAME, dtype, shape, base, new)])
    return Encoded(out.getvalue(), checksum)


def decode(
    compression_format: str,
    base: ByteArray,
    dtype: str,
    shape: tuple[int, ...],
    payload: bytes | memoryview | ByteArray,
    checksum: str,
    *,
    where: str = "the payload",
) -> ByteArray:
    """The new bits, verified; ``base`` is only read.

    Args:
        compression_format: One of ``FORMATS``, or an older name.
        base: The old bits, uint8.
        dtype: Of both, as safetensors calls it.
        shape: Of both.
        payload: What :func:`encode` or Fireworks' package made.
        checksum: Of the new bits.
        where: The payload's name for messages.

    Raises:
        BackendNotFoundError: There is no such format.
        InvalidArgument: ``base`` is no flat run of uint8.
        FormatError: The payload breaks a rule of the format; ``ChecksumMismatch`` also where the
            base is not the one that it was made from.
        TensorMismatch: It was made for another dtype or shape.
    """
    name = format_named(compression_format)
    _check_bits(base)
    data = _view_of(payload)
    if name == "thinwire":
        new = _decode_container(base, dtype, shape, data, where)
    elif name == "arc_v3":
        new = decode_arc3(base, dtype, shape, data, where)
    else:
        new = (decode_zlib if name == "arc_v1" else decode_zstd)(base, data, where)
    if (actual := checksum_of(new)) != checksum:
        raise rule_broken(
            f"Fireworks {name}",
            f"the new bytes have the Adler-32 {actual}, not {str(checksum)[:20]}",
            file=where,
            error=ChecksumMismatch,
            hint="Give the checkpoint that it was made from, or fetch it again",
        )
    return new


def sniff_format(payload: bytes | memoryview | ByteArray) -> str | None:
    """Which of ``FORMATS`` a payload looks like, from its first bytes; None: none of them."""
    first = bytes(_view_of(payload)[:16])
    if first.startswith(ENVELOPE_MARK):
        return "arc_v3"
    if first.startswith(ZSTD_MAGIC):
        return "arc_v2"
    if first.startswith(MAGIC):
        return "thinwire"
    if first[8:9] == b"{" and int.from_bytes(first[:8], "little") < len(payload):
        return "arc_v3"
    if len(first) > 1 and first[0] == _ZLIB_DEFLATE and int.from_bytes(first[:2], "big") % 31 == 0:
        return "arc_v1"
    return None


def _check_bits(*sides: ByteArray) -> None:
    for data in sides:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvalidArgument(
                f"an array of {data.dtype} {list(data.shape)} is no flat run of bytes in order",
                hint="Pass numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)",
            )


def _view_of(payload: bytes | memoryview | ByteArray) -> memoryview:
    data = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
    return data.cast("B")


def _decode_container(
    base: ByteArray, dtype: str, shape: tuple[int, ...], payload: memoryview, where: str
) -> ByteArray:
    try:
        with Delta.open(payload) as delta:
            return _apply_container(base, dtype, shape, delta)
    except ThinwireError as error:
        message = f"{where}: {error.message}"
        raise type(error)(message, hint=error.hint, **error.context) from None


def _apply_container(
    base: ByteArray, dtype: str, shape: tuple[int, ...], delta: Delta
) -> ByteArray:
    entry = delta.tensors.get(ARRAY_NAME)
    if entry is None or len(delta.tensors) != 1 or entry.kind not in ("delta", "same"):
        raise TensorMismatch(
            "the container does not hold one array as a change of its base",
            hint="Fetch it again",
        )
    if (entry.dtype, tuple(entry.shape)) != (dtype, shape):
        raise TensorMismatch(
            f"made for {entry.dtype} {list(entry.shape)}; the base is {dtype} {list(shape)}",
            hint="Give the tensor that it was made from",
        )
    out = np.empty(base.size, np.uint8)
    delta.apply({ARRAY_NAME: base}, lambda _: out)
    return out
