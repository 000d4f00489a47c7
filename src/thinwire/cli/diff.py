"""``thinwire diff``: two checkpoints in, a delta file out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Base, Json, Workers, worker_count
from thinwire.cli.output import percent, print_json, printable
from thinwire.cli.progress import byte_progress


def diff(
    base: Base,
    new: Annotated[Path, typer.Argument(help="The checkpoint after.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The delta file to write (.tw).")],
    workers: Workers = None,
    zstd_level: Annotated[
        int, typer.Option(min=1, max=19, help="For what class coding does not suit.")
    ] = 3,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    ignore_subfolders: Annotated[
        bool,
        typer.Option("--ignore-subfolders", help="Leave out folders inside BASE and NEW."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the delta that turns BASE into NEW, bit for bit.

    Tensors that were added or changed shape or dtype travel whole; config, tokenizer and other
    small files travel where they differ. OUT appears complete or not at all.
    """
    with reported(as_json):
        from thinwire.checkpoint import Checkpoint, diff_checkpoint
        from thinwire.codec.chunk import Spec

        start_s = time.perf_counter()
        tensors = Checkpoint.open(new, ignore_subfolders=ignore_subfolders).tensors.values()
        with byte_progress("diff", sum(tensor.data.size for tensor in tensors)) as on_bytes:
            summary = diff_checkpoint(
                base,
                new,
                out,
                workers=worker_count(workers),
                spec=Spec(zstd_level=zstd_level),
                overwrite=overwrite,
                ignore_subfolders=ignore_subfolders,
                on_bytes=on_bytes,
            )
        wall_s = time.perf_counter() - start_s
        if as_json:
            print_json(
                {
                    "base": str(base),
                    "new": str(new),
                    "delta": str(out),
                    "file_bytes": summary.file_bytes,
                    "raw_bytes": summary.raw_bytes,
                    "changed_count": summary.changed_count,
                    "tensor_count": summary.tensor_count,
                    "wall_s": round(wall_s, 6),
                }
            )
            return
        print(
            f"{printable(str(out))}: {summary.file_bytes:,} bytes, "
            f"{percent(summary.file_bytes, summary.raw_bytes)} % of {summary.raw_bytes:,} raw; "
            f"{summary.changed_count:,} weights changed in {summary.tensor_count} tensors; "
            f"{wall_s:.2f} s"
        )
