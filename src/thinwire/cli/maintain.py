"""``thinwire maintain``: merged deltas, anchors, and room."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import INTERRUPTED, reported
from thinwire.cli.logs import LogLevel, observing
from thinwire.cli.options import (
    JsonLines,
    Key,
    LogOption,
    MetricsPort,
    ModelCopy,
    SingleWriter,
    Trust,
    Url,
    Workers,
    worker_count,
)
from thinwire.cli.output import print_json_line
from thinwire.cli.signals import stopped_by_signals

if TYPE_CHECKING:
    from thinwire.maintain.maintainer import Work
    from thinwire.stream.events import Event, Maintained

_VERBS = {
    "merge": "merged delta up to",
    "anchor": "anchor at",
    "prune": "dropped what is not needed any more, at",
    "collect": "removed what was dropped, at",
}


def maintain(
    url: Url,
    work_dir: Annotated[
        Path,
        typer.Option(
            help="Where to keep copies of the model: one, and one for each level of merged deltas."
        ),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Go on until stopped.")] = False,
    every: Annotated[
        float, typer.Option(min=0.01, max=86_400, help="With --watch: seconds between rounds.")
    ] = 10.0,
    key: Key = None,
    trust: Trust = None,
    base: ModelCopy = None,
    single_writer: SingleWriter = False,
    workers: Workers = None,
    metrics_port: MetricsPort = None,
    log_level: LogOption = LogLevel.WARNING,
    as_json: JsonLines = False,
) -> None:
    """Merge deltas, make anchors, prune, and remove what nobody names: all that is due now.

    Safe beside publishers, followers and other maintainers, of which one works at a time. SIGTERM
    and Ctrl-C let the running piece of work end.
    """
    with (
        reported(as_json, is_lines=True),
        observing(log_level, metrics_port, follows=False) as (_, observer),
    ):
        from thinwire.follow import open_stream
        from thinwire.follow.key_files import read_signing_key
        from thinwire.maintain import Maintainer
        from thinwire.stream.events import Observers

        stream = open_stream(
            url,
            signing_key=read_signing_key(key),
            trusted_keys=trust or (),
            single_writer=single_writer,
        )
        printer = _Printer(as_json) if watch else None
        with (
            Maintainer(
                stream,
                work_dir,
                base=base,
                workers=worker_count(workers),
                observer=Observers(observer, printer),
            ) as maintainer,
            stopped_by_signals(maintainer.stop) as is_stopped,
        ):
            if watch:
                maintainer.watch(every)
                return
            work = maintainer.run_once()
            if as_json:
                print_json_line({"url": stream.url, **work_json(work)})
            else:
                print(work_line(work))
            if is_stopped.is_set():
                raise typer.Exit(INTERRUPTED)


def work_json(work: Work) -> dict[str, Any]:
    """What a round did."""
    return {
        "is_other": work.is_other,
        "merge_count": work.merge_count,
        "anchor_count": work.anchor_count,
        "dropped_count": work.dropped_count,
        "failed_count": work.failed_count,
        "removed_count": work.removed.object_count,
        "removed_bytes": work.removed.payload_bytes,
    }


def work_line(work: Work) -> str:
    """What a round did, for people."""
    if work.is_other:
        return "another maintainer is in charge; nothing was done"
    failed = f"; {work.failed_count} failed, see the log" if work.failed_count else ""
    if not any((work.merge_count, work.anchor_count, work.dropped_count, *work.removed)):
        return f"nothing was {'made' if failed else 'due'}{failed}"
    return (
        f"made {_count(work.merge_count, 'merged delta')} and "
        f"{_count(work.anchor_count, 'anchor')}; dropped {work.dropped_count}; removed "
        f"{_count(work.removed.object_count, 'object')} of {work.removed.payload_bytes:,} bytes"
        f"{failed}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class _Printer:
    """Prints what was made or removed."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def on_event(self, event: Event) -> None:
        """Print it, if it is one of these."""
        from thinwire.stream.events import Maintained

        if isinstance(event, Maintained):
            self._print(event)

    def _print(self, event: Maintained) -> None:
        facts = {
            "kind": event.kind,
            "version": event.version,
            "object_count": event.object_count,
            "payload_bytes": event.payload_bytes,
        }
        if self._as_json:
            print_json_line(facts)
            return
        what = _VERBS.get(event.kind, event.kind)
        print(
            f"{what} version {event.version}: {_count(event.object_count, 'object')}, "
            f"{event.payload_bytes:,} bytes",
            flush=True,
        )
