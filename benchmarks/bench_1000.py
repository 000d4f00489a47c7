"""A GRPO run of 1,000 consecutive optimizer steps, and every delta of it in every format.

    python benchmarks/bench_1000.py [--out .bench/bench-1000] [--json FILE]

Records the run with benchmarks/corpus/make_corpus.py (half an hour of one core, 4.5 GB) unless OUT
holds it, then prints Markdown: the table of `thinwire bench` over all deltas, means of every
hundred steps, and the bytes of the whole run. Progress goes to stderr. Every row is decoded and
compared bit for bit, at every step, before its number counts.

OUT/part is a run in the making, OUT/run a whole one: what was killed while recording begins again
from nothing, what was killed while measuring measures again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire import bench
from thinwire.bench.bound import class_of
from thinwire.bench.report import BOUND_ROW, REFERENCE_ROW
from thinwire.bench.table import markdown_table

CORPUS_FOLDER = Path(__file__).resolve().parent / "corpus"
# All that decides the bytes of the run: what make_corpus.py writes into run.json as "settings".
SETTINGS: dict[str, str | int | float] = {
    "model": "decoder",
    "optimizer": "adamw",
    "learning_rate": 1e-6,
    "beta1": 0.9,
    "beta2": 0.999,
    "steps": 1000,
    "warmup_steps": 5,
    "questions_per_step": 8,
    "group_size": 8,
    "pretrain_steps": 120,
    "seed": 0,
    "threads": 1,
}
# One timed call a step: the medians are over the steps.
REPETITIONS = 1
PROGRESS_EVERY = 20
PERIOD_STEPS = 100
# Octaves of weights, 2^-12 to 2^-11 being -12; what lies outside joins the outermost ones.
OCTAVES = range(-13, -4)
BF16_BIAS, BF16_MANTISSA_BITS = 127, 7


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- recording ---------------------------------------------------------------------------------


def record(out: Path, settings: dict[str, str | int | float]) -> Path:
    """The folder of the whole run, recorded if ``out`` has none."""
    run = out / "run"
    if run.is_dir():
        found = json.loads((run / "run.json").read_text())["settings"]
        if found != settings:
            sys.exit(f"{run} is a run of other settings, {found}: remove it or give another --out")
        say(f"{run} is recorded")
        return run
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        # The maker holds it, too: an orphan must not write into the folder of the one after it.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another process records into {out}")
        part = out / "part"
        if part.exists():
            say(f"{part} was never finished: it goes, recording begins again")
            shutil.rmtree(part)
        make(part, settings, lock.fileno())
        (made,) = part.iterdir()
        made.rename(run)
        part.rmdir()
    return run


def make(part: Path, settings: dict[str, str | int | float], lock: int) -> None:
    """Run the maker, and pass on each twentieth of the lines that it prints a step."""
    command = [sys.executable, str(CORPUS_FOLDER / "make_corpus.py"), "--out", str(part)]
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    start_s, steps = time.monotonic(), settings["steps"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        pass_fds=[lock],
    ) as maker:
        assert maker.stdout is not None
        for line in maker.stdout:
            word, _, rest = line.partition(" ")
            step, _, _ = rest.partition(":")
            if word != "step" or int(step) % PROGRESS_EVERY == 0:
                of_steps = f" of {steps}" if word == "step" else ""
                say(f"recording{of_steps}, {time.monotonic() - start_s:.0f} s: {line.rstrip()}")
    if maker.returncode:
        sys.exit(f"{command[1]} failed, see above")


# -- measuring ---------------------------------------------------------------------------------


def measure(run: Path) -> bench.Report:
    (paths,) = bench.find_runs(run.parent).values()
    peers, skipped = bench.available_peers()
    peers.insert(0, bench.make_our_row())
    start_s, step_count = time.monotonic(), len(paths) - 1

    def on_progress(step: int, row: str) -> None:
        if row == peers[0].name and step % PROGRESS_EVERY == 0:
            say(f"measuring of {step_count}, {time.monotonic() - start_s:.0f} s: step {step + 1}")

    return bench.measure_sequence(
        paths,
        peers,
        load=bench.load_checkpoint,
        repetition_count=REPETITIONS,
        on_progress=on_progress,
        skipped=skipped,
    )


def check_shares(steps: list[dict[str, Any]], report: bench.Report) -> None:
    """The trainer counted the changes when it made them; the bench counted them in the files."""
    if len(steps) != report.step_count:
        sys.exit(f"run.json tells of {len(steps)} steps, {report.step_count} were measured")
    trained = 100 * statistics.fmean(step["changed_share"] for step in steps)
    if abs(trained - report.changed_percent) > 1e-9:
        sys.exit(f"run.json has {trained} % changed, its checkpoints {report.changed_percent} %")


# -- showing -----------------------------------------------------------------------------------


def periods(steps: list[dict[str, Any]], report: bench.Report) -> str:
    """Means of every hundred steps, as a Markdown table: does anything drift?"""
    columns: list[tuple[str, list[float], int]] = [
        ("changed %", [100 * step["changed_share"] for step in steps], 3)
    ]
    columns += [
        (f"{row.name} %", [100 * size / report.raw_bytes for size in row.step_payload_bytes], 4)
        for row in report.rows
        if row.name in (BOUND_ROW, bench.OUR_ROW, REFERENCE_ROW)
    ]
    columns.append(("reward", [step["reward"] for step in steps], 3))
    rows = []
    for first in range(0, len(steps), PERIOD_STEPS):
        last = min(first + PERIOD_STEPS, len(steps))
        means = [
            f"{statistics.fmean(values[first:last]):.{digits}f}" for _, values, digits in columns
        ]
        rows.append([f"{first + 1} to {last}", *means])
    return markdown_table(["steps", *(heading for heading, _, _ in columns)], rows)


def octave_counts(paths: Sequence[Path]) -> npt.NDArray[np.int64]:
    """Over all steps from one path to the next, by the old weight's octave: how many, changed."""
    counts = np.zeros((2, len(OCTAVES)), np.int64)
    base = bench.load_checkpoint(paths[0])
    for path in paths[1:]:
        new = bench.load_checkpoint(path)
        for name, tensor in new.items():
            octaves = class_of(base[name].words, tensor.dtype) - BF16_BIAS
            places = np.clip(octaves, OCTAVES[0], OCTAVES[-1]) - OCTAVES[0]
            changed = base[name].words != tensor.words
            counts[0] += np.bincount(places, minlength=len(OCTAVES))
            counts[1] += np.bincount(places[changed], minlength=len(OCTAVES))
        base = new
    return counts


