"""``thinwire follow``: a checkpoint folder, kept at the newest version of a stream."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.execute import check_command, run_after
from thinwire.cli.failures import INTERRUPTED, reported
from thinwire.cli.logs import LogLevel, observing
from thinwire.cli.options import (
    BlockCacheFolder,
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
    parse_size,
)
from thinwire.cli.output import print_json_line
from thinwire.cli.progress import byte_progress
from thinwire.cli.reporting import (
    HubStream,
    HubTokenFile,
    HubUrl,
    Region,
    RelayTokenFile,
    RelayUrl,
    Replica,
    make_client,
    relay_of,
    reporting,
)
from thinwire.cli.signals import stopped_by_signals
from thinwire.errors import Deadline, InvalidArgument, NotFound

if TYPE_CHECKING:
    import threading

    from thinwire.follow import Stream
    from thinwire.stream.events import Event
    from thinwire.stream.version import Version


def follow(
    url: Url,
    folder: Annotated[
        Path, typer.Argument(help="The checkpoint folder; empty, missing, or made by thinwire.")
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Catch up with the newest version and exit.")
    ] = False,
    version: Annotated[
        int | None,
        typer.Option(
            "--version", min=1, show_default=False, help="Catch up with this version and exit."
        ),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            show_default=False,
            help='Hold only tensors like this, such as "model.layers.0.*", and small ones. '
            "Repeatable.",
        ),
    ] = None,
    base: ModelCopy = None,
    accept_new_lineages: NewLineages = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Allow to go backwards, or to another lineage, once.")
    ] = False,
    trust: Trust = None,
    cache: BlockCacheFolder = None,
    cache_limit: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default=False,
            help="What the cache may take; default: 32GiB.",
        ),
    ] = None,
    memory_limit: MemoryLimit = None,
    workers: Workers = None,
    poll: Poll = 1.0,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default=False,
            help="With --once or --version: seconds to wait for a version that is not there yet.",
        ),
    ] = None,
    execute: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            show_default=False,
            help="Run this program (no shell) after each version, with THINWIRE_VERSION, "
            "THINWIRE_STEP and THINWIRE_FOLDER set, and wait for its end: the folder stays as it "
            "is meanwhile.",
        ),
    ] = None,
    metrics_port: MetricsPort = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="First read the folder in full, and mend it if someone changed it."
        ),
    ] = False,
    hub: HubUrl = None,
    hub_stream: HubStream = None,
    hub_token_file: HubTokenFile = None,
    region: Region = None,
    replica: Replica = None,
    relay: RelayUrl = None,
    relay_token_file: RelayTokenFile = None,
    log_level: LogOption = LogLevel.INFO,
    as_json: JsonLines = False,
) -> None:
    """Keep FOLDER at the newest version of a stream, bit for bit; print a line for each version.

    FOLDER can be loaded whenever no update runs. SIGTERM and Ctrl-C let the running step end;
    whatever else interrupts it, the next run finishes or discards the update first.
    """
    with reported(as_json, is_lines=True), ExitStack() as stack:
        from thinwire.follow import CheckpointSink, Follower, open_stream
        from thinwire.follow.cache import DEFAULT_LIMIT_BYTES
        from thinwire.follow.fetch import DEFAULT_MEMORY_BYTES
        from thinwire.stream.events import Observers

        check_command(execute)
        is_single = once or version is not None
        if timeout is not None and not is_single:
            raise InvalidArgument(
                "--timeout is for --once and --version",
                hint="Without these, follow waits for versions until it is stopped",
            )
        if verify and tensors:
            raise InvalidArgument(
                "--verify is for whole models: parts of one have no digest to be compared with",
                hint="Leave one of --verify and --tensors out",
            )
        logger, observer = stack.enter_context(observing(log_level, metrics_port))
        stream = open_stream(url, trusted_keys=trust or (), relay=relay_of(relay, relay_token_file))
        client = make_client(
            hub,
            hub_stream,
            hub_token_file,
            region,
            replica,
            url=stream.url,
            place=folder,
            engine="folder",
        )
        fetched = _FetchedBytes()
        follower = stack.enter_context(
            Follower(
                stream,
                CheckpointSink(folder, workers=workers),
                tensors=tensors,
                base=base,
                accept_new_lineages=accept_new_lineages,
                cache_dir=cache,
                cache_limit_bytes=DEFAULT_LIMIT_BYTES if cache_limit is None else cache_limit,
                memory_limit_bytes=DEFAULT_MEMORY_BYTES if memory_limit is None else memory_limit,
                observer=Observers(observer, fetched, client),
            )
        )
        is_stopped = stack.enter_context(stopped_by_signals(follower.stop))
        stack.enter_context(reporting(client, follower))
        logger.info("following", url=stream.url, folder=str(folder))
        if verify and not follower.prove():
            logger.warning("mended", folder=str(folder))
        if is_single:
            _wait(stream, version, timeout or 0.0, poll, is_stopped)
            with byte_progress("follow", None) as on_bytes:
                held = follower.catch_up(
                    "latest" if version is None else version,
                    reset=reset,
                    on_bytes=on_bytes,
                )
            _print(held, as_json, fetched.total_bytes)
            run_after(execute, folder, held, logger)
            if is_stopped.is_set():
                raise typer.Exit(INTERRUPTED)
            return
        if reset:
            # Nothing to go back to is no reason not to wait for something.
            with suppress(NotFound):
                follower.catch_up(reset=True)
        for held in follower.follow(poll_s=poll):
            _print(held, as_json, fetched.total_bytes)
            fetched.total_bytes = 0
            run_after(execute, folder, held, logger)
        logger.info("stopped")


def _wait(
    stream: Stream,
    version: int | None,
    timeout_s: float,
    poll_s: float,
    is_stopped: threading.Event,
) -> None:
    """Wait until the stream has a version: this one, or any."""
    if not timeout_s:
        return
    deadline_s = time.monotonic() + timeout_s
    while not is_stopped.is_set():
        with suppress(NotFound):
            head = stream.tip().head
            if head is not None and head.version >= (version or 1):
                return
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise Deadline(
                f"{stream.url} had no version{'' if version is None else f' {version}'} within "
                f"{timeout_s:g} s",
                hint="Is the publisher running? `thinwire log` shows what there is",
            )
        is_stopped.wait(min(poll_s, left_s))
    raise typer.Exit(INTERRUPTED)


def _print(held: Version, as_json: bool, fetched_bytes: int) -> None:
    from thinwire.cli.versions import version_json, version_line

    if as_json:
        print_json_line({**version_json(held), "fetched_bytes": fetched_bytes})
    else:
        fetched = f"fetched {fetched_bytes:,} bytes" if fetched_bytes else "nothing to fetch"
        print(f"{version_line(held)}; {fetched}", flush=True)


class _FetchedBytes:
    """Counts what crossed the network."""

    def __init__(self) -> None:
        self.total_bytes = 0

    def on_event(self, event: Event) -> None:
        """Add what was fetched."""
        from thinwire.stream.events import Fetched

        if isinstance(event, Fetched):
            self.total_bytes += event.payload_bytes
