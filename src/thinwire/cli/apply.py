"""``thinwire apply``: a checkpoint and a delta in, the new checkpoint out or in place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Base, DeltaFile, Json, Workers, worker_count
from thinwire.cli.output import print_json, printable
from thinwire.cli.progress import byte_progress
from thinwire.errors import InvalidArgument


def apply(
    base: Base,
    delta: DeltaFile,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", show_default=False, help="The checkpoint to make; not there yet."
        ),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Change BASE itself; safe against a crash.")
    ] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Make the checkpoint that DELTA describes from BASE, verified, bit for bit.

    With -o, OUT appears complete or not at all and BASE is only read. With --in-place, a run that
    was interrupted is finished or discarded by the next one.
    """
    with reported(as_json):
        from thinwire.checkpoint import apply_checkpoint, apply_in_place
        from thinwire.codec.api import inspect

        if (out is None) != in_place:
            raise InvalidArgument(
                "apply needs either -o OUT or --in-place" + (", not both" if in_place else ""),
                hint="Say where the new checkpoint goes",
            )
        start_s = time.perf_counter()
        found = inspect(delta)
        count = worker_count(workers)
        with byte_progress("apply", found.raw_bytes) as on_bytes:
            if out is None:
                apply_in_place(base, delta, workers=count, on_bytes=on_bytes)
            else:
                apply_checkpoint(base, delta, out, workers=count, on_bytes=on_bytes)
        wall_s = time.perf_counter() - start_s
        made = base if out is None else out
        if as_json:
            print_json(
                {
                    "base": str(base),
                    "delta": str(delta),
                    "out": str(made),
                    "in_place": in_place,
                    "file_bytes": found.file_bytes,
                    "raw_bytes": found.raw_bytes,
                    "changed_count": found.changed_count,
                    "tensor_count": sum(entry.kind != "removed" for entry in found.tensors),
                    "wall_s": round(wall_s, 6),
                }
            )
            return
        verb = "is now" if in_place else "holds"
        print(
            f"{printable(str(made))} {verb} the new checkpoint: {found.changed_count:,} weights "
            f"changed, {found.raw_bytes:,} bytes verified; {wall_s:.2f} s"
        )
