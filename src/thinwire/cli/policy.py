"""``thinwire policy``: how a stream is looked after, shown or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Json, Key, Trust, Url, parse_duration
from thinwire.cli.output import print_json, print_table
from thinwire.errors import InvalidArgument


def policy(
    url: Url,
    anchor_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Versions between anchors; 0: when deltas cost more than an anchor.",
        ),
    ] = None,
    merge_levels: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            show_default=False,
            help="How many versions merged deltas span, each a multiple of the one before.",
        ),
    ] = None,
    keep_versions: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="How many of the newest versions stay."),
    ] = None,
    keep_age: Annotated[
        int | None,
        typer.Option(
            parser=parse_duration,
            metavar="TIME",
            show_default=False,
            help="Versions younger than this, such as 36h or 7d, stay too.",
        ),
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(
            parser=parse_duration,
            metavar="TIME",
            show_default=False,
            help="How old what nobody names must be before it is removed.",
        ),
    ] = None,
    accept_new_lineages: Annotated[
        bool | None,
        typer.Option(
            "--accept-new-lineages/--refuse-new-lineages",
            show_default=False,
            help="Whether followers go along when the trainer restarts from older weights.",
        ),
    ] = None,
    key: Key = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Show the policy of a stream, or change it. Maintainers heed it in their next round."""
    with reported(as_json):
        import msgspec

        from thinwire.follow import open_stream
        from thinwire.follow.key_files import read_signing_key
        from thinwire.maintain import set_policy

        given: dict[str, Any] = {
            "anchor_every": anchor_every,
            "merge_levels": None if merge_levels is None else _levels(merge_levels),
            "keep_versions": keep_versions,
            "keep_age_s": keep_age,
            "grace_s": grace,
            "accept_new_lineages": accept_new_lineages,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        stream = open_stream(
            url, signing_key=read_signing_key(_key(key, asked)), trusted_keys=trust or ()
        )
        current = stream.record().policy
        if asked:
            current = set_policy(stream, msgspec.structs.replace(current, **asked)).policy
        facts = msgspec.structs.asdict(current)
        if as_json:
            print_json({"url": stream.url, "is_changed": bool(asked), **facts})
            return
        rows = [[name, _shown(value)] for name, value in facts.items()]
        print_table(["policy", "value"], rows, left=2)
        if asked:
            print("changed; maintainers heed it in their next round")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _key(key: Path | None, asked: dict[str, Any]) -> Path | None:
    """The key is for writing: whoever only looks need not have it."""
    return key if asked else None


def _levels(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(
            f"--merge-levels {text[:80]!r} is not a list of numbers", hint="Write 4,16,64,256"
        ) from None
