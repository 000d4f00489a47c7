"""TRL's sparse weight patch (its proposals 5417 and 5937): positions and new values, as they are.

The file is a safetensors file with two tensors per changed tensor, ``{name}.idx`` and
``{name}.val``, coded by :mod:`thinwire.interop.trl_layout`. There is no entropy stage and no
checksum. TRL takes BF16 only; here a value is one word of any dtype. The safetensors header is left
out of the payload column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.bench import framing
from thinwire.bench.tensors import Checkpoint, Tensor
from thinwire.interop.trl_layout import GAPS, LAYOUTS, PATCH, RAW, decode_index, encode_index

_LAYOUT = LAYOUTS["v2"]


@dataclass(frozen=True)
class SparsePatch:
    """A CheckpointPeer in one of TRL's encodings of positions."""

    name: str
    encoding: str

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
            index_dtype, index = encode_index(positions, self.encoding)
            index_words = index.view(f"u{index.itemsize}")
            tensors[name + _LAYOUT.index_suffix] = Tensor(index_dtype, index.shape, index_words)
            tensors[name + _LAYOUT.value_suffix] = Tensor(value_dtype, values.shape, values)
        metadata = {
            "format": PATCH,
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
            if key.endswith(_LAYOUT.value_suffix):
                name = key.removesuffix(_LAYOUT.value_suffix)
                words = base[name].words.copy()
                start = 0
                index = tensors[name + _LAYOUT.index_suffix].words
                for positions in decode_index(index, self.encoding):
                    words[positions] = values.words[start : start + positions.size]
                    start += positions.size
                new[name] = base[name]._replace(words=words)
        return new

    def framing_bytes(self, payload: bytes, /) -> int:
        """The safetensors header."""
        return framing.header_bytes(payload)


def trl_raw() -> SparsePatch:
    """48 bits per changed BF16 element."""
    return SparsePatch("trl_raw", RAW)


def trl_gap_delta() -> SparsePatch:
    """TRL's default: 32 bits per changed BF16 element, 48 in a tensor with a gap above 65535."""
    return SparsePatch("trl_gap_delta", GAPS)
