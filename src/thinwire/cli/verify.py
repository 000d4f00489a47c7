"""``thinwire verify``: is a delta sound, and does it fit a base?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import DeltaFile, Json, Workers, worker_count
from thinwire.cli.output import print_json, printable
from thinwire.cli.progress import byte_progress


def verify(
    delta: DeltaFile,
    base: Annotated[
        Path | None,
        typer.Option(show_default=False, help="Also rebuild every tensor from this checkpoint."),
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Check DELTA against its digests; nothing is written.

    With --base, every new tensor is rebuilt in memory, chunk by chunk, and compared with its
    digest, and so are the files that the base must have.
    """
    with reported(as_json):
        from thinwire.checkpoint import verify_base
        from thinwire.codec.api import inspect

        found = inspect(delta)
        rebuilt = [entry for entry in found.tensors if entry.kind != "removed"]
        if base is not None:
            count = worker_count(workers)
            with byte_progress("verify", sum(entry.byte_count for entry in rebuilt)) as on_bytes:
                verify_base(base, delta, workers=count, on_bytes=on_bytes)
        rebuilt_count = 0 if base is None else len(rebuilt)
        if as_json:
            print_json(
                {
                    "delta": str(delta),
                    "base": None if base is None else str(base),
                    "is_sound": True,
                    "fits_base": None if base is None else True,
                    "file_bytes": found.file_bytes,
                    "tensor_count": len(found.tensors),
                    "rebuilt_tensor_count": rebuilt_count,
                }
            )
            return
        print(f"{printable(str(delta))}: {found.file_bytes:,} bytes are what their digests say")
        if base is not None:
            print(
                f"{printable(str(base))}: {rebuilt_count} of {len(found.tensors)} tensors rebuilt "
                "and equal to their digests"
            )
