"""Fuzzes everything that reads bytes from elsewhere; ends with a non-zero exit code on a finding.

    python fuzz/run.py --seconds 600 [--target native] [--seed 7]

Targets: `native` (the kernels under AddressSanitizer and UBSan, built into build/fuzz), and in
Python, under atheris where it is installed, `container`, `safetensors`, `weight_index`, `redo_log`,
`manifest`, `places` and `index_map`; likewise other systems' deltas: `arc_v1`, `arc_v2`, `arc_v3`,
`slime`, `skyrl`, `trl`, `grail`, `nemo` and `pickles`. They run one after another and share the
time. Inputs that fail are kept in .fuzz/; make them small and put them into fuzz/corpus/, which the
tests replay.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "fuzz"
KEEP = ROOT / ".fuzz"
# Parts of the time: the kernels write memory, the container is the way in.
SHARES = {"native": 8, "container": 6, "safetensors": 2, "weight_index": 2, "redo_log": 2}
SHARES |= {"manifest": 2, "places": 2, "index_map": 2}
# Other systems' deltas; arc_v3 has the most in it.
SHARES |= {"arc_v1": 1, "arc_v2": 1, "arc_v3": 2, "slime": 1, "skyrl": 1, "trl": 1, "grail": 1}
SHARES |= {"nemo": 1, "pickles": 1}

# Some memory of every run stays with atheris; a new process gives it back.
SLICE_SECONDS = 120


def build_native() -> Path | None:
    """The harness under the sanitizers, or None where there is nothing to build it with."""
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    if not shutil.which("cmake") or not any(c and shutil.which(c) for c in compilers):
        return None
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DTHINWIRE_SANITIZE=ON"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    build = ["cmake", "--build", str(BUILD), "--target", "fuzz_decode", "--parallel", "2"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    return BUILD / "fuzz_decode"


def run_native(seconds: float, seed: int) -> bool | None:
    """Whether the kernels passed; None: they could not be run."""
    harness = build_native()
    if harness is None:
        print("native: not run: needs cmake and a C++ compiler")
        return None
    KEEP.mkdir(exist_ok=True)
    command = [str(harness), "--seconds", str(seconds), "--seed", str(seed), "--keep", str(KEEP)]
    return subprocess.run([*command, str(ROOT / "fuzz" / "corpus" / "native")]).returncode == 0


def run_python(name: str, seconds: float, seed: int) -> bool:
    """Whether a Python target passed; in processes that go on where the last one stopped."""
    slices = max(1, math.ceil(seconds / SLICE_SECONDS))
    iterations = 0
    for number in range(slices):
        command = [sys.executable, "-m", "fuzz.engine", name, "--seconds", str(seconds / slices)]
        command += ["--seed", str(seed + number), "--keep", str(KEEP)]
        process = subprocess.run(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        if process.returncode:
            print(process.stderr, end="")
            return False
        if runs := re.search(r"number_of_executed_units: (\d+)", process.stderr):
            iterations += int(runs[1])
    if iterations:
        print(f"{name}: {iterations} iterations under atheris, seed {seed}, no finding")
    return True


def main() -> int:
    """Run the targets in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=600, help="time for all targets together")
    parser.add_argument("--target", choices=list(SHARES), help="one target only")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="to repeat")
    options = parser.parse_args()
    names = [options.target] if options.target else list(SHARES)
    parts = sum(SHARES[name] for name in names)
    failed = []
    for name in names:
        seconds = options.seconds * SHARES[name] / parts
        print(f"{name}: {seconds:.0f} s, seed {options.seed}", flush=True)
        if name == "native":
            passed = run_native(seconds, options.seed)
            # Only where nothing else was asked for is a missing compiler a failure.
            if passed is False or (passed is None and options.target):
                failed.append(name)
        elif not run_python(name, seconds, options.seed):
            failed.append(name)
    if failed:
        print(f"FINDING in {', '.join(failed)}: see above; failing inputs are in {KEEP.name}/")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
