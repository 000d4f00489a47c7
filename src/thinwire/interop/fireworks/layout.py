"""What is fixed in Fireworks' ARC payloads: names, marks, and how each float's bits are split."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from thinwire.checkpoint.disk import ByteArray

ENVELOPE_MARK = b"ARC3_ENVELOPE\0"
"""Begins an arc_v3 payload that lists changes; other arc_v3 payloads are a safetensors blob."""

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

BLOB_TENSOR = "tensor"
BLOB_FALLBACK = "fallback_name"
BLOB_FORMAT = "arc_v2"

ARC3_VERSION = 1
CODEBOOK_SIZE = 7
ESCAPE_CODE = 7
# Integer types of coded numbers, as the payload spells them.
ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}


class FloatLayout(NamedTuple):
    """How arc_v3 splits a float: it codes the mantissa's bits; a change of others is an exception.

    ``torch_names`` are how payloads spell the dtype, the one that is written first.
    """

    torch_names: tuple[str, ...]
    mantissa_bits: int
    total_bits: int

    @property
    def word(self) -> str:
        """The unsigned integer of its width."""
        return f"uint{self.total_bits}"


# On some AMD machines the package reads every E4M3 as its FNUZ variant, and spells it so.
_E4M3 = ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz")
_LAYOUTS = {
    "F32": FloatLayout(("torch.float32",), 23, 32),
    "F16": FloatLayout(("torch.float16",), 10, 16),
    "BF16": FloatLayout(("torch.bfloat16",), 7, 16),
    "F8_E4M3": FloatLayout(_E4M3, 3, 8),
    "F8_E5M2": FloatLayout(("torch.float8_e5m2",), 2, 8),
}
# Read, but not written: a package on other machines would refuse it.
_READ_LAYOUTS = _LAYOUTS | {"F8_E4M3FNUZ": FloatLayout(_E4M3, 3, 8)}


def written_layout(dtype: str) -> FloatLayout | None:
    """How a dtype's changes are listed; None: arc_v3 has no other way for it than arc_v2's."""
    return _LAYOUTS.get(dtype)


def read_layout(dtype: str) -> FloatLayout | None:
    """Likewise, for a reader."""
    return _READ_LAYOUTS.get(dtype)


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many rows a tensor has, and their width: the first dimension by the others, or one."""
    count = 1
    for extent in shape[1:] if len(shape) > 1 else shape:
        count *= extent
    return (shape[0] if len(shape) > 1 else 1), max(count, 1)


def checksum_of(data: ByteArray) -> str:
    """The Adler-32 of new bytes as ARC spells it: decimal."""
    return str(zlib.adler32(data.data))
