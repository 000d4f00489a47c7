"""A command of the caller's, run after each version."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from thinwire.stream.version import Version

_STDERR = 2


def check_command(command: str | None) -> None:
    """Refuse a command that cannot be run before anything is fetched for it.

    Raises:
        InvalidArgument: It is none.
        NotFound: It is not there: its file system may be mounted later.
    """
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidArgument(f"--exec {command[:200]!r} is no command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise (NotFound if words else InvalidArgument)(
            f"--exec {command[:200]!r} cannot be run: there is no such program",
            hint="Give a program's path, or one on the PATH; for more, --exec 'sh -c \"...\"'",
        )


def run_after(command: str | None, folder: Path, held: Version, logger: Any) -> None:
    """Run the caller's command while the folder rests; that it fails is told, and goes by."""
    if command is None:
        return
    facts = {
        "THINWIRE_VERSION": str(held.version),
        "THINWIRE_STEP": "" if held.step is None else str(held.step),
        "THINWIRE_FOLDER": str(folder.absolute()),
    }
    try:
        # Its output must not mix with ours, which may be read by a program.
        done = subprocess.run(
            shlex.split(command), env=os.environ | facts, stdout=_STDERR, check=False
        )
    except OSError as error:
        # It was there at the start: its file system may be back for the next version.
        logger.warning("exec failed", version=held.version, error=str(error))
        return
    if done.returncode:
        logger.warning("exec failed", version=held.version, code=done.returncode)