def by_octave(run: Path, learning_rate: float) -> str:
    """Which weights change, early and late, as a Markdown table.

    An optimizer moves small and large weights alike, but BF16 lies 2^-7 of the octave apart: where
    weights have spread between those points, changed share x spacing is the mean move.
    """
    (paths,) = bench.find_runs(run.parent).values()
    early_counts, early_changed = octave_counts(paths[: PERIOD_STEPS + 1])
    counts, changed = octave_counts(paths[-PERIOD_STEPS - 1 :])
    early_shares = early_changed / np.maximum(early_counts, 1)
    shares = changed / np.maximum(counts, 1)
    rows = []
    for place, octave in enumerate(OCTAVES):
        label = f"2^{octave} to 2^{octave + 1}"
        move = f"{shares[place] * 2.0 ** (octave - BF16_MANTISSA_BITS) / learning_rate:.3f}"
        if octave == OCTAVES[0]:
            label, move = f"below 2^{octave + 1}", "-"
        elif octave == OCTAVES[-1]:
            label, move = f"from 2^{octave}", "-"
        rows.append(
            [
                label,
                f"{100 * counts[place] / counts.sum():.2f}",
                f"{100 * early_shares[place]:.3f}",
                f"{100 * shares[place]:.3f}",
                move,
                f"{100 * changed[place] / max(1, changed.sum()):.2f}",
            ]
        )
    step_count = min(PERIOD_STEPS, len(paths) - 1)
    headings = ["size of the weight", "% of weights", f"changed %, first {step_count} steps"]
    headings += [f"changed %, last {step_count}", "x spacing / lr", "% of the changes"]
    return markdown_table(headings, rows)


def totals(report: bench.Report) -> str:
    """The bytes of all deltas, as a Markdown table, against a full checkpoint at every step."""
    full_bytes = report.step_count * report.raw_bytes
    rows = [[f"{report.step_count} full checkpoints", f"{full_bytes / 1e6:.2f}", "-", "1.0"]]
    for row in report.rows:
        if not row.step_payload_bytes:
            continue
        payload_bytes = sum(row.step_payload_bytes)
        # Every step has the same raw bytes, so the mean share gives back the sum.
        file_bytes = None if row.file_percent is None else row.file_percent / 100 * full_bytes
        rows.append(
            [
                row.name,
                f"{payload_bytes / 1e6:.2f}",
                "-" if file_bytes is None else f"{file_bytes / 1e6:.2f}",
                f"{full_bytes / payload_bytes:.1f}",
            ]
        )
    return markdown_table(["the whole run", "MB", "MB with file headers", "times smaller"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(".bench/bench-1000"), help="folder of the run")
    add("--json", type=Path, help="write what was measured here")
    add("--steps", type=int, default=SETTINGS["steps"], help="fewer, to try it")
    add("--pretrain-steps", type=int, default=SETTINGS["pretrain_steps"], help="the same")
    options = parser.parse_args()
    settings = {**SETTINGS, "steps": options.steps, "pretrain_steps": options.pretrain_steps}
    run = record(options.out, settings)
    recorded = json.loads((run / "run.json").read_text())
    report = measure(run)
    check_shares(recorded["steps"], report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"run": recorded, **asdict(report)}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(bench.to_markdown(report))
    print(periods(recorded["steps"], report))
    print(by_octave(run, recorded["settings"]["learning_rate"]))
    print(totals(report), end="")


if __name__ == "__main__":
    main()
