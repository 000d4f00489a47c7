"""``thinwire log``: the newest versions of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Json, Trust, Url
from thinwire.cli.output import NONE, duration, percent, print_json, print_table, printable

if TYPE_CHECKING:
    from thinwire.follow import Stream
    from thinwire.stream.records import Manifest, StreamRecord

HEADINGS = ["version", "step", "age", "bytes", "changed %", "kind", "signer"]


def log(
    url: Url,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many to show.")] = 20,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Show the newest versions, the newest first; a new lineage is marked where it begins.

    Reads one manifest for each, and checks that each is the one that the next was made from.
    """
    with reported(as_json):
        from thinwire.cli.versions import version_json
        from thinwire.follow import open_stream
        from thinwire.stream.version import Version

        stream = open_stream(url, trusted_keys=trust or ())
        record, tip = stream.record(), stream.tip()
        shown = list(islice(_history(stream, tip.head), limit))
        if as_json:
            print_json(
                {
                    "url": stream.url,
                    "model": record.model,
                    "pending_lineage": None if tip.end is None else tip.end.successor,
                    "versions": [
                        {
                            **version_json(Version.of(found)),
                            "is_new_lineage": _begins_lineage(found),
                        }
                        for found in shown
                    ],
                }
            )
            return
        print(_caption(stream, record, tip.head))
        if tip.end is not None:
            print(f"a new lineage was begun at version {tip.end.version}; it has no version yet")
        if shown:
            print()
            print_table(HEADINGS, [_row(found) for found in shown], left=0)


def _history(stream: Stream, head: Manifest | None) -> Iterator[Manifest]:
    """The versions, back to the first, also through the lineages before."""
    at = head
    while at is not None:
        yield at
        if at.base is None:
            return
        if at.version == at.first:
            # Between two lineages lies the end of the older one.
            at = stream.require(at.previous, at.base)
            if at.base is None or at.version == at.first:
                return
        assert at.base is not None
        at = stream.require(at.lineage, at.base)


def _begins_lineage(found: Manifest) -> bool:
    return found.version == found.first and bool(found.previous)


def _caption(stream: Stream, record: StreamRecord, head: Manifest | None) -> str:
    text = printable(stream.url)
    if record.model:
        text += f": {printable(record.model)}"
    if head is None:
        return f"{text}: nothing was published yet"
    return f"{text}: version {head.version}, {head.raw_bytes:,} bytes of weights"


def _row(found: Manifest) -> list[str]:
    from thinwire.cli.versions import age_s, signer_name
    from thinwire.stream.version import Version

    version = Version.of(found)
    is_delta = version.kind == "delta"
    return [
        str(version.version),
        NONE if version.step is None else str(version.step),
        duration(age_s(version)),
        f"{version.payload_bytes:,}",
        percent(version.changed_count, version.word_count) if is_delta else NONE,
        f"{version.kind}, new lineage" if _begins_lineage(found) else version.kind,
        signer_name(version.signer),
    ]
