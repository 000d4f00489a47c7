"""The binary of grail's sparse deltas (PULSE), layouts v2, v3 and v3.1.

``u32 length | JSON header | data``, in one zstd frame. The header names each changed tensor, where
its sections lie in the data, and how many changes it has. Values are the new bits. Positions are
differences, each from the change before:

- v2: of the flat position, in 32 bits.
- v3: of row and column apart, in 32 bits each. A row is one entry of the first axis; the column is
  whole where the row differs from the one before. A tensor of one axis has rows of one element.
- v3.1: as v3, in fewer bits where all differences of a tensor fit: 8 or 16 for rows, 16 for
  columns. That is what grail's program does, though its own text has no 16 for rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.checkpoint.disk import ByteArray
from thinwire.checkpoint.strict_json import parse_object
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.errors import FormatError, Unsupported
from thinwire.interop.foreign import MAX_TENSORS, check_count, rule_broken
from thinwire.interop.sparse import RUN, Positions, Words

SYSTEM = "grail's sparse delta"
LENGTH_BYTES = 4
MAX_INDEX = 2**31 - 1
"""grail's rows, columns and flat positions are 32 bits with a sign."""

LAYOUTS = {"v2": 2, "v3": 3, "v3.1": 31}
"""The header's ``version`` of each layout."""

FORMATS = {name: f"sparse_codec_{name}" for name in LAYOUTS}
"""What ``delta_metadata.json`` calls each layout."""

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""The dtypes of values that grail has, as safetensors calls them."""

_INDEX_TYPES = {"int32": "<i4", "uint16": "<u2", "uint8": "u1"}
_SHOWN_CHARS = 200


class Entry(NamedTuple):
    """One tensor's part of the header: half-open ranges of the data, and how to read them.

    Attributes:
        name: The tensor's.
        dtype: Of its values, as safetensors calls it.
        shape: The whole tensor's.
        changed_count: Changes.
        indices: Where the flat differences lie, or those of the rows.
        columns: Where those of the columns lie; empty in v2.
        values: Where the new bits lie.
        index_type: How the flat differences are stored, or those of the rows.
        column_type: How those of the columns are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    changed_count: int
    indices: tuple[int, int]
    columns: tuple[int, int]
    values: tuple[int, int]
    index_type: str
    column_type: str


class Part(NamedTuple):
    """One tensor to be written.

    Attributes:
        name: The tensor's.
        dtype: Of its values, as grail calls it.
        shape: The whole tensor's.
        changed_count: Changes.
        index_type: How the flat differences are stored, or those of the rows.
        column_type: How those of the columns are.
        index_bytes: Bytes of the first array.
        column_bytes: Bytes of the second; 0 in v2.
        value_bytes: Bytes of the new values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    changed_count: int
    index_type: str
    column_type: str
    index_bytes: int
    column_bytes: int
    value_bytes: int

    @classmethod
    def of(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        arrays: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]],
    ) -> Part:
        """The part of a tensor whose index, columns and values are these arrays."""
        index, columns, values = arrays
        return cls(
            name,
            dtype,
            shape,
            values.size,
            index.dtype.name,
            columns.dtype.name,
            index.nbytes,
            columns.nbytes,
            values.nbytes,
        )


class Header(NamedTuple):
    """A parsed header: which layout, its tensors in the order of their bytes, and their bytes."""

    layout: str
    entries: Mapping[str, Entry]
    data_bytes: int


def row_length(shape: Sequence[int]) -> int:
    """Elements in one row: an entry of the first axis."""
    length = 1
    for extent in shape[1:]:
        length *= extent
    return max(length, 1)


def split_positions(
    positions: Positions, shape: Sequence[int], layout: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Rising positions as differences: of flat positions and nothing, or of rows and of columns.

    Raises:
        Unsupported: One does not fit grail's 32 bits.
    """
    if layout == "v2":
        _check_index(positions, "position")
        return np.diff(positions, prepend=0).astype("<i4"), np.empty(0, "<i4")
    rows, columns = np.divmod(positions, row_length(shape))
    _check_index(rows, "row")
    _check_index(columns, "column")
    row_steps = np.diff(rows, prepend=0)
    column_steps = np.diff(columns, prepend=0)
    starts = row_steps != 0
    column_steps[starts] = columns[starts]
    if layout == "v3":
        return row_steps.astype("<i4"), column_steps.astype("<i4")
    return _narrowed(row_steps, "u1", "<u2"), _narrowed(column_steps, "<u2")


