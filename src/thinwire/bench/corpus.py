"""Where consecutive checkpoints lie: ``<corpus>/<run>/<step>/model.safetensors``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import InvalidArgument, NotFound

WEIGHTS_NAME = "model.safetensors"
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
