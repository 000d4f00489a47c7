"""The codec for arrays : ``encode``, ``decode``, ``decode_into``, ``changes``, ``inspect``."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from thinwire.codec.arrays import Bits, is_torch, to_bits
from thinwire.codec.chunk import Spec
from thinwire.codec.container import Attachment, TableRecord
from thinwire.codec.delta import Delta, TensorEntry
from thinwire.codec.dtypes import dtype_named
from thinwire.codec.write import Pair, write_delta
from thinwire.errors import InvalidArgument, TensorMismatch

Payload = bytes | bytearray | memoryview
# The one tensor of a payload made by `encode`.
ARRAY_NAME = ""


class Changes(NamedTuple):
    """What a delta changes in an array, ready for a scatter.

    Attributes:
        indices: int64, flat, rising: where elements change.
        values: The new elements at these places, in the dtype of the base (numpy).
    """

    indices: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class AttachmentEntry:
    """A small file of a delta, as the index describes it; ``stored_bytes`` 0: not carried."""

    name: str
    kind: str
    size: int
    is_carried: bool
    stored_bytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a container says of itself; no base is needed.

    Attributes:
        version: Format version.
        file_bytes: Bytes of the whole container.
        raw_bytes: Bytes of the new tensors.
        changed_count: Changed words in tensors that both sides hold.
        word_count: Words in these tensors.
        tensors: One entry per tensor, in order.
        attachments: One entry per small file, in order.
        tables: The rate tables, in order.
        group_bytes: Payload bytes of each group of small tensors.
        steps: Changes down and up by octave of their size: 1, 2-3, 4-7, ... steps.
    """

    version: int
    file_bytes: int
    raw_bytes: int
    changed_count: int
    word_count: int
    tensors: list[TensorEntry]
    attachments: list[AttachmentEntry]
    tables: list[TableRecord]
    group_bytes: list[int]
    steps: tuple[list[int], list[int]]


def encode(base: Any, new: Any, *, spec: Spec | None = None, dtype: str | None = None) -> bytes:
    """Code ``new`` given ``base``; the result is a container with one tensor.

    Elements are compared as bits: -0.0 differs from +0.0, and NaN payloads survive.

    Args:
        base: What the receiver holds: numpy (also ml_dtypes), CPU torch, DLPack or buffer.
        new: The same shape and dtype.
        spec: What to ask of the encoder.
        dtype: A safetensors dtype to read the bits as, such as "BF16" for uint16 arrays.

    Raises:
        TensorMismatch: Shape or dtype differ.
        InvalidArgument, Unsupported: Not arrays, or of a dtype without a name in safetensors.
    """
    before, after = to_bits(base, dtype), to_bits(new, dtype)
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        raise TensorMismatch(
            f"base is {before.dtype} of shape {list(before.shape)}, new is {after.dtype} of shape "
            f"{list(after.shape)}",
            hint="Cast or reshape so that both match, or carry it whole with encode_tensors",
        )
    out = io.BytesIO()
    pair = Pair(ARRAY_NAME, after.dtype, after.shape, before.data, after.data)
    write_delta(out, [pair], spec=spec)
    return out.getvalue()


def decode(base: Any, payload: Payload) -> Any:
    """The new array: of the kind, dtype and shape of ``base``, which is only read.

    Raises:
        BaseMismatch: ``base`` holds other bits than the delta was made from.
        TensorMismatch: ``base`` has another dtype, shape or size.
        FormatError: The payload is truncated, corrupt or not supported.
    """
    with _open(payload) as delta:
        bits = _matching(base, delta)
        out = np.empty(bits.data.size, np.uint8)
        delta.apply({ARRAY_NAME: bits.data}, lambda _: out)
        return bits.restore(out)


def decode_into(base: Any, payload: Payload) -> None:
    """Turn ``base`` into the new array in place, all or nothing: after an error it is as it was.

    Raises:
        InvalidArgument: ``base`` cannot be written.
        BaseMismatch, TensorMismatch, FormatError: As :func:`decode`.
    """
    with _open(payload) as delta:
        bits = _matching(base, delta)
        if bits.is_view:
            delta.apply_in_place({ARRAY_NAME: bits.data})
            return
        if not (isinstance(base, np.ndarray) and base.flags.writeable) and not is_torch(base):
            raise InvalidArgument(
                "the base is read-only", hint="Use decode, or pass a writable array"
            )
        out = np.empty(bits.data.size, np.uint8)
        delta.apply({ARRAY_NAME: bits.data}, lambda _: out)
        base[...] = bits.restore(out)


