"""The command line as a whole. What a command needs is imported when it runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from thinwire import __version__
from thinwire.cli.apply import apply
from thinwire.cli.attach import attach
from thinwire.cli.bench import bench
from thinwire.cli.cat import cat
from thinwire.cli.convert import convert
from thinwire.cli.diff import diff
from thinwire.cli.failures import INTERRUPTED, usage_reported
from thinwire.cli.follow import follow
from thinwire.cli.fsck import fsck
from thinwire.cli.hub import hub
from thinwire.cli.inspect import inspect
from thinwire.cli.keygen import keygen
from thinwire.cli.log import log
from thinwire.cli.maintain import maintain
from thinwire.cli.mirror import mirror
from thinwire.cli.plan import plan
from thinwire.cli.policy import policy
from thinwire.cli.publish import publish
from thinwire.cli.relay import relay
from thinwire.cli.serve import serve
from thinwire.cli.verify import verify


class _Commands(TyperGroup):
    """Prints usage errors as JSON, too, where that is asked for."""

    _given: Sequence[str] = ()

    def main(self, args: Any = None, *rest: Any, **extra: Any) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        return super().main(args, *rest, **extra)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with usage_reported(self._given):
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with usage_reported(self._given):
            return super().invoke(ctx)


app = typer.Typer(
    name="thinwire",
    cls=_Commands,
    help="Bit-exact deltas between checkpoints: made, applied, inspected, verified, measured; and "
    "streams of them: published, followed, looked after.",
    epilog="Exit codes: 2 wrong arguments, 3 malformed files, 4 the delta does not fit the base, "
    "5 files or objects cannot be read or written, 6 the stream does not allow it or is not whole, "
    "7 an engine did not do what was asked, 130 interrupted.",
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
for stream_command in (publish, follow, log, cat, maintain, policy, fsck, keygen):
    app.command(rich_help_panel="Streams")(stream_command)
for interop_command in (convert, mirror):
    app.command(rich_help_panel="Other systems' formats")(interop_command)
for region_command in (hub, relay, plan):
    app.command(rich_help_panel="Regions")(region_command)
for engine_command in (attach, serve):
    app.command(rich_help_panel="Engines")(engine_command)


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
