"""Errors as the user sees them: a message, a hint, an exit code per family, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from thinwire.cli.output import print_json, printable
from thinwire.errors import ThinwireError

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn an error of thinwire's own met inside into its exit code, having said what it is.

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
            print_json({"error": facts})
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
