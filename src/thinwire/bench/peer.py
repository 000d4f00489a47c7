"""What a row of the bench must be able to do, and the two ways to make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from thinwire.bench import framing
from thinwire.bench.tensors import Checkpoint, Tensor, Words


class MissingExtraError(ImportError):
    """An optional package that a row needs is not installed; the message says which."""


class Encoded(NamedTuple):
    """One tensor's delta: the payload, and the checksum that its file keeps as metadata.

    An empty checksum is not written.
    """

    payload: bytes
    checksum: str


class Peer(Protocol):
    """A delta format that codes each tensor alone."""

    @property
    def name(self) -> str:
        """The row's name."""

    def encode(self, base: Tensor, new: Tensor) -> Encoded | None:
        """Delta from ``base`` to ``new``; None where the real system leaves the tensor out."""

    def decode(self, base: Tensor, encoded: Encoded) -> Words:
        """The new tensor's words. Must not change ``base``."""


@runtime_checkable
class CheckpointPeer(Protocol):
    """A delta format as the bench measures it: whole checkpoints in, one file out."""

    @property
    def name(self) -> str:
        """The row's name."""

    def encode(self, base: Checkpoint, new: Checkpoint) -> bytes:
        """One file that turns ``base`` into ``new``; both have the same layout."""

    def decode(self, base: Checkpoint, payload: bytes) -> Checkpoint:
        """The new checkpoint. Must not change ``base``; may share unchanged tensors with it."""

    def framing_bytes(self, payload: bytes, /) -> int:
        """Bytes of the file that the payload column leaves out, in the peer's favour."""


@runtime_checkable
class InPlacePeer(CheckpointPeer, Protocol):
    """A checkpoint peer that can also turn the base into the new checkpoint in place."""

    def decode_into(self, base: Checkpoint, payload: bytes) -> None:
        """Overwrite the words of ``base``, which are writable, with those of the new checkpoint."""


@runtime_checkable
class SectionedPeer(CheckpointPeer, Protocol):
    """A checkpoint peer that can tell coded weights from the rest of its file."""

    def section_bytes(self, payload: bytes, /) -> int:
        """Bytes of the coded weights alone, without index and digests."""


@dataclass(frozen=True)
class WholeFile:
    """A row made of two functions. Every byte of its file counts."""

    name: str
    encode_file: Callable[[Checkpoint, Checkpoint], bytes]
    decode_file: Callable[[Checkpoint, bytes], Checkpoint]

    def encode(self, base: Checkpoint, new: Checkpoint) -> bytes:
        """See CheckpointPeer."""
        return self.encode_file(base, new)

    def decode(self, base: Checkpoint, payload: bytes) -> Checkpoint:
        """See CheckpointPeer."""
        return self.decode_file(base, payload)

    def framing_bytes(self, _payload: bytes, /) -> int:
        """Nothing is left out."""
        return 0


@dataclass(frozen=True)
class InPlaceFile(WholeFile):
    """A WholeFile with a third function that decodes in place."""

    decode_file_into: Callable[[Checkpoint, bytes], None]

    def decode_into(self, base: Checkpoint, payload: bytes) -> None:
        """See InPlacePeer."""
        self.decode_file_into(base, payload)


@dataclass(frozen=True)
class PerTensor:
    """A per-tensor peer as the real systems ship it: a safetensors file of U8 payloads.

    The keys are the tensors' names, the metadata maps each to its checksum. The header is left out
    of the payload column: it is the same for all such peers and shrinks with the model's size.
    """

    peer: Peer

    @property
    def name(self) -> str:
        """The row's name."""
        return self.peer.name

    @property
    def note(self) -> str:
        """What a reader of its row must know; may be empty."""
        return str(getattr(self.peer, "note", ""))

    def encode(self, base: Checkpoint, new: Checkpoint) -> bytes:
        """See CheckpointPeer."""
        payloads: dict[str, Tensor] = {}
        checksums: dict[str, str] = {}
        for name, tensor in new.items():
            encoded = self.peer.encode(base[name], tensor)
            if encoded is not None:
                payload = np.frombuffer(encoded.payload, np.uint8)
                payloads[name] = Tensor("U8", payload.shape, payload)
                if encoded.checksum:
                    checksums[name] = encoded.checksum
        return framing.pack(payloads, checksums)

    def decode(self, base: Checkpoint, payload: bytes) -> Checkpoint:
        """See CheckpointPeer."""
        payloads, checksums = framing.unpack(payload)
        new = dict(base)
        for name, packed in payloads.items():
            encoded = Encoded(packed.words.tobytes(), checksums.get(name, ""))
            words = self.peer.decode(base[name], encoded)
            new[name] = base[name]._replace(words=words)
        return new

    def framing_bytes(self, payload: bytes, /) -> int:
        """The header with names, sizes and checksums."""
        return framing.header_bytes(payload)
