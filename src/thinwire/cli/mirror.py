"""``thinwire mirror``: a copy of a stream in another system's format, kept current."""

from __future__ import annotations

import os
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.execute import check_command, run_after
from thinwire.cli.failures import INTERRUPTED, reported
from thinwire.cli.logs import LogLevel, observing
from thinwire.cli.options import (
    FormatOption,
    JsonLines,
    LogOption,
    MemoryLimit,
    MetricsPort,
    ModelCopy,
    NewLineages,
    Poll,
    Trust,
    Url,
    Workers,
    parse_options,
    worker_count,
)
from thinwire.cli.output import print_json_line, printable
from thinwire.cli.signals import stopped_by_signals
from thinwire.errors import InvalidArgument, ThinwireError

if TYPE_CHECKING:
    from thinwire.follow import Stream
    from thinwire.interop.mirror_record import MirroredVersion
    from thinwire.interop.mirror_sink import MirrorSink
    from thinwire.store import Store
    from thinwire.stream.version import Version

KEY_VARIABLE = "FIREWORKS_API_KEY"


class MirrorFormat(StrEnum):
    """The formats that a stream can be mirrored in."""

    SLIME = "slime"
    FIREWORKS = "fireworks"
    TRL = "trl"
    HF = "hf"


class PromptCacheKind(StrEnum):
    """What becomes of a deployment's cached prompts after a swap."""

    ALL = "all"
    NONE = "none"
    NEW_SESSION = "new_session"


def mirror(
    url: Url,
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="Where the copy goes: a folder, s3://, gs://, az://."),
    ],
    format: Annotated[MirrorFormat, typer.Option("--format", help="In which format.")],
    work_dir: Annotated[
        Path,
        typer.Option(
            help="Where the mirror keeps its own copy of the model; empty, missing, or made by it."
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Catch up with the newest version and exit.")
    ] = False,
    option: FormatOption = None,
    full_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Write full weights after so many deltas; 0: only at the start and where no delta "
            "will do. Default: as is usual for the format.",
        ),
    ] = None,
    keep_full: Annotated[
        int,
        typer.Option(
            min=0,
            help="Keep so many full versions and what came after them, delete the rest; 0: keep "
            "all.",
        ),
    ] = 2,
    single_writer: Annotated[
        bool,
        typer.Option(
            "--single-writer", help="DST has no put-if-absent: only this process writes to it."
        ),
    ] = False,
    base: ModelCopy = None,
    accept_new_lineages: NewLineages = None,
    trust: Trust = None,
    memory_limit: MemoryLimit = None,
    workers: Workers = None,
    poll: Poll = 1.0,
    account: Annotated[
        str | None, typer.Option(show_default=False, help="Fireworks: the account's id.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(show_default=False, help="Fireworks: the model's id.")
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"Fireworks: have this deployment load each version; the key comes from "
            f"{KEY_VARIABLE}.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(show_default=False, help="Fireworks: where its API is, if not the usual."),
    ] = None,
    reset_prompt_cache: Annotated[
        PromptCacheKind | None,
        typer.Option(
            show_default=False,
            help="Fireworks: what becomes of cached prompts; default: as the deployment does it.",
        ),
    ] = None,
    load_timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Fireworks: seconds that the replicas may take for a version; default: 1800.",
        ),
    ] = None,
    execute: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            show_default=False,
            help="Run this program (no shell) after each version, with THINWIRE_VERSION, "
            "THINWIRE_STEP and THINWIRE_FOLDER (the mirror's own copy) set, and wait for its end.",
        ),
    ] = None,
    metrics_port: MetricsPort = None,
    log_level: LogOption = LogLevel.INFO,
    as_json: JsonLines = False,
) -> None:
    """Keep a copy of a stream in another system's format; print a line for each version.

    An engine that was built for that system follows DST. Versions follow each other one by one,
    from the newest one at the first start. Whatever interrupts it, the next run goes on.
    """
    with reported(as_json, is_lines=True), ExitStack() as stack:
        from thinwire.follow import open_stream
        from thinwire.follow.fetch import DEFAULT_MEMORY_BYTES
        from thinwire.interop.mirror import Mirror
        from thinwire.store import open_store

        check_command(execute)

        stream = open_stream(url, trusted_keys=trust or ())
        store = open_store(target, single_writer=single_writer)
        options = parse_options(option)
        logger, observer = stack.enter_context(observing(log_level, metrics_port))
        hosted = {
            "account": account,
            "model": model,
            "deployment": deployment,
            "endpoint": endpoint,
            "reset_prompt_cache": reset_prompt_cache,
            "load_timeout": load_timeout,
        }
        if format is MirrorFormat.FIREWORKS:
            sink = _fireworks_sink(
                work_dir,
                store,
                stream,
                options,
                full_every,
                keep_full,
                workers,
                hosted,
            )
        else:
            _refuse_hosted(hosted)
            sink = _plain_sink(
                work_dir, store, stream, format, options, full_every, keep_full, workers
            )
        running = stack.enter_context(
            Mirror(
                stream,
                sink,
                base=base,
                accept_new_lineages=accept_new_lineages,
                memory_limit_bytes=DEFAULT_MEMORY_BYTES if memory_limit is None else memory_limit,
                observer=observer,
            )
        )
        is_stopped = stack.enter_context(stopped_by_signals(running.stop))
        logger.info("mirroring", url=stream.url, target=store.url, format=format.value)

        def on_failure(error: ThinwireError) -> None:
            logger.warning("failed", code=error.code, reason=str(error))

        found = running.catch_up() if once else running.run(poll_s=poll, on_failure=on_failure)
        for held, written in found:
            _print(held, written, as_json)
            run_after(execute, work_dir, held, logger)
        if once and is_stopped.is_set():
            raise typer.Exit(INTERRUPTED)
        logger.info("stopped")


