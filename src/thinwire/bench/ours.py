"""The row of this library: its whole file, made and applied through the calls that users have."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinwire.bench.framing import read_checkpoint
from thinwire.bench.peer import InPlaceFile
from thinwire.bench.report import OUR_ROW
from thinwire.bench.tensors import Checkpoint, Tensor
from thinwire.checkpoint import Checkpoint as StoredCheckpoint
from thinwire.codec.api import decode_tensors
from thinwire.codec.delta import Delta
from thinwire.codec.write import Pair, write_delta


@dataclass(frozen=True)
class OurFile(InPlaceFile):
    """An InPlaceFile whose coded weights can be told from index and digests."""

    def section_bytes(self, payload: bytes, /) -> int:
        """See SectionedPeer."""
        with Delta.open(payload) as delta:
            own_bytes = sum(entry.payload_bytes for entry in delta.tensors.values())
            return own_bytes + sum(delta.group_bytes)


def make_our_row() -> OurFile:
    """The row "thinwire": one thread, every byte of the file counted, every digest checked."""
    return OurFile(OUR_ROW, encode, decode, decode_into)


def load_checkpoint(path: Path) -> dict[str, Tensor]:
    """Map a safetensors file or a model folder, checked as the library checks its input.

    Raises:
        FormatError, InvalidArgument, StoreError: As ``thinwire.checkpoint.Checkpoint.open``.
    """
    StoredCheckpoint.open(path)
    # Mapped a second time, copy on write: peers may write into what they are given.
    return read_checkpoint(path)


def encode(base: Checkpoint, new: Checkpoint) -> bytes:
    """The delta file from ``base`` to ``new``."""
    pairs = [
        Pair(name, tensor.dtype, tensor.shape, _as_bytes(base[name]), _as_bytes(tensor))
        for name, tensor in new.items()
    ]
    out = io.BytesIO()
    write_delta(out, pairs)
    return out.getvalue()


def decode(base: Checkpoint, payload: bytes) -> Checkpoint:
    """The new checkpoint, all of it in new memory."""
    outs = decode_tensors({name: _as_bytes(tensor) for name, tensor in base.items()}, payload)
    return {
        name: tensor._replace(words=outs[name].view(tensor.words.dtype))
        for name, tensor in base.items()
    }


def decode_into(base: Checkpoint, payload: bytes) -> None:
    """Turn ``base`` into the new checkpoint, all or nothing."""
    bases = {name: _as_bytes(tensor) for name, tensor in base.items()}
    with Delta.open(payload) as delta:
        delta.apply_in_place(bases)


def _as_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.words.view(np.uint8)
