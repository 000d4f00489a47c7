"""NeMo-RL's sparse refit payloads, read only: zstd of what ``torch.save`` made of a tuple.

NeMo-RL sends them to its own vLLM workers through S3 (``{run}/000000.pt``) or ZeroMQ. Each is
``(packed positions, groups of values, one table per tensor)``; see :class:`_Item`. There are no
versions, no full weights and no digest: a wrong base cannot be noticed where its shapes are right.

Revisions of it that add differences of floats, or hold positions in other ways, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.checkpoint.disk import map_file
from thinwire.checkpoint.safetensors_file import StoredTensor
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.errors import FormatError, ThinwireError, Unsupported
from thinwire.interop.foreign import (
    MAX_TENSORS,
    ChainVersion,
    Facts,
    ForeignDelta,
    ForeignTensor,
    check_count,
    require_base,
    rule_broken,
)
from thinwire.interop.sparse import RUN, NewWords, Positions, check_fits, positions_of_gaps
from thinwire.interop.torch_names import TORCH_NAMES
from thinwire.interop.torch_zip import TorchFile
from thinwire.interop.unpacked import FrameReader, expansion_limit

NAME = "nemo"
SYSTEM = "NeMo-RL's sparse refit"

XOR, OVERWRITE = "xor", "overwrite"
RANGE, DELTAS = "range", "deltas"

# Values are words of one element each.
_DTYPES = {TORCH_NAMES[name]: name for name in TORCH_NAMES.keys() - {"C64", "F4"}}
_VALUE_TYPES = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_GAP_TYPES = {2: "<u2", 4: "<u4", 8: "<u8"}
_TEXTS = ("name", "dtype", "operation", "index_encoding")
_NUMBERS = ("index_start", "index_end", "value_group", "value_start", "value_end")
_OPTIONAL = ("range_start", "verification_samples")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZIP_MAGIC = b"PK\x03\x04"


class _Item(NamedTuple):
    """One tensor's table.

    Attributes:
        dtype: As safetensors calls it.
        shape: The whole tensor's.
        is_xor: Whether values are bits to flip, not new bits.
        range_start: The first position where all follow each other; None: they are gaps.
        packed: Where the gaps lie in the packed positions, in bytes.
        group: Which group its values are in.
        values: Which elements of the group they are.
    """

    dtype: str
    shape: tuple[int, ...]
    is_xor: bool
    range_start: int | None
    packed: tuple[int, int]
    group: int
    values: tuple[int, int]

    @property
    def changed_count(self) -> int:
        """Changes."""
        return self.values[1] - self.values[0]


class NemoDelta(ForeignDelta):
    """One opened payload; see :class:`thinwire.interop.foreign.ForeignDelta`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        frame = map_file(path)
        data = FrameReader(SYSTEM, path, frame).unpack(expansion_limit(frame.size))
        archive = TorchFile(SYSTEM, path, data, frame.size)
        match archive.value():
            case (index, tuple(groups), list(tables)):
                pass
            case _:
                raise self._fault("it is no tuple of positions, values and tables", Unsupported)
        check_count(SYSTEM, "tensors", len(tables), MAX_TENSORS, path)
        self._index = archive.array(index)
        if self._index.dtype != np.uint8:
            raise self._fault("its packed positions are not bytes", Unsupported)
        self._groups = [archive.array(group) for group in groups]
        self._items: dict[str, _Item] = {}
        for table in tables:
            name, item = self._read_item(table)
            if name in self._items:
                raise self._fault("it comes twice", Unsupported, name)
            self._items[name] = item
        self._check_cover()
        self._tensors = {
            name: ForeignTensor(
                item.packed[1]
                - item.packed[0]
                + item.changed_count * dtype_named(item.dtype).word_bytes,
                item.dtype,
                item.shape,
                item.changed_count,
            )
            for name, item in self._items.items()
        }
        kinds = {XOR if item.is_xor else OVERWRITE for item in self._items.values()}
        self._facts = Facts(
            format=NAME, encoding="+".join(sorted(kinds)) or XOR, file_bytes=frame.size
        )

    @property
    def facts(self) -> Facts:
        """See :class:`ForeignDelta`. No payload says which version it makes, or of what."""
        return self._facts

    @property
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """See :class:`ForeignDelta`: those of this payload, of several that make a version."""
        return self._tensors

    def new_tensor(self, name: str, base: StoredTensor | None) -> StoredTensor:
        """See :class:`ForeignDelta`. There is no checksum that could tell a wrong base."""
        item = self._items[name]
        old = require_base(SYSTEM, name, base, self._path)
        check_fits(SYSTEM, self._path, name, (item.dtype, item.shape), old)
        values = self._groups[item.group][slice(*item.values)]
        bits = values.view(f"<u{values.itemsize}")
        new = NewWords(SYSTEM, self._path, name, old)
        apply = new.flip if item.is_xor else new.put
        start = 0
        for positions in self._positions(item):
            apply(positions, bits[start : start + positions.size])
            start += positions.size
        return new.finish()

    def close(self) -> None:
        """Nothing to let go of: what was unpacked goes with the last view of it."""

    def _positions(self, item: _Item) -> Iterator[Positions]:
        count = item.changed_count
        if item.range_start is None:
            width = (item.packed[1] - item.packed[0]) // count
            yield from positions_of_gaps(self._index[slice(*item.packed)].view(_GAP_TYPES[width]))
            return
        stop = item.range_start + count
        for start in range(item.range_start, stop, RUN):
            yield np.arange(start, min(start + RUN, stop), dtype=np.int64)

    def _read_item(self, table: Any) -> tuple[str, _Item]:
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str):
            raise self._fault("a tensor's table has no name")
        if "operation" not in table:
            rule = "it has no operation: an earlier revision, which adds floats"
            raise self._fault(rule, Unsupported, name)
        unknown = table.keys() - {*_TEXTS, *_NUMBERS, *_OPTIONAL, "shape"}
        if unknown:
            rule = f"its field {min(map(str, unknown))[:40]!r} is not known"
            raise self._fault(rule, Unsupported, name)
        for key in _TEXTS:
            if not isinstance(table.get(key), str):
                raise self._fault(f"its {key} is malformed", name=name)
        for key in (*_NUMBERS, *(key for key in _OPTIONAL if key in table)):
            if not _is_size(table.get(key)):
                raise self._fault(f"its {key} is malformed", name=name)
        if table["operation"] not in (XOR, OVERWRITE):
            rule = f"its operation {table['operation'][:40]!r} is not known"
            raise self._fault(rule, Unsupported, name)
        dtype = _DTYPES.get(table["dtype"])
        if dtype is None:
            rule = f"its dtype {table['dtype'][:40]!r} is not known"
            raise self._fault(rule, Unsupported, name)
        shape = table.get("shape")
        if not isinstance(shape, tuple) or not all(_is_size(extent) for extent in shape):
            raise self._fault("its shape is malformed", name=name)
        item = _Item(
            dtype,
            shape,
            table["operation"] == XOR,
            table.get("range_start"),
            (table["index_start"], table["index_end"]),
            table["value_group"],
            (table["value_start"], table["value_end"]),
        )
        self._check_item(name, item, table["index_encoding"])
        return name, item

    def _check_item(self, name: str, item: _Item, encoding: str) -> None:
        if encoding not in (RANGE, DELTAS):
            rule = f"positions coded as {encoding[:40]!r} are not read here"
            raise self._fault(rule, Unsupported, name)
        if (encoding == RANGE) != (item.range_start is not None):
            raise self._fault("its range_start and index_encoding contradict each other", name=name)
        try:
            tensor_bytes = byte_count(item.dtype, item.shape)
        except FormatError as error:
            raise self._fault(error.message, type(error), name) from None
        word_bytes = dtype_named(item.dtype).word_bytes
        count = item.changed_count
        if not 0 < count * word_bytes <= tensor_bytes:
            rule = f"{count} changes in a tensor of shape {list(item.shape)[:8]}"
            raise self._fault(rule, name=name)
        if item.group >= len(self._groups):
            raise self._fault(f"there is no group {item.group} of values", name=name)
        group = self._groups[item.group]
        if group.dtype != _VALUE_TYPES[word_bytes]:
            rule = f"its values are {group.dtype.name}, and its dtype is {item.dtype}"
            raise self._fault(rule, name=name)
        index_bytes = item.packed[1] - item.packed[0]
        widths = [0] if encoding == RANGE else list(_GAP_TYPES)
        if index_bytes not in [count * width for width in widths]:
            raise self._fault(f"{index_bytes} bytes of positions for {count} changes", name=name)

    def _check_cover(self) -> None:
        """All positions and values must be somebody's, in order: nothing is left over or shared."""
        index_stop = 0
        value_stops = [0] * len(self._groups)
        for name, item in self._items.items():
            if item.packed[0] != index_stop or item.values[0] != value_stops[item.group]:
                raise self._fault("its positions or values do not follow those before", name=name)
            index_stop = item.packed[1]
            value_stops[item.group] = item.values[1]
        sizes = [group.size for group in self._groups]
        if index_stop != self._index.size or value_stops != sizes:
            raise self._fault("positions or values are left over, or end too early")

    def _fault(
        self, rule: str, error: type[FormatError] | None = None, name: str | None = None
    ) -> FormatError:
        if error is None:
            return rule_broken(SYSTEM, rule, file=self._path, tensor=name)
        return rule_broken(SYSTEM, rule, file=self._path, tensor=name, error=error)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def is_delta(path: Path) -> bool:
    """Whether a file looks like a payload of NeMo-RL's: a zip archive in a zstd frame."""
    if not path.is_file():
        return False
    try:
        frame = map_file(path)
        if frame[:4].tobytes() != _ZSTD_MAGIC:
            return False
        return FrameReader(SYSTEM, path, frame).read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    except ThinwireError:
        return False


def open_delta(path: Path) -> NemoDelta:
    """Open one payload, a file, and check all that can be checked without the base.

    Raises:
        FormatError: It is malformed, or of a revision that is not read here.
        StoreError: It cannot be read, or the disk is full.
    """
    return NemoDelta(path)


def list_versions(folder: Path) -> list[ChainVersion]:
    """None: payloads have no versions, and NeMo-RL deletes each once it was delivered."""
    del folder
    return []


__all__ = ["NAME", "NemoDelta", "is_delta", "list_versions", "open_delta"]
