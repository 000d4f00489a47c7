"""One target, one process: under atheris where it is installed, else in the plain loop.

python -m fuzz.engine TARGET --seconds N --seed S --keep FOLDER
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import traceback
from pathlib import Path
from random import Random
from types import FunctionType

ATHERIS_MISSING = "atheris is not installed: plain random mutation loop, without coverage"
# The worst a sound input costs is some milliseconds; what takes this long is a finding.
HANG_SECONDS = 30


def run_plain(name: str, seconds: float, seed: int, keep: Path) -> int:
    """The plain loop; returns the exit code."""
    from fuzz.loop import replay, run_random, seconds_left
    from fuzz.targets import TARGETS

    print(f"{name}: {ATHERIS_MISSING}")
    target = TARGETS[name]
    try:
        replayed = replay(target)
        iterations = run_random(target, seed, seconds_left(seconds), keep)
    except Exception:
        traceback.print_exc()
        print(f"{name}: FINDING, seed {seed}")
        return 1
    print(f"{name}: {replayed} files replayed, {iterations} iterations, seed {seed}, no finding")
    return 0


def run_atheris(name: str, seconds: float, seed: int, keep: Path) -> int:
    """Coverage-guided; libFuzzer ends the process itself, with its own exit code."""
    import atheris

    from fuzz.loop import replay
    from fuzz.target import CORPUS, MAX_INPUT_BYTES, run_bounded
    from fuzz.targets import TARGETS

    # Not instrument_imports: it does not get through the loader of an editable install.
    functions = [f for f in gc.get_objects() if isinstance(f, FunctionType)]
    for function in functions:
        if (function.__module__ or "").partition(".")[0] == "thinwire":
            atheris.instrument_func(function)

    target = TARGETS[name]
    print(f"{name}: {replay(target)} files replayed", flush=True)

    def mutate(data: bytes, max_size: int, mutation_seed: int) -> bytes:
        random = Random(mutation_seed)
        if random.random() < 0.1:
            return bytes(atheris.Mutate(data, max_size))
        changed = target.mutate(bytes(data), random)
        return changed if len(changed) <= max_size else bytes(data)

    found = keep / name
    found.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-seed={seed}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={HANG_SECONDS}",
        f"-artifact_prefix={keep}/{name}-",
        "-rss_limit_mb=0",  # bounded input by input: atheris itself keeps some memory of each run
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    argv = [sys.argv[0], *options, str(found), str(CORPUS / name)]
    atheris.Setup(argv, lambda data: run_bounded(target, data), custom_mutator=mutate)
    atheris.Fuzz()
    return 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, required=True)
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    run = run_atheris if importlib.util.find_spec("atheris") else run_plain
    return run(options.target, options.seconds, options.seed, options.keep)


if __name__ == "__main__":
    sys.exit(main())
