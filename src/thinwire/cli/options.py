"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

# More threads than this wait for memory, not for a processor.
MAX_DEFAULT_WORKERS = 8

Base = Annotated[
    Path, typer.Argument(help="The checkpoint before: a safetensors file or a model folder.")
]
DeltaFile = Annotated[Path, typer.Argument(help="The delta file (.tw).")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help=f"Threads; default: one per processor, at most {MAX_DEFAULT_WORKERS}. "
        "The result is the same for any number.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, also on an error.")]


def worker_count(asked: int | None) -> int:
    """The threads to use."""
    if asked is not None:
        return asked
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MAX_DEFAULT_WORKERS, usable or 1)
