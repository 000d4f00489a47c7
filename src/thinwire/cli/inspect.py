"""``thinwire inspect``: what a delta holds, read from its index, also another system's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Json
from thinwire.cli.output import print_json
from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thinwire.cli.step_counts import StepCounts
    from thinwire.codec.api import Inspection
    from thinwire.codec.delta import TensorEntry


def inspect(
    delta: Annotated[
        Path,
        typer.Argument(
            help="The delta: a .tw file, or another system's file or version's folder; or a folder "
            "of such versions."
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="The checkpoint that DELTA was made from: adds a histogram of step sizes per "
            "tensor. The file itself keeps one for the whole delta only.",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Show only so many tensors, those with the most bytes; default: all. JSON is "
            "always whole.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what DELTA holds: tensors, sizes, step sizes, other files, rate tables.

    Small tensors share a group of one section, whose bytes stand in a line of the group. Changes
    are counted in words: elements, except that complex numbers have two and packed types share one.
    Of the deltas of other systems it shows what their files say.
    """
    with reported(as_json):
        if _show_foreign(delta, base, top, as_json):
            return
        from thinwire.cli.inspect_tables import print_inspection
        from thinwire.codec.api import inspect as inspect_delta

        found = inspect_delta(delta)
        steps = None if base is None else _steps_by_tensor(delta, base)
        if as_json:
            print_json(_as_json(delta, found, steps))
        else:
            print_inspection(delta, found, steps, top)


def _show_foreign(path: Path, base: Path | None, top: int | None, as_json: bool) -> bool:
    """Show another system's delta or chain; False: it is none."""
    from thinwire.cli.inspect_foreign import refuse_unknown_folder, show_chain, show_delta
    from thinwire.interop.formats import chain_of, format_of

    format = format_of(path)
    chain = chain_of(path) if format is None and path.is_dir() else None
    if format is None and chain is None:
        refuse_unknown_folder(path)
        return False
    if base is not None:
        raise InvalidArgument(
            "--base is for thinwire's own deltas", hint="`thinwire convert` makes one of it"
        )
    if format is not None:
        with format.open_delta(path) as delta:
            show_delta(path, delta, top, as_json)
    if chain is not None:
        show_chain(path, *chain, as_json)
    return True


def _steps_by_tensor(delta: Path, base: Path) -> dict[str, StepCounts]:
    from thinwire.checkpoint import Checkpoint
    from thinwire.cli.step_counts import count_steps
    from thinwire.codec.delta import Delta

    bases = {name: tensor.data for name, tensor in Checkpoint.open(base).tensors.items()}
    with Delta.open(delta) as opened:
        dtypes = {name: entry.dtype for name, entry in opened.tensors.items()}
        return count_steps(bases, dtypes, opened.changes(bases))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _as_json(
    delta: Path, found: Inspection, steps: Mapping[str, StepCounts] | None
) -> dict[str, Any]:
    from thinwire.cli.inspect_tables import groups_of, index_bytes

    down, up = found.steps
    return {
        "delta": str(delta),
        "format_version": found.version,
        "file_bytes": found.file_bytes,
        "raw_bytes": found.raw_bytes,
        "index_bytes": index_bytes(found),
        "changed_count": found.changed_count,
        "word_count": found.word_count,
        "changed_percent": _ratio(100 * found.changed_count, found.word_count),
        "bits_per_change": _ratio(8 * found.file_bytes, found.changed_count),
        "tensors": [_tensor_json(entry, steps) for entry in found.tensors],
        "groups": [
            {
                "dtype": members[0].dtype if members else None,
                "tensor_count": len(members),
                "changed_count": sum(entry.changed_count for entry in members),
                "payload_bytes": found.group_bytes[number],
            }
            for number, members in enumerate(groups_of(found))
        ],
        "steps": {"down": down, "up": up},
        "attachments": [
            {
                "name": a.name,
                "kind": a.kind,
                "size_bytes": a.size,
                "stored_bytes": a.stored_bytes if a.is_carried else None,
            }
            for a in found.attachments
        ],
        "tables": [
            {
                "dtype": table.dtype,
                "top_field": table.top,
                "rate_codes": table.rate,
                "one_step_codes": table.one,
            }
            for table in found.tables
        ],
    }


def _tensor_json(entry: TensorEntry, steps: Mapping[str, StepCounts] | None) -> dict[str, Any]:
    from thinwire.cli.inspect_tables import word_count

    own_bytes = entry.payload_bytes if entry.group is None else None
    content: dict[str, Any] = {
        "name": entry.name,
        "kind": entry.kind,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "raw_bytes": entry.byte_count,
        "word_count": word_count(entry),
        "changed_count": entry.changed_count,
        "changed_percent": _ratio(100 * entry.changed_count, word_count(entry)),
        "payload_bytes": own_bytes,
        "bits_per_change": _ratio(8 * (own_bytes or 0), entry.changed_count if own_bytes else 0),
        "methods": list(entry.methods),
        "group": entry.group,
        "base_digest": None if entry.base_digest is None else f"{entry.base_digest:016x}",
        "new_digest": None if entry.new_digest is None else f"{entry.new_digest:016x}",
    }
    if steps is not None:
        counts = steps.get(entry.name)
        content["steps"] = {
            "down": [] if counts is None else counts.down,
            "up": [] if counts is None else counts.up,
        }
    return content
