"""``thinwire fsck``: is a stream whole?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Json, ModelCopy, Trust, Url
from thinwire.cli.output import print_json, printable
from thinwire.cli.progress import byte_progress
from thinwire.cli.signals import terminable
from thinwire.errors import StreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from thinwire.maintain import Report


def fsck(
    url: Url,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also rebuild every version in every way; takes room for two copies of the model.",
        ),
    ] = False,
    trust: Trust = None,
    base: ModelCopy = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(show_default=False, help="Where to work; default: a temporary folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every manifest, signature, link, shard and file of a stream; nothing is changed.

    Exits with 6 if something is wrong, having said what, a line for each thing.
    """
    with reported(as_json), terminable():
        from thinwire.follow import open_stream
        from thinwire.maintain import fsck as check

        stream = open_stream(url, trusted_keys=trust or ())
        with byte_progress("fsck", None) as on_bytes:
            report = check(
                stream, deep=deep, base=base, work_dir=work_dir, on_object=_sizes(on_bytes)
            )
        if as_json:
            print_json(
                {"url": stream.url, "is_whole": report.is_whole, "deep": deep, **asdict(report)}
            )
        else:
            _print(stream.url, report, deep)
        if not report.is_whole:
            raise typer.Exit(StreamError.exit_code)


def _sizes(on_bytes: Callable[[int], None] | None) -> Callable[[str, int], None] | None:
    return None if on_bytes is None else lambda _, size_bytes: on_bytes(size_bytes)


def _print(url: str, report: Report, deep: bool) -> None:
    for problem in report.problems:
        where = f"{problem.where}: " if problem.where not in problem.message else ""
        print(printable(f"{where}{problem.message} [{problem.code}]"))
    found = len(report.problems)
    verdict = "whole" if report.is_whole else f"NOT whole: {found} problem{'s' * (found > 1)}"
    print(
        f"{printable(url)} is {verdict}; {report.version_count} versions in "
        f"{report.lineage_count} lineage{'s' * (report.lineage_count != 1)}, "
        f"{report.object_count} objects of {report.object_bytes:,} bytes"
        + (f", {report.rebuilt_count} versions rebuilt" if deep else "")
    )