def join_positions(
    index: Words, columns: Words, shape: Sequence[int], layout: str
) -> Iterator[Positions]:
    """Inverse of :func:`split_positions`, a run at a time.

    Raises:
        ValueError: A difference is negative, or a column lies outside of its row. Whether positions
            rise, and lie inside of the tensor, is for the caller to see.
    """
    length = row_length(shape)
    row = column = np.int64(0)
    for start in range(0, index.size, RUN):
        steps = index[start : start + RUN].astype(np.int64)
        if steps.min() < 0:
            raise ValueError("a difference is negative")
        sums = np.cumsum(steps) + row
        row = sums[-1]
        if layout == "v2":
            yield sums
            continue
        column_steps = columns[start : start + RUN].astype(np.int64)
        if column_steps.min() < 0:
            raise ValueError("a difference is negative")
        in_rows = _sum_in_rows(column_steps, steps, column)
        column = in_rows[-1]
        if in_rows.max() >= length:
            raise ValueError("a column lies outside of its row")
        # A row that no tensor has would overflow the product.
        yield np.minimum(sums, MAX_INDEX) * length + in_rows


def pack_header(layout: str, parts: Sequence[Part]) -> bytes:
    """Everything before the data: that of each part in order, one array after the other."""
    entries = []
    offset = 0
    for part in parts:
        values_offset = offset + part.index_bytes + part.column_bytes
        entry: dict[str, Any] = {
            "name": part.name,
            "shape": list(part.shape),
            "num_nonzero": part.changed_count,
            "value_dtype": part.dtype,
        }
        if layout == "v3.1":
            entry |= {"row_dtype": part.index_type, "col_dtype": part.column_type}
        entry |= {"indices_offset": offset, "indices_size": values_offset - offset}
        if layout != "v2":
            entry |= {"rows_size": part.index_bytes, "cols_size": part.column_bytes}
        entry |= {"values_offset": values_offset, "values_size": part.value_bytes}
        entries.append(entry)
        offset = values_offset + part.value_bytes
    text = json.dumps({"version": LAYOUTS[layout], "tensors": entries}, separators=(",", ":"))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text.encode()


def parse_header(text: bytes, file: object) -> Header:
    """Check a header, all of it; ``file`` is its name for messages.

    Raises:
        FormatError: ``Corrupt``, ``Unsupported`` or ``LimitExceeded``: the message names the
            tensor.
    """
    try:
        fields = parse_object(text)
    except ValueError as error:
        raise _fault(file, f"the header is not JSON: {str(error)[:_SHOWN_CHARS]}") from None
    layout = next((name for name, no in LAYOUTS.items() if no == fields.get("version")), None)
    if layout is None or isinstance(fields["version"], bool):
        version = str(fields.get("version"))[:40]
        raise _fault(file, f"the layout version {version} is not known", error=Unsupported)
    rows = fields.get("tensors")
    if not isinstance(rows, list):
        raise _fault(file, "the header has no list of tensors")
    check_count(SYSTEM, "tensors", len(rows), MAX_TENSORS, file)
    entries: dict[str, Entry] = {}
    for row in rows:
        entry = _parse_entry(row, layout, file)
        if entry.name in entries:
            raise _fault(file, "it comes twice", entry.name)
        entries[entry.name] = entry
    spans = sorted(
        (span, entry.name)
        for entry in entries.values()
        for span in (entry.indices, entry.columns, entry.values)
    )
    stop = 0
    for span, name in spans:
        if span[0] != stop:
            kind = "overlaps what" if span[0] < stop else "leaves a hole after what"
            raise _fault(file, f"it {kind} lies before it", name)
        stop = span[1]
    return Header(layout, entries, stop)


def array_at(data: ByteArray, span: tuple[int, int], kind: str) -> npt.NDArray[Any]:
    """A section of the data as an array; no copy is made."""
    section = data[span[0] : span[1]]
    return section.view(kind) if section.size else np.empty(0, kind)


