"""arc_v1 and arc_v2: all bits of base and new XORed, then zlib or zstd over all of it."""

from __future__ import annotations

import zlib

import numpy as np

from thinwire.checkpoint.disk import ByteArray
from thinwire.codec.zstd import compress, decompress
from thinwire.errors import Corrupt
from thinwire.interop.fireworks.zstd_jobs import compress_as_package
from thinwire.interop.foreign import rule_broken

# The package always takes level 3. Level 1 is often smaller here, where nearly all bytes are 0.
_FAST_LEVEL, _PACKAGE_LEVEL = 1, 3


def encode_zlib(base: ByteArray, new: ByteArray) -> bytes:
    """An arc_v1 payload."""
    return zlib.compress(np.bitwise_xor(base, new).data)


def encode_zstd(base: ByteArray, new: ByteArray) -> bytes:
    """An arc_v2 payload: the smaller one of two levels, the first where they are equal."""
    difference = np.bitwise_xor(base, new).data
    as_package = compress_as_package(difference, _PACKAGE_LEVEL)
    return min(compress(difference, _FAST_LEVEL), as_package, key=len)


def encode_zstd_as_package(base: ByteArray, new: ByteArray) -> bytes:
    """An arc_v2 payload, byte for byte the package's where its zstd is of this release."""
    return compress_as_package(np.bitwise_xor(base, new).data, _PACKAGE_LEVEL)


def decode_zlib(base: ByteArray, payload: memoryview, where: str) -> ByteArray:
    """The new bytes of an arc_v1 payload; never unpacks more than one byte beyond them.

    Raises:
        Corrupt: It is not one zlib stream of the base's size.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(payload, base.size + 1)
    except zlib.error as error:
        raise rule_broken("Fireworks arc_v1", f"no zlib stream: {error}", file=where) from None
    if len(plain) != base.size or not unpacker.eof or unpacker.unused_data:
        raise _other_size("Fireworks arc_v1", base.size, where)
    return _xored(base, plain)


def decode_zstd(base: ByteArray, payload: memoryview, where: str) -> ByteArray:
    """The new bytes of an arc_v2 payload; never unpacks more than one byte beyond them.

    Raises:
        Corrupt: It is not one zstd frame of the base's size.
    """
    try:
        plain = decompress(payload, base.size, where)
    except Corrupt as error:
        raise rule_broken("Fireworks arc_v2", error.message, file=where) from None
    return _xored(base, plain)


def _xored(base: ByteArray, difference: bytes) -> ByteArray:
    # Given its room, because numpy gives the XOR of no bytes at all an odd stride.
    new = np.empty(base.size, np.uint8)
    return np.bitwise_xor(base, np.frombuffer(difference, np.uint8), out=new)


def _other_size(system: str, size_bytes: int, where: str) -> Exception:
    return rule_broken(
        system, f"the XOR does not unpack to the base's {size_bytes} bytes", file=where
    )
