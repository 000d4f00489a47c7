"""One digest for all weights of a version, and one for everything else in its folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3

# Name, dtype, shape, and the digest of the tensor's bits.
TensorRow = tuple[str, str, Sequence[int], str]
# Name, "header" (of a weights file) or "file", size in bytes, and the digest of these bytes.
LayoutRow = tuple[str, str, int, str]


def weights_digest(rows: Iterable[TensorRow]) -> str:
    """BLAKE3 over the rows as JSON, one to a line, sorted by name.

    Two checkpoints with the same digest hold the same tensors, as far as the digests in the rows
    say; how they are spread over files does not matter.
    """
    return _digest(rows)


def layout_digest(rows: Iterable[LayoutRow]) -> str:
    """Likewise over the headers of weights files and the bytes of all other files."""
    return _digest(rows)


def _digest(rows: Iterable[TensorRow] | Iterable[LayoutRow]) -> str:
    digest = blake3()
    for row in sorted(rows, key=lambda row: row[0]):
        digest.update(msgspec.json.encode(row) + b"\n")
    return digest.hexdigest()
