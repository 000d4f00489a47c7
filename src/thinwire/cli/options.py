"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.logs import LogLevel
from thinwire.codec.threads import MAX_DEFAULT_WORKERS, default_workers
from thinwire.errors import InvalidArgument

SIGNING_KEY_VARIABLE = "THINWIRE_SIGNING_KEY"

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
JsonLines = Annotated[
    bool,
    typer.Option("--json", help="Print JSON objects, each on a line of its own, also on an error."),
]

Url = Annotated[
    str,
    typer.Argument(
        help="The stream: file://, s3://, gs://, az://, hf:// or a folder. Credentials come from "
        "the environment."
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="KEY",
        show_default=False,
        help="A public key; refuse what is not signed by one that was given so. Repeatable.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        envvar=SIGNING_KEY_VARIABLE,
        show_default=False,
        help="The file of the private key to sign with, made by `thinwire keygen`.",
    ),
]
ModelCopy = Annotated[
    Path | None,
    typer.Option(
        "--base",
        show_default=False,
        help="Where a copy of the model is, for a stream that begins with one by reference.",
    ),
]
SingleWriter = Annotated[
    bool,
    typer.Option(
        "--single-writer",
        help="Use a store without put-if-absent: only this process ever writes to the stream.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65535,
        show_default=False,
        help="Serve Prometheus metrics on this port of 127.0.0.1; 0: any free one, see the log.",
    ),
]
LogOption = Annotated[
    LogLevel, typer.Option("--log-level", help="From which importance on to log, on stderr.")
]

NewLineages = Annotated[
    bool | None,
    typer.Option(
        "--accept-new-lineages/--refuse-new-lineages",
        show_default=False,
        help="Whether to go along when the trainer restarts from older weights; default: as the "
        "stream's policy says.",
    ),
]
BlockCacheFolder = Annotated[
    Path | None,
    typer.Option(show_default=False, help="A folder of fetched blocks that followers here share."),
]
Poll = Annotated[
    float,
    typer.Option(min=0.01, max=3600, help="The shortest time between two looks, in seconds."),
]

FormatOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        show_default=False,
        help="What the format's writer is asked for, such as encoding=overwrite. Repeatable; see "
        "docs/interop.md.",
    ),
]

_UNITS = {
    "B": 1,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX = 1 << 62


def parse_size(text: str) -> int:
    """Bytes, such as ``1000``, ``256MiB`` or ``1.5GB``."""
    return _parse(text, {**_UNITS, "": 1}, "a size; write for example 1000, 256MiB or 2GB")


def parse_duration(text: str) -> int:
    """Seconds, such as ``90``, ``15m``, ``36h`` or ``7d``."""
    return _parse(text, {**_SECONDS, "": 1}, "a time; write for example 90, 15m, 36h or 7d")


def _parse(text: str, units: dict[str, int], what: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if (
        found is None
        or found[2] not in units
        or (value := float(found[1]) * units[found[2]]) > _MAX
    ):
        raise typer.BadParameter(f"{text!r} is not {what}")
    return int(value)


MemoryLimit = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        show_default=False,
        help="What fetching may hold in memory; default: 256MiB.",
    ),
]


def parse_options(given: list[str] | None) -> dict[str, str]:
    """``NAME=VALUE`` pairs by name.

    Raises:
        InvalidArgument: One is no such pair, or a name comes twice.
    """
    options: dict[str, str] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not name or not equals or name in options:
            raise InvalidArgument(
                f"the option {pair[:80]!r} is not NAME=VALUE, or comes twice",
                hint="Write for example --option encoding=overwrite",
            )
        options[name] = value
    return options


def worker_count(asked: int | None) -> int:
    """The threads to use."""
    return default_workers() if asked is None else asked
