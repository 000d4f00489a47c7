"""Zstandard with a bound on what comes out; the standard library's from Python 3.14 on."""

from __future__ import annotations

import sys

from thinwire.errors import Corrupt

if sys.version_info >= (3, 14):
    from compression import zstd as _zstd
else:
    from backports import zstd as _zstd

# No frame up to level 19 has a larger window; a reader would take all of it before the first byte.
WINDOW_LOG_MAX = 23


def compress(data: bytes | memoryview, level: int) -> bytes:
    """One zstd frame of ``data``."""
    return bytes(_zstd.compress(data, level))


def decompress(data: bytes | memoryview, byte_count: int, what: str) -> bytes:
    """The ``byte_count`` bytes in one zstd frame; never makes more than one byte beyond that.

    Raises:
        Corrupt: The frame is malformed, is followed by other bytes, or holds another byte count.
    """
    decompressor = _zstd.ZstdDecompressor(
        options={_zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX}
    )
    try:
        plain = bytes(decompressor.decompress(bytes(data), max_length=byte_count + 1))
        # An exact frame may still owe its end mark when max_length stopped it.
        if len(plain) == byte_count and not decompressor.eof and not decompressor.needs_input:
            plain += bytes(decompressor.decompress(b"", max_length=1))
    except _zstd.ZstdError as error:
        raise Corrupt(f"{what} is not a valid zstd frame: {error}", what=what) from None
    if len(plain) != byte_count or not decompressor.eof or decompressor.unused_data:
        raise Corrupt(
            f"{what} does not unpack to the {byte_count} bytes it names",
            hint="Fetch the delta again",
            what=what,
            expected_bytes=byte_count,
        )
    return plain
