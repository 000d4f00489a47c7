"""Errors as the user sees them: a message, a hint, an exit code per family, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import typer

from thinwire.cli.output import print_json, print_json_line, printable
from thinwire.errors import InvalidArgument, ThinwireError

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
# Typer brings its own click, or uses an installed one: so it names the class of usage errors.
_USAGE_ERROR = typer.BadParameter.__mro__[1]


@contextmanager
def reported(as_json: bool, *, is_lines: bool = False) -> Iterator[None]:
    """Turn an error of thinwire's own met inside into its exit code, having said what it is.

    With ``is_lines`` JSON is one object a line.

    Caught here and not above the argument parser: ``Truncated`` is an ``EOFError``, which a parser
    takes for a terminal that was closed.
    """
    try:
        yield
    except ThinwireError as error:
        print(f"error: {printable(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {printable(error.hint)}", file=sys.stderr)
        if as_json:
            facts = {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "context": error.context,
            }
            (print_json_line if is_lines else print_json)({"error": facts})
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error


@contextmanager
def usage_reported(arguments: Sequence[str]) -> Iterator[None]:
    """Print a usage error of the parser as JSON, if that was asked for; the parser says the rest.

    Args:
        arguments: What the parser was given: it may have failed before it came to ``--json``.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, _USAGE_ERROR) and _wants_json(arguments):
            facts = {
                "code": InvalidArgument.code,
                "message": error.format_message(),  # type: ignore[attr-defined]
                "hint": "See `thinwire --help` and `thinwire COMMAND --help`",
                "context": {},
            }
            print_json_line({"error": facts})
        raise


def _wants_json(arguments: Sequence[str]) -> bool:
    given = list(arguments)
    options = given[: given.index("--")] if "--" in given else given
    if options[:1] == ["bench"]:
        # There it names a file, or stdout.
        return "--json=-" in options or ("--json", "-") in pairwise(options)
    return "--json" in options