def changes(base: Any, payload: Payload) -> Changes:
    """Where ``base`` changes, and to what; verified, ``base`` is only read.

    Raises:
        BaseMismatch, TensorMismatch, FormatError: As :func:`decode`.
    """
    with _open(payload) as delta:
        bits = _matching(base, delta)
        word_bytes = dtype_named(bits.dtype).word_bytes
        found = list(delta.changes({ARRAY_NAME: bits.data}))
    positions = [change.positions.astype(np.int64) + change.first_word for change in found]
    words = [change.words.reshape(-1, word_bytes) for change in found]
    indices = np.concatenate([np.empty(0, np.int64), *positions])
    values = np.concatenate([np.empty((0, word_bytes), np.uint8), *words])
    dtype = bits.numpy_dtype
    if dtype.itemsize != word_bytes:  # complex numbers: two words an element
        per_element = dtype.itemsize // word_bytes
        new = bits.data.reshape(-1, word_bytes).copy()
        new[indices] = values
        indices = np.unique(indices // per_element)
        values = new.reshape(-1, dtype.itemsize)[indices]
    return Changes(indices, np.ascontiguousarray(values).reshape(-1).view(dtype))


def inspect(payload: Payload | os.PathLike[str] | str) -> Inspection:
    """What a container holds, read from its index; the container is verified, nothing is decoded.

    Args:
        payload: Bytes, or the path of a file.

    Raises:
        FormatError: The payload is truncated, corrupt or not supported.
        StoreError: The file cannot be read.
    """
    with Delta.open(payload) as delta:
        entries = list(delta.tensors.values())
        both = [entry for entry in entries if entry.kind in ("delta", "same")]
        return Inspection(
            version=delta.version,
            file_bytes=delta.file_bytes,
            raw_bytes=sum(entry.byte_count for entry in entries if entry.kind != "removed"),
            changed_count=sum(entry.changed_count for entry in both),
            word_count=sum(e.byte_count // dtype_named(e.dtype).word_bytes for e in both),
            tensors=entries,
            attachments=[_attachment_entry(delta, a) for a in delta.attachments],
            tables=delta.tables,
            group_bytes=delta.group_bytes,
            steps=delta.steps,
        )


def _attachment_entry(delta: Delta, attachment: Attachment) -> AttachmentEntry:
    stored_bytes = delta.stored_bytes(attachment)
    return AttachmentEntry(
        name=attachment.name,
        kind=attachment.kind,
        size=attachment.size,
        is_carried=stored_bytes is not None,
        stored_bytes=stored_bytes or 0,
    )


def encode_tensors(
    base: Mapping[str, Any], new: Mapping[str, Any], *, spec: Spec | None = None, workers: int = 1
) -> bytes:
    """Code a dictionary of arrays given another; see :func:`encode` and :func:`decode_tensors`.

    Tensors that only one side holds, or that changed dtype or shape, are carried in full or
    recorded as removed.
    """
    before = {name: to_bits(array) for name, array in base.items()}
    after = {name: to_bits(array) for name, array in new.items()}
    out = io.BytesIO()
    write_delta(out, pair_up(before, after), spec=spec, workers=workers)
    return out.getvalue()


def decode_tensors(
    base: Mapping[str, Any], payload: Payload, *, workers: int = 1
) -> dict[str, np.ndarray]:
    """The new bits by tensor name, uint8, verified; tensors that were removed are absent.

    Raises:
        BaseMismatch, TensorMismatch, FormatError: As :func:`decode`.
    """
    bases = {name: to_bits(array).data for name, array in base.items()}
    with _open(payload) as delta:
        outs: dict[str, np.ndarray] = {}

        def out_for(entry: TensorEntry) -> np.ndarray:
            # Asked for only after all bases were seen to fit: a hostile shape costs nothing.
            return outs.setdefault(entry.name, np.empty(entry.byte_count, np.uint8))

        delta.apply(bases, out_for, workers=workers)
    return outs


def pair_up(base: Mapping[str, Bits], new: Mapping[str, Bits]) -> list[Pair]:
    """Pairs in the order of ``new``, then what it lacks in the order of ``base``."""
    pairs = []
    for name, after in new.items():
        before = base.get(name)
        if before is not None and (before.dtype, before.shape) != (after.dtype, after.shape):
            before = None
        pairs.append(
            Pair(
                name, after.dtype, after.shape, None if before is None else before.data, after.data
            )
        )
    for name, before in base.items():
        if name not in new:
            pairs.append(Pair(name, before.dtype, before.shape, before.data, None))
    return pairs


def _open(payload: Payload) -> Delta:
    """Open bytes; a string is a mistake here, not a path."""
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise InvalidArgument(
            f"the payload is {type(payload).__name__}, not bytes", hint="Read the file first"
        )
    return Delta.open(payload)


def _matching(base: Any, delta: Delta) -> Bits:
    """The bits of ``base``, read as the dtype of the delta's only tensor."""
    if list(delta.tensors) != [ARRAY_NAME]:
        raise InvalidArgument(
            f"the delta holds {len(delta.tensors)} named tensors, not one array",
            hint="Use decode_tensors or apply_checkpoint",
        )
    entry = delta.tensors[ARRAY_NAME]
    if entry.kind not in ("delta", "same"):
        raise TensorMismatch(
            f"the delta holds the array as {entry.kind!r}, not as a change of a base",
            hint="Use decode_tensors",
        )
    bits = to_bits(base)
    if bits.dtype != entry.dtype:
        # Bits may travel under a given dtype, such as uint16 as BF16.
        mismatch = TensorMismatch(
            f"the base is {bits.dtype}, the delta was made from {entry.dtype}"
        )
        if bits.dtype[0] not in "UI":
            raise mismatch
        try:
            bits = to_bits(base, entry.dtype)
        except InvalidArgument:
            raise mismatch from None
    if bits.shape != entry.shape:
        raise TensorMismatch(
            f"the base has shape {list(bits.shape)}, the delta was made from {list(entry.shape)}"
        )
    return bits
