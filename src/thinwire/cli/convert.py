"""``thinwire convert``: deltas and chains, from one system's format to another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import (
    FormatOption,
    JsonLines,
    Trust,
    Workers,
    parse_options,
    worker_count,
)
from thinwire.cli.output import print_json_line, printable
from thinwire.cli.signals import terminable
from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from thinwire.interop.convert import Converted


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A delta (a file or a version's folder), a folder of versions, or a stream.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="For thinwire the delta file, or the stream, to write; else the folder, or URL, "
            "of the versions.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="thinwire, slime, fireworks, trl, skyrl, grail or hf.",
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="The checkpoint that the delta, or the first delta of the chain, was made from.",
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(
            min=0, show_default=False, help="Which version a single delta makes, if SRC is silent."
        ),
    ] = None,
    base_version: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Which version it was made from; default: as SRC says, or the one before.",
        ),
    ] = None,
    option: FormatOption = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="Where things are kept meanwhile: room for three models, for a chain to thinwire "
            "four.",
        ),
    ] = None,
    workers: Workers = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the delta file DST.")
    ] = False,
    single_writer: Annotated[
        bool,
        typer.Option(
            "--single-writer", help="DST has no put-if-absent: only this process writes to it."
        ),
    ] = False,
    trust: Trust = None,
    as_json: JsonLines = False,
) -> None:
    """Write SRC in another system's format; print a line for each version.

    Everything is verified on the way: by the checksums of SRC's format, and by thinwire's own.
    `thinwire mirror` keeps such a copy of a stream current.
    """
    with reported(as_json, is_lines=True), terminable():
        options: dict[str, Any] = {
            "options": parse_options(option),
            "work_dir": work_dir,
            "workers": worker_count(workers),
            "single_writer": single_writer,
        }
        for done in _convert(
            source, target, to, base, version, base_version, overwrite, trust, options
        ):
            _print(done, as_json)


def _convert(
    source: str,
    target: str,
    to: str,
    base: Path | None,
    version: int | None,
    base_version: int | None,
    overwrite: bool,
    trust: list[str] | None,
    options: dict[str, Any],
) -> Iterator[Converted]:
    from thinwire.cli.inspect_foreign import refuse_unknown_folder
    from thinwire.follow import open_stream
    from thinwire.interop.convert import THINWIRE, convert_chain, convert_delta, convert_stream
    from thinwire.interop.formats import chain_of, format_of
    from thinwire.stream import keys

    path = Path(source)
    if overwrite and to != THINWIRE:
        raise InvalidArgument(
            "--overwrite is for the delta file that --to thinwire writes",
            hint="What lies at a destination is never replaced: give another one",
        )
    if "://" in source or (path / keys.STREAM).is_file():
        stream = open_stream(source, trusted_keys=trust or ())
        yield from convert_stream(stream, target, to, base=base, **options)
        return
    is_chain = path.is_dir() and format_of(path) is None and chain_of(path) is not None
    if is_chain:
        if version is not None or base_version is not None:
            raise InvalidArgument(
                "--version and --base-version are for single deltas", hint="Leave them out"
            )
        yield from convert_chain(source, target, to, base=base, **options)
        return
    if format_of(path) is None:
        refuse_unknown_folder(path)
    if base is None:
        raise InvalidArgument(
            "a single delta can be read only beside the checkpoint that it was made from",
            hint="Give it (--base)",
        )
    yield convert_delta(
        source,
        target,
        to,
        base=base,
        version=version,
        base_version=base_version,
        overwrite=overwrite,
        **options,
    )


def _print(done: Converted, as_json: bool) -> None:
    if as_json:
        print_json_line(
            {
                "version": done.version,
                "base_version": done.base_version,
                "kind": "full" if done.is_full else "delta",
                "name": done.name or None,
                "source_bytes": done.source_bytes,
                "written_bytes": done.written_bytes,
            }
        )
        return
    number = "" if done.version is None else f"version {done.version}: "
    if not done.name:
        print(f"{number}not written: both sides begin with this checkpoint", flush=True)
        return
    kind = "full weights" if done.is_full else "a delta"
    if not done.is_full and done.base_version is not None:
        kind += f" from {done.base_version}"
    print(
        f"{number}{printable(done.name)}, {kind}: {done.written_bytes:,} bytes, from "
        f"{done.source_bytes:,}",
        flush=True,
    )
