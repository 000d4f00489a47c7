"""A plain random mutation loop: what remains where atheris cannot be installed, and for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz.target import MAX_INPUT_BYTES, Target, run_bounded
from thinwire.codec.digest import xxh3_64

# Mutations build on each other this often, since without coverage nobody says which one is new.
STACKED = 3


def replay(target: Target) -> int:
    """Run the whole corpus of a target; returns how many inputs."""
    for path in (paths := target.corpus()):
        run_bounded(target, path.read_bytes())
    return len(paths)


def run_random(target: Target, seed: int, go_on: Callable[[int], bool], keep: Path) -> int:
    """Mutate and run while ``go_on(iteration)``; returns the iterations.

    An input that raises is kept as a file in ``keep`` before the exception goes on.
    """
    inputs = [path.read_bytes() for path in target.corpus()]
    iteration = 0
    while go_on(iteration):
        random = Random(f"{seed}:{target.name}:{iteration}")
        data = random.choice(inputs)
        for _ in range(random.randint(1, STACKED)):
            data = target.mutate(data, random)[:MAX_INPUT_BYTES]
        try:
            run_bounded(target, data)
        except Exception as error:
            error.add_note(f"input kept as {keep_input(target, data, keep)}")
            raise
        iteration += 1
    return iteration


def keep_input(target: Target, data: bytes, keep: Path) -> Path:
    """Write an input to a file named by its content."""
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{target.name}-{xxh3_64(data):016x}"
    path.write_bytes(data)
    return path


def seconds_left(seconds: float) -> Callable[[int], bool]:
    """A condition that holds for so long from now on."""
    end = time.monotonic() + seconds
    return lambda _: time.monotonic() < end
