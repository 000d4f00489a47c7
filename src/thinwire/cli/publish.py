"""``thinwire publish``: a checkpoint becomes the next version of a stream."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import reported
from thinwire.cli.logs import LogLevel, observing
from thinwire.cli.options import (
    Json,
    Key,
    LogOption,
    ModelCopy,
    SingleWriter,
    Trust,
    Url,
    Workers,
    parse_duration,
    worker_count,
)
from thinwire.cli.output import percent, print_json, printable
from thinwire.cli.progress import byte_progress
from thinwire.cli.reporting import HubStream, HubTokenFile, HubUrl, notifying
from thinwire.cli.signals import terminable
from thinwire.errors import InvalidArgument, NotFound, ThinwireError

if TYPE_CHECKING:
    from thinwire.follow import Stream
    from thinwire.maintain.maintainer import Work
    from thinwire.stream.events import Observer
    from thinwire.stream.records import Policy

_AT_CREATION = "When the stream is created"


def publish(
    checkpoint: Annotated[
        Path, typer.Argument(help="The new weights: a model folder or a safetensors file.")
    ],
    url: Url,
    state: Annotated[
        Path,
        typer.Option(
            help="A folder that holds the version before, for the next delta; empty, missing, or "
            "made by thinwire. Keep it from publish to publish."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(show_default=False, help="The trainer's step.")
    ] = None,
    metadata: Annotated[
        str | None,
        typer.Option(metavar="JSON", show_default=False, help="A JSON object to travel along."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            show_default=False,
            help="For a first version: upload no weights; followers have them from "
            "hf://ORG/NAME@REVISION, or from a folder. CHECKPOINT is the copy here.",
        ),
    ] = None,
    base: ModelCopy = None,
    new_lineage: Annotated[
        bool,
        typer.Option("--new-lineage", help="Restart: these weights do not follow the newest."),
    ] = False,
    key: Key = None,
    trust: Trust = None,
    single_writer: SingleWriter = False,
    no_maintain: Annotated[
        bool,
        typer.Option("--no-maintain", help="Leave anchors and merged deltas to others."),
    ] = False,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="Where maintenance keeps its copies of the model; default: in STATE.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(rich_help_panel=_AT_CREATION, show_default=False, help="The model's name."),
    ] = None,
    anchor_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=_AT_CREATION,
            show_default=False,
            help="Versions between anchors; default: when deltas cost more than an anchor.",
        ),
    ] = None,
    keep_versions: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=_AT_CREATION,
            show_default=False,
            help="How many of the newest versions stay; default: 1000.",
        ),
    ] = None,
    keep_age: Annotated[
        int | None,
        typer.Option(
            parser=parse_duration,
            metavar="TIME",
            rich_help_panel=_AT_CREATION,
            show_default=False,
            help="Versions younger than this, such as 36h or 7d, stay too; default: 1d.",
        ),
    ] = None,
    accept_new_lineages: Annotated[
        bool,
        typer.Option(
            "--accept-new-lineages",
            rich_help_panel=_AT_CREATION,
            help="Followers go along when the trainer restarts, unless they say otherwise.",
        ),
    ] = False,
    workers: Workers = None,
    hub: HubUrl = None,
    hub_stream: HubStream = None,
    hub_token_file: HubTokenFile = None,
    log_level: LogOption = LogLevel.WARNING,
    as_json: Json = False,
) -> None:
    """Publish CHECKPOINT as the next version; the first publish makes the stream.

    Once this returns the version is durable and followers see it. Then anchors and merged deltas
    that are due are made, unless a `thinwire maintain` does that; should it fail, the version
    stands.
    """
    with (
        reported(as_json),
        terminable(),
        observing(log_level) as (_, observer),
    ):
        from thinwire.checkpoint import Checkpoint
        from thinwire.cli.versions import version_json
        from thinwire.follow import open_stream
        from thinwire.follow.key_files import read_signing_key
        from thinwire.publish import Publisher
        from thinwire.stream.events import Observers

        facts = None if metadata is None else _parse_metadata(metadata)
        policy = _policy(anchor_every, keep_versions, keep_age, accept_new_lineages)
        stream = open_stream(
            url,
            model=model or "",
            policy=policy,
            signing_key=read_signing_key(key),
            trusted_keys=trust or (),
            single_writer=single_writer,
        )
        if policy is not None or model is not None:
            _check_absent(stream)
        with (
            notifying(hub, hub_stream, hub_token_file, stream.url) as notifier,
            Publisher(
                stream,
                state,
                new_lineage=new_lineage,
                base=base,
                maintain=False,
                workers=worker_count(workers),
                observer=Observers(observer, notifier),
            ) as publisher,
        ):
            start_s = time.perf_counter()
            if reference is None:
                total_bytes = sum(
                    tensor.data.size
                    for tensor in Checkpoint.open(
                        checkpoint, ignore_subfolders=True
                    ).tensors.values()
                )
                with byte_progress("publish", total_bytes) as on_bytes:
                    version = publisher.publish(
                        checkpoint, step=step, metadata=facts, on_bytes=on_bytes
                    )
            else:
                version = publisher.publish_reference(
                    reference, copy=checkpoint, step=step, metadata=facts
                )
            wall_s = time.perf_counter() - start_s
        done: Work | ThinwireError | None = None
        if not no_maintain:
            copy = base if reference is None else checkpoint
            done = _maintain(stream, work_dir or state / ".thinwire-work", copy, observer)
        if as_json:
            print_json(
                {
                    "url": stream.url,
                    **version_json(version),
                    "wall_s": round(wall_s, 6),
                    "maintenance": _maintenance_json(done),
                }
            )
            return
        share = percent(version.payload_bytes, version.raw_bytes)
        changed = f"; {version.changed_count:,} weights changed" if version.kind == "delta" else ""
        print(
            f"version {version.version} of {printable(stream.url)}: {version.kind}, "
            f"{version.payload_bytes:,} bytes, {share} % of {version.raw_bytes:,} raw{changed}; "
            f"{wall_s:.2f} s"
        )
        if done is not None:
            print(f"maintenance: {_maintenance_line(done)}")


def _parse_metadata(text: str) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidArgument(
            f"--metadata is not a JSON object: {error}", hint="Write for example '{\"reward\": 1}'"
        ) from None


def _policy(
    anchor_every: int | None,
    keep_versions: int | None,
    keep_age_s: int | None,
    accept_new_lineages: bool,
) -> Policy | None:
    """The policy that the options ask for; None: they ask for none."""
    from thinwire.stream.records import Policy

    given: dict[str, Any] = {
        "anchor_every": anchor_every,
        "keep_versions": keep_versions,
        "keep_age_s": keep_age_s,
        "accept_new_lineages": accept_new_lineages or None,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    return Policy(**asked) if asked else None


def _check_absent(stream: Stream) -> None:
    try:
        stream.record()
    except NotFound:
        return
    raise InvalidArgument(
        f"{stream.url} exists already: its model name and policy were chosen when it was created",
        hint="Leave out --model, --anchor-every, --keep-versions, --keep-age and "
        "--accept-new-lineages",
        url=stream.url,
    )


def _maintain(
    stream: Stream, folder: Path, base: Path | None, observer: Observer
) -> Work | ThinwireError:
    """Do what is due. The version is committed, so that failing is no failure of the publish."""
    from thinwire.maintain import Maintainer

    try:
        with Maintainer(
            stream, folder, base=base, is_background=True, observer=observer
        ) as maintainer:
            return maintainer.run_once()
    except ThinwireError as error:
        return error


def _maintenance_json(done: Work | ThinwireError | None) -> dict[str, Any] | None:
    from thinwire.cli.maintain import work_json

    if isinstance(done, ThinwireError):
        return {"error": {"code": done.code, "message": done.message, "hint": done.hint}}
    return None if done is None else work_json(done)


def _maintenance_line(done: Work | ThinwireError) -> str:
    from thinwire.cli.maintain import work_line

    if isinstance(done, ThinwireError):
        return f"failed, to be tried again by the next one: {printable(str(done))}"
    return work_line(done)
