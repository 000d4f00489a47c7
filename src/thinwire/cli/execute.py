"""A command of the caller's, run after each version."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from thinwire.stream.version import Version

_STDERR = 2


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
        code = done.returncode
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"--exec {command[:200]!r} cannot be run: {error}", hint="Give a command on the PATH"
        ) from error
    if code:
        logger.warning("exec failed", version=held.version, code=code)
