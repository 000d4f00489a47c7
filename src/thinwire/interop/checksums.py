"""The checksums that other systems keep of a tensor's bytes, as the text they write.

They find accidents, not attackers: whoever can write a delta can make them match.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from blake3 import blake3

from thinwire.checkpoint.disk import ByteArray
from thinwire.errors import InvalidArgument, Unsupported

_SHOWN_CHARS = 40
_HEX_ADLER = re.compile(r"[0-9a-fA-F]{1,8}", re.ASCII)
_DECIMAL_ADLER = re.compile(r"\d{1,10}", re.ASCII)


def _xxh3_128(data: ByteArray) -> str:
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise InvalidArgument(
            "xxh3-128 checksums need the xxhash package, which is not installed",
            hint="Run: pip install 'thinwire[interop]'",
        ) from error
    return xxh3_128(data.data).hexdigest()


def _blake3(data: ByteArray) -> str:
    return blake3(data.data, max_threads=blake3.AUTO).hexdigest()


def _adler32(data: ByteArray) -> str:
    return f"{zlib.adler32(data.data):08x}"


def _sha256(data: ByteArray) -> str:
    return hashlib.sha256(data.data).hexdigest()


CHECKSUMS: Mapping[str, Callable[[ByteArray], str]] = MappingProxyType(
    {"xxh3-128": _xxh3_128, "blake3": _blake3, "adler32": _adler32, "sha256": _sha256}
)
"""Each algorithm by the name that the formats use: bytes to text."""


def checksum(algorithm: str, data: ByteArray) -> str:
    """The checksum of contiguous bytes, as slime and SkyRL write it: hex, lower case.

    Raises:
        Unsupported: No such algorithm.
        InvalidArgument: It needs a package that is not installed.
    """
    try:
        compute = CHECKSUMS[algorithm]
    except KeyError:
        raise Unsupported(
            f"the checksum {algorithm[:_SHOWN_CHARS]!r} is not known",
            hint=f"Known are {', '.join(CHECKSUMS)}",
        ) from None
    return compute(data)


def is_checksum(algorithm: str, text: str, data: ByteArray) -> bool:
    """Whether ``text`` is the checksum of ``data``.

    An adler32 may be in hex, as slime writes it, or in decimal, as Fireworks does.

    Raises:
        Unsupported, InvalidArgument: As :func:`checksum`.
    """
    found = checksum(algorithm, data)
    if algorithm != "adler32":
        return text.lower() == found
    values = []
    if _HEX_ADLER.fullmatch(text):
        values.append(int(text, 16))
    if _DECIMAL_ADLER.fullmatch(text):
        values.append(int(text))
    return int(found, 16) in values
