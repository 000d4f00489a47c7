"""What ``thinwire inspect`` shows of other systems' deltas and chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.cli.output import NONE, percent, print_json, print_table, printable
from thinwire.codec.dtypes import byte_count
from thinwire.errors import InvalidArgument
from thinwire.interop.foreign import ChainVersion, ForeignDelta, ForeignTensor
from thinwire.interop.formats import Format
from thinwire.stream import keys


def refuse_unknown_folder(path: Path) -> None:
    """Say what a folder is, or may be, that is neither a delta nor a chain of a known format.

    Raises:
        InvalidArgument: It is a folder.
    """
    if not path.is_dir():
        return
    known = "Give one delta, or the folder that holds a chain's versions"
    if (path / keys.STREAM).is_file():
        known = "It is a stream: see `thinwire log`; `thinwire convert` and `mirror` read it whole"
    elif any(path.glob("*.safetensors")):
        known = "It looks like a checkpoint, or a version that is not whole: a delta is needed"
    raise InvalidArgument(
        f"{path} holds no delta and no chain of a known format", hint=known, path=str(path)
    )


def show_delta(path: Path, delta: ForeignDelta, top: int | None, as_json: bool) -> None:
    """Print what one delta holds; ``top`` tensors if not all."""
    facts = delta.facts
    if as_json:
        print_json(
            {
                "delta": str(path),
                "format": facts.format,
                "encoding": facts.encoding,
                "version": facts.version,
                "base_version": facts.base_version,
                "file_bytes": facts.file_bytes,
                "metadata": dict(facts.metadata),
                "tensors": [
                    {"name": name, **row._asdict(), "shape": row.shape and list(row.shape)}
                    for name, row in delta.tensors.items()
                ],
                "attachments": sorted(delta.files),
            }
        )
        return
    made = "" if facts.version is None else f", makes version {facts.version}"
    if facts.base_version is not None:
        made += f" from {facts.base_version}"
    print(
        f"{printable(str(path))}: {facts.format} ({printable(facts.encoding)}), "
        f"{facts.file_bytes:,} bytes, {len(delta.tensors)} tensors{made}\n"
    )
    rows = sorted(delta.tensors.items(), key=lambda row: -row[1].payload_bytes)
    shown = list(delta.tensors.items()) if top is None else rows[:top]
    print_table(
        ["tensor", "dtype", "shape", "checksum", "changed", "bytes", "% of raw"],
        [_row(name, tensor) for name, tensor in shown],
        left=4,
    )
    for title, values in (("Its files say", facts.metadata), ("Other files", _named(delta.files))):
        if values:
            print(f"\n{title}:")
            for name, value in values.items():
                print(f"  {printable(name)}{': ' if value else ''}{printable(value[:200])}")


def show_chain(path: Path, format: Format, versions: Sequence[ChainVersion], as_json: bool) -> None:
    """Print which versions a chain has."""
    if as_json:
        print_json(
            {
                "chain": str(path),
                "format": format.name,
                "versions": [
                    {
                        "version": row.version,
                        "base_version": row.base_version,
                        "kind": "full" if row.is_full else "delta",
                        "name": row.name,
                    }
                    for row in versions
                ],
            }
        )
        return
    print(f"{printable(str(path))}: {len(versions)} versions of {format.system}\n")
    print_table(
        ["version", "made from", "name"],
        [
            [str(row.version), "full weights" if row.is_full else str(row.base_version), row.name]
            for row in versions
        ],
        left=3,
    )


def _row(name: str, tensor: ForeignTensor) -> list[str]:
    raw_bytes = 0
    if tensor.dtype is not None and tensor.shape is not None:
        raw_bytes = byte_count(tensor.dtype, tensor.shape)
    return [
        name,
        tensor.dtype or NONE,
        NONE if tensor.shape is None else "x".join(map(str, tensor.shape)) or "1",
        tensor.checksum or NONE,
        NONE if tensor.changed_count is None else f"{tensor.changed_count:,}",
        f"{tensor.payload_bytes:,}",
        percent(tensor.payload_bytes, raw_bytes),
    ]


def _named(files: Mapping[str, Any]) -> dict[str, str]:
    return dict.fromkeys(sorted(files), "")
