"""``thinwire bench``: this library's deltas against other formats, on checkpoints of your own."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import reported
from thinwire.cli.output import print_table, printable
from thinwire.cli.progress import step_progress
from thinwire.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thinwire.bench import CheckpointPeer, Report

STDOUT = Path("-")


def bench(
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            show_default=False, help="Two or more consecutive checkpoints of one model."
        ),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="A folder of runs, RUN/STEP/model.safetensors: one table per run, from step 8 on "
            "where it has more than 9 steps. Default: .bench/corpus, else one that is found or, "
            "in a checkout of thinwire, made (needs torch).",
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", show_default=False, help="Write JSON here; - prints it alone."),
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", show_default=False, help="Draw sizes: .svg or .png.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    repetitions: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Timed calls per step and row; default: 3."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Rows to measure, with commas between; default: all. The class-conditional bound "
            "and memcpy are always there.",
        ),
    ] = None,
) -> None:
    """Measure delta sizes and speeds, one thread, every row checked to give back the same bits.

    The row thinwire counts its whole file. Speeds are raw bytes a CPU second.
    """
    to_stdout = json_path == STDOUT
    with reported(as_json=to_stdout):
        from thinwire.bench import (
            DEFAULT_REPETITION_COUNT,
            load_checkpoint,
            measure_sequence,
            write_plot,
        )
        from thinwire.checkpoint.disk import os_errors

        # What is cheap to refuse first: the default corpus may take a training run to make.
        peers, skipped = _choose_rows(rows)
        _check_outputs(None if to_stdout else json_path, plot_path)
        runs = _choose_runs(checkpoints or [], corpus)
        reports: dict[str, Report] = {}
        step_count = sum(len(paths) - 1 for paths in runs.values())
        with step_progress(step_count * len(peers)) as begin:
            for run_name, paths in runs.items():
                reports[run_name] = measure_sequence(
                    paths,
                    peers,
                    load=load_checkpoint,
                    repetition_count=repetitions or DEFAULT_REPETITION_COUNT,
                    on_progress=partial(_announce, begin, run_name),
                    skipped=skipped,
                )
        text = json.dumps(_as_json(reports, runs), indent=1) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            _print(reports, markdown)
        if json_path is not None and not to_stdout:
            with os_errors("cannot write", json_path):
                json_path.write_text(text, encoding="utf-8")
        if plot_path is not None:
            with os_errors("cannot write", plot_path):
                write_plot(reports, plot_path)


def _choose_runs(checkpoints: Sequence[Path], corpus: Path | None) -> dict[str, list[Path]]:
    from thinwire.bench.corpus import default_corpus, find_runs, steady_steps

    if checkpoints:
        if corpus is not None:
            raise InvalidArgument(
                "bench takes checkpoints or --corpus, not both", hint="Leave one of them out"
            )
        if len(checkpoints) < 2:
            raise InvalidArgument(
                "bench needs two or more consecutive checkpoints, got one",
                hint="Pass the checkpoint of the next step, too",
            )
        return {"": list(checkpoints)}
    folder = corpus or default_corpus(_announce_command)
    return {name: steady_steps(steps) for name, steps in find_runs(folder).items()}


def _announce_command(command: str) -> None:
    # Not stdout, which may be asked to hold JSON alone.
    print(f"no corpus here, making one:\n$ {printable(command)}", file=sys.stderr, flush=True)


def _choose_rows(rows: str | None) -> tuple[list[CheckpointPeer], dict[str, str]]:
    from thinwire.bench import OUR_ROW, PEER_NAMES, available_peers, make_our_row

    names = [OUR_ROW, *PEER_NAMES]
    if rows is not None:
        names = list(dict.fromkeys(row.strip() for row in rows.split(",")))
        unknown = [name for name in names if name not in (OUR_ROW, *PEER_NAMES)]
        if unknown:
            raise InvalidArgument(
                f"there is no row {unknown[0]!r}",
                hint=f"Rows are {', '.join((OUR_ROW, *PEER_NAMES))}",
            )
    peers, skipped = available_peers([name for name in names if name != OUR_ROW])
    if OUR_ROW in names:
        peers.insert(0, make_our_row())
    return peers, skipped


def _announce(begin: Callable[[str], None], run_name: str, step: int, row: str) -> None:
    begin(f"{run_name} step {step + 1} {row}".strip())


def _check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    from thinwire.bench import MissingExtraError, check_plot

    for path in (json_path, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise NotFound(f"the folder of {path} does not exist", hint="Make it", path=str(path))
    if plot_path is not None:
        try:
            check_plot(plot_path)
        except MissingExtraError as error:
            raise InvalidArgument(
                str(error), hint="Install thinwire[bench], or plot to .svg"
            ) from error


def _as_json(reports: Mapping[str, Report], runs: Mapping[str, list[Path]]) -> dict[str, Any]:
    from dataclasses import asdict

    from thinwire.bench import shares_of

    return {
        "runs": [
            {
                "run": name or None,
                "checkpoints": [str(path) for path in runs[name]],
                **asdict(report),
                "shares": [asdict(shares) for shares in shares_of(report)],
            }
            for name, report in reports.items()
        ]
    }


def _print(reports: Mapping[str, Report], markdown: bool) -> None:
    from thinwire.bench.shares import share_cells
    from thinwire.bench.table import caption, markdown_table, to_markdown, used_cells

    for number, (name, report) in enumerate(reports.items()):
        if number:
            print()
        if name:
            print(f"{'### ' if markdown else ''}{printable(name)}\n")
        if markdown:
            print(to_markdown(report))
            print(markdown_table(*share_cells(report)), end="", flush=True)
            continue
        print_table(*used_cells(report))
        print(f"\n{caption(report)}\n")
        print_table(*share_cells(report))
