"""XOR of the bytes, zstd level 1: the format of slime, miles, SkyRL and ModelExpress."""

from __future__ import annotations

import numpy as np

from thinwire.bench.peer import Encoded
from thinwire.bench.peers.zstd_one import ZstdOne
from thinwire.bench.tensors import Tensor, Words


class XorZstd:
    """One zstd frame over new XOR base per changed tensor.

    The real systems keep a checksum of the new bytes, most often xxh3-128, which costs them almost
    nothing. This row leaves it out, in their favour, rather than take a slower one.
    """

    name = "xor_zstd1"

    def __init__(self) -> None:
        self._zstd = ZstdOne()

    def encode(self, base: Tensor, new: Tensor) -> Encoded | None:
        """See Peer. Unchanged tensors are left out."""
        difference = base.words ^ new.words
        if not difference.any():
            return None
        return Encoded(self._zstd.compress(difference.view(np.uint8)), checksum="")

    def decode(self, base: Tensor, encoded: Encoded) -> Words:
        """See Peer."""
        difference = np.frombuffer(self._zstd.decompress(encoded.payload), base.words.dtype)
        words: Words = base.words ^ difference
        return words