def _parse_entry(row: Any, layout: str, file: object) -> Entry:
    name = row.get("name") if isinstance(row, dict) else None
    if not isinstance(name, str) or not _is_text(name):
        raise _fault(file, "a tensor of the header has no name")
    dtype = DTYPES.get(row["value_dtype"]) if isinstance(row.get("value_dtype"), str) else None
    if dtype is None:
        said = str(row.get("value_dtype"))[:40]
        raise _fault(file, f"values of {said} are not known", name, error=Unsupported)
    shape = row.get("shape")
    if not isinstance(shape, list) or not all(_is_size(extent) for extent in shape):
        raise _fault(file, "its shape is malformed", name)
    try:
        tensor_bytes = byte_count(dtype, shape)
    except FormatError as error:
        raise _fault(file, error.message, name, error=type(error)) from None
    changed_count = _size(row, "num_nonzero", file, name)
    word_bytes = dtype_named(dtype).word_bytes
    if changed_count * word_bytes > tensor_bytes:
        raise _fault(file, f"{changed_count} changes in a tensor of shape {shape[:8]}", name)
    index_type = column_type = "<i4"
    if layout == "v3.1":
        index_type = _index_type(row, "row_dtype", file, name)
        column_type = _index_type(row, "col_dtype", file, name)
    start = _size(row, "indices_offset", file, name)
    stop = start + _size(row, "indices_size", file, name)
    middle = stop if layout == "v2" else start + _size(row, "rows_size", file, name)
    if layout != "v2" and middle + _size(row, "cols_size", file, name) != stop:
        raise _fault(file, "its rows_size and cols_size are not its indices_size", name)
    values_start = _size(row, "values_offset", file, name)
    values_stop = values_start + _size(row, "values_size", file, name)
    wanted = [
        ("indices" if layout == "v2" else "rows", middle - start, np.dtype(index_type).itemsize),
        ("columns", stop - middle, 0 if layout == "v2" else np.dtype(column_type).itemsize),
        ("values", values_stop - values_start, word_bytes),
    ]
    for what, size_bytes, item_bytes in wanted:
        if size_bytes != changed_count * item_bytes:
            raise _fault(file, f"{size_bytes} bytes of {what} for {changed_count} changes", name)
    return Entry(
        name,
        dtype,
        tuple(shape),
        changed_count,
        (start, middle),
        (middle, stop),
        (values_start, values_stop),
        index_type,
        column_type,
    )


def _index_type(row: Mapping[str, Any], key: str, file: object, name: str) -> str:
    said = row.get(key, "int32")
    kind = _INDEX_TYPES.get(said) if isinstance(said, str) else None
    if kind is None:
        raise _fault(file, f"its {key} {str(said)[:40]} is not known", name, error=Unsupported)
    return kind


def _size(row: Mapping[str, Any], key: str, file: object, name: str) -> int:
    value = row.get(key)
    if not _is_size(value):
        raise _fault(file, f"its {key} is malformed", name)
    assert isinstance(value, int)
    return value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sum_in_rows(steps: Positions, row_steps: Positions, before: np.int64) -> Positions:
    """Sums of column differences, each row's from its first change on."""
    running = np.cumsum(steps)
    # The running sum crosses rows; subtract from each row what had summed up before it.
    starts = np.flatnonzero(row_steps)
    skipped = np.empty(starts.size + 1, np.int64)
    skipped[0] = -before
    skipped[1:] = running[starts] - steps[starts]
    lengths = np.diff(starts, prepend=0, append=running.size)
    return running - np.repeat(skipped, lengths)


def _narrowed(steps: Positions, *narrow: str) -> npt.NDArray[Any]:
    """The steps in the first of these types that holds them all, else in 32 bits with a sign."""
    largest = int(steps.max(initial=0))
    return steps.astype(next((kind for kind in narrow if largest <= np.iinfo(kind).max), "<i4"))


def _check_index(positions: Positions, what: str) -> None:
    if positions.size and int(positions.max()) > MAX_INDEX:
        raise Unsupported(
            f"a {what} of {int(positions.max())} is beyond {MAX_INDEX}, the last that {SYSTEM} has",
            hint="Write full weights for this version, or another format",
        )


def _fault(file: object, rule: str, name: str | None = None, **kind: Any) -> FormatError:
    return rule_broken(SYSTEM, rule, file=file, tensor=name, **kind)
