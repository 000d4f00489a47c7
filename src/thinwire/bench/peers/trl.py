"""TRL's sparse weight patch (its proposals 5417 and 5937): positions and new values, as they are.

The file is a safetensors file with two tensors per changed tensor, ``{name}.idx`` and
``{name}.val``. There is no entropy stage and no checksum. TRL takes BF16 only; here a value is one
word of any dtype. The safetensors header is left out of the payload column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinwire.bench import framing
from thinwire.bench.tensors import Checkpoint, Tensor, Words

Positions = npt.NDArray[np.signedinteger]

_MAX_POSITION = 2**31 - 1
_INDEX_SUFFIX = ".idx"
_VALUE_SUFFIX = ".val"


@dataclass(frozen=True)
class SparsePatch:
    """A CheckpointPeer. ``encode_positions`` gets the ascending positions of one tensor."""

    name: str
    encoding: str
    encode_positions: Callable[[Positions], Tensor]
    decode_positions: Callable[[Tensor], Positions]

    def encode(self, base: Checkpoint, new: Checkpoint) -> bytes:
        """See CheckpointPeer. Unchanged tensors are left out."""
        tensors: dict[str, Tensor] = {}
        changed_count = element_count = 0
        for name, tensor in new.items():
            element_count += tensor.words.size
            positions = np.flatnonzero(base[name].words != tensor.words)
            if positions.size == 0:
                continue
            changed_count += positions.size
            values = tensor.words[positions]
            value_dtype = "BF16" if tensor.dtype == "BF16" else f"U{8 * values.itemsize}"
            tensors[name + _INDEX_SUFFIX] = self.encode_positions(positions)
            tensors[name + _VALUE_SUFFIX] = Tensor(value_dtype, values.shape, values)
        metadata = {
            "format": "sparse_weight_patch",
            "version": "1",
            "sparse": "True",
            "model_version": "0",
            "num_changed_params": str(len(tensors) // 2),
            "total_changed_elements": str(changed_count),
            "total_elements": str(element_count),
            "sparsity": f"{1 - changed_count / max(element_count, 1):.6f}",
            "encoding": self.encoding,
        }
        return framing.pack(tensors, metadata)

    def decode(self, base: Checkpoint, payload: bytes) -> Checkpoint:
        """See CheckpointPeer."""
        tensors, _ = framing.unpack(payload)
        new = dict(base)
        for key, values in tensors.items():
            if key.endswith(_VALUE_SUFFIX):
                name = key.removesuffix(_VALUE_SUFFIX)
                words = base[name].words.copy()
                words[self.decode_positions(tensors[name + _INDEX_SUFFIX])] = values.words
                new[name] = base[name]._replace(words=words)
        return new

    def framing_bytes(self, payload: bytes, /) -> int:
        """The safetensors header."""
        return framing.header_bytes(payload)


def encode_absolute(positions: Positions) -> Tensor:
    """Positions as 32-bit numbers. Raises ValueError where they do not fit, as TRL's do not."""
    if int(positions[-1]) > _MAX_POSITION:
        raise ValueError(f"position {positions[-1]} does not fit the 32 bits that TRL gives it")
    return Tensor("I32", positions.shape, positions.astype("<i4").view(np.uint32))


def decode_absolute(stored: Tensor) -> Positions:
    """Inverse of encode_absolute."""
    return stored.words.view(np.int32)


def encode_gaps(positions: Positions) -> Tensor:
    """Unchanged elements before each change, in one width for the whole tensor: 16 bits or 32."""
    gaps = np.diff(positions, prepend=-1) - 1
    word: Words = gaps.astype("<u2" if int(gaps.max()) <= 0xFFFF else "<u4")
    return Tensor(f"U{8 * word.itemsize}", word.shape, word)


def decode_gaps(stored: Tensor) -> Positions:
    """Inverse of encode_gaps."""
    positions = np.cumsum(stored.words, dtype=np.int64)
    positions += np.arange(positions.size)
    return positions


def trl_raw() -> SparsePatch:
    """48 bits per changed BF16 element."""
    return SparsePatch("trl_raw", "raw", encode_absolute, decode_absolute)


def trl_gap_delta() -> SparsePatch:
    """TRL's default: 32 bits per changed BF16 element, 48 in a tensor with a gap above 65535."""
    return SparsePatch("trl_gap_delta", "gap_delta", encode_gaps, decode_gaps)
