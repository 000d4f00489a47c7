"""One digest for all weights of a version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3

# Name, dtype, shape, and the digest of the tensor's bits.
TensorRow = tuple[str, str, Sequence[int], str]


def weights_digest(rows: Iterable[TensorRow]) -> str:
    """BLAKE3 over the rows as JSON, one to a line, sorted by name.

    Two checkpoints with the same digest hold the same tensors, as far as the digests in the rows
    say; how they are spread over files does not matter.
    """
    digest = blake3()
    for row in sorted(rows, key=lambda row: row[0]):
        digest.update(msgspec.json.encode(row) + b"\n")
    return digest.hexdigest()