def _plain_sink(
    folder: Path,
    store: Store,
    stream: Stream,
    format: MirrorFormat,
    options: dict[str, str],
    full_every: int | None,
    keep_full: int,
    workers: int | None,
) -> MirrorSink:
    from thinwire.interop.formats import format_named
    from thinwire.interop.mirror_sink import mirror_sink

    return mirror_sink(
        stream,
        folder,
        store,
        format_named(format.value),
        options=options,
        full_every=full_every,
        keep_full=keep_full,
        workers=worker_count(workers),
    )


def _fireworks_sink(
    folder: Path,
    store: Store,
    stream: Stream,
    options: dict[str, str],
    full_every: int | None,
    keep_full: int,
    workers: int | None,
    hosted: dict[str, Any],
) -> MirrorSink:
    from thinwire.interop.fireworks.hot_load import ENDPOINT, HotLoad, PromptCache
    from thinwire.interop.fireworks.sink import FULL_EVERY, FireworksSink
    from thinwire.interop.formats import format_named
    from thinwire.interop.mirror_sink import refuse_same_place

    format_named("fireworks").check_options(options)
    refuse_same_place(stream, folder, store)
    hot_load = None
    if hosted["deployment"] is not None:
        key = os.environ.get(KEY_VARIABLE)
        if not key or hosted["account"] is None or hosted["model"] is None:
            raise InvalidArgument(
                "a deployment needs --account, --model and a key",
                hint=f"Give all three; the key in {KEY_VARIABLE}",
            )
        hot_load = HotLoad(
            hosted["account"],
            hosted["model"],
            hosted["deployment"],
            key=key,
            endpoint=hosted["endpoint"] or ENDPOINT,
        )
    else:
        _refuse_hosted(hosted)
    cache = hosted["reset_prompt_cache"]
    return FireworksSink(
        folder,
        store,
        stream.record().stream,
        hot_load=hot_load,
        reset_prompt_cache=None if cache is None else PromptCache(cache.value),
        full_every=FULL_EVERY if full_every is None else full_every and full_every + 1,
        keep_full=keep_full,
        wait_s=hosted["load_timeout"] or 1800.0,
        workers=worker_count(workers),
        compression_format=options.get("compression_format", "arc_v2"),
    )


def _refuse_hosted(hosted: dict[str, Any]) -> None:
    given = [name for name, value in hosted.items() if value is not None]
    if given:
        raise InvalidArgument(
            f"--{given[0].replace('_', '-')} is for a deployment of Fireworks",
            hint="Give --format fireworks and --deployment, or leave it out",
        )


def _print(held: Version, written: MirroredVersion, as_json: bool) -> None:
    from thinwire.cli.versions import version_json

    if as_json:
        print_json_line(
            {
                **version_json(held),
                "mirrored_as": written.name,
                "mirrored_base": written.base,
                "mirrored_bytes": written.payload_bytes,
            }
        )
        return
    kind = "full weights" if written.base is None else f"a delta from {written.base}"
    print(
        f"version {held.version}: {printable(written.name)}, {kind}, "
        f"{written.payload_bytes:,} bytes",
        flush=True,
    )
