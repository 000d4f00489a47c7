"""The command line as a whole. What a command needs is imported when it runs."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from thinwire import __version__
from thinwire.cli.apply import apply
from thinwire.cli.bench import bench
from thinwire.cli.diff import diff
from thinwire.cli.failures import INTERRUPTED
from thinwire.cli.inspect import inspect
from thinwire.cli.verify import verify

app = typer.Typer(
    name="thinwire",
    help="Bit-exact deltas between checkpoints: made, applied, inspected, verified, measured.",
    epilog="Exit codes: 2 wrong arguments, 3 malformed files, 4 the delta does not fit the base, "
    "5 files cannot be read or written, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    # An exception that is not ours is a bug, and its plain traceback is what a report needs.
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command; the callback of each does its work."""


for command in (diff, apply, inspect, verify, bench):
    app.command()(command)


def main() -> None:
    """Run the command line of this process and exit."""
    for stream in (sys.stdout, sys.stderr):
        # Names of tensors are any Unicode; a terminal of less must not turn them into a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
