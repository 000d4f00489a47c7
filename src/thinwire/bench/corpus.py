"""Where consecutive checkpoints lie: ``<corpus>/<run>/<step>/model.safetensors``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.errors import InvalidArgument, NotFound

WEIGHTS_NAME = "model.safetensors"
DEFAULT_CORPUS = Path(".bench/corpus")
# From the root of a checkout: the project's runs beside it, and the program that makes a corpus.
PROJECT_CORPUS = Path("../shared/corpus")
MAKER = Path("benchmarks/corpus/make_corpus.py")
# The checkout that this file belongs to if the install is editable; else a folder without either.
CHECKOUT = Path(__file__).resolve().parents[3]
_STDERR = 2
# An optimizer's moments settle in about so many steps; until then less changes than ever after.
SETTLING_STEPS = 8
# A run of so few steps is measured whole.
SHORT_RUN_STEPS = 9


def find_runs(corpus: Path) -> dict[str, list[Path]]:
    """The checkpoint folders of each run, runs by name and steps by number.

    Raises:
        NotFound: ``corpus`` is no folder.
        InvalidArgument: It holds no run of at least two steps.
    """
    if not corpus.is_dir():
        raise NotFound(f"{corpus} is not a folder", hint="Check the path", path=str(corpus))
    runs = {run.name: _steps(run) for run in sorted(corpus.iterdir()) if run.is_dir()}
    found = {name: steps for name, steps in runs.items() if len(steps) > 1}
    if not found:
        raise InvalidArgument(
            f"{corpus} holds no run of two or more steps",
            hint=f"A corpus is <run>/<step>/{WEIGHTS_NAME}, the steps being numbers",
            path=str(corpus),
        )
    return found


def default_corpus(announce: Callable[[str], None]) -> Path:
    """A corpus to measure when none was named: found, else made.

    The first of: ``.bench/corpus``; the project's runs beside the checkout; what the checkout's
    ``make_corpus.py`` writes into ``.bench/corpus``. The checkout is the current folder or that of
    an editable install. ``announce`` is given the command before it runs; what it prints goes to
    stderr.

    Raises:
        InvalidArgument: Nothing was found, and nothing could be made; the hint is the command.
    """
    if DEFAULT_CORPUS.is_dir():
        return DEFAULT_CORPUS
    checkout = next((c for c in (Path(), CHECKOUT) if (c / MAKER).is_file()), None)
    if checkout and any((checkout / PROJECT_CORPUS).glob(f"*/*/{WEIGHTS_NAME}")):
        return checkout / PROJECT_CORPUS
    # Not `python` where it can run: that may be another one, without torch.
    program = [sys.executable, str(checkout / MAKER)] if checkout else ["python", str(MAKER)]
    command = [*program, "--out", str(DEFAULT_CORPUS)]
    # The bytes of a run depend on the number of threads.
    shown = f"OMP_NUM_THREADS=1 {shlex.join(command)}"
    if checkout is None:
        raise InvalidArgument(
            f"bench was given no checkpoints, and there is no {DEFAULT_CORPUS} here",
            hint=f"Make a corpus in a checkout of thinwire (needs torch): {shown}",
        )
    announce(shown)
    try:
        subprocess.run(
            command, check=True, stdout=_STDERR, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    except BaseException as error:
        # A run cut short would pass for a corpus the next time.
        shutil.rmtree(DEFAULT_CORPUS, ignore_errors=True)
        if not isinstance(error, subprocess.CalledProcessError | OSError):
            raise
        raise InvalidArgument(
            f"no corpus could be made: {error}", hint=f"See above; it needs torch: {shown}"
        ) from error
    return DEFAULT_CORPUS


def steady_steps(steps: Sequence[Path]) -> list[Path]:
    """The checkpoints to measure: from step 8 on, all of them where the run is short."""
    if len(steps) - 1 <= SHORT_RUN_STEPS:
        return list(steps)
    return [step for step in steps if int(step.name) >= SETTLING_STEPS]


def _steps(run: Path) -> list[Path]:
    steps = [
        step
        for step in run.iterdir()
        if step.name.isascii() and step.name.isdigit() and (step / WEIGHTS_NAME).is_file()
    ]
    return sorted(steps, key=lambda step: int(step.name))
