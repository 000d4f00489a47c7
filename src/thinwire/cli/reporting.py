"""Options of regions: a relay to read through, a hub to report to, to be woken by, or to tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from thinwire.report import HubClient, HubNotifier
    from thinwire.report.client import Driving, Following
    from thinwire.store import Store

TOKEN_VARIABLE = "THINWIRE_HUB_TOKEN"
_PANEL = "Regions"

HubUrl = Annotated[
    str | None,
    typer.Option(
        "--hub",
        metavar="URL",
        rich_help_panel=_PANEL,
        show_default=False,
        help="A hub, such as http://127.0.0.1:8765. It can delay nothing but the wake-up: versions "
        "come from the stream alone.",
    ),
]
HubStream = Annotated[
    str | None,
    typer.Option(
        "--hub-stream",
        metavar="NAME",
        rich_help_panel=_PANEL,
        show_default=False,
        help="What the stream is called there; default: the last part of its URL.",
    ),
]
HubTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--hub-token-file",
        rich_help_panel=_PANEL,
        show_default=False,
        help=f"A file with the bearer token for the hub; default: what {TOKEN_VARIABLE} holds.",
    ),
]
Region = Annotated[
    str | None,
    typer.Option(
        "--region",
        metavar="NAME",
        rich_help_panel=_PANEL,
        show_default=False,
        help="Where this replica is, for the hub.",
    ),
]
Replica = Annotated[
    str | None,
    typer.Option(
        "--replica",
        metavar="NAME",
        rich_help_panel=_PANEL,
        show_default=False,
        help="What this replica is called at the hub; default: a name made of this host's and of "
        "where the weights are, the same after a restart.",
    ),
]
RelayUrl = Annotated[
    str | None,
    typer.Option(
        "--relay",
        metavar="URL",
        rich_help_panel=_PANEL,
        show_default=False,
        help="A relay nearby to read through, such as http://127.0.0.1:8766/NAME; the stream "
        "itself is read while the relay is away, or gives what does not verify.",
    ),
]
RelayTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--relay-token-file",
        rich_help_panel=_PANEL,
        show_default=False,
        help="A file with the bearer token for the relay; default: what THINWIRE_HTTP_TOKEN or the "
        "file of THINWIRE_HTTP_TOKEN_FILE holds.",
    ),
]


def relay_of(relay: str | None, token_file: Path | None) -> Store | None:
    """The relay of the options, to read through; None: they name none.

    Raises:
        InvalidArgument: The URL or the token is none, or the token is given without ``--relay``.
        StoreError: The token's file cannot be read.
    """
    if relay is None:
        if token_file is not None:
            raise InvalidArgument(
                "--relay-token-file is for --relay", hint="Give --relay URL, or leave it out"
            )
        return None
    from thinwire.follow.relays import open_relay

    return open_relay(relay, token_file)


def make_client(
    hub: str | None,
    hub_stream: str | None,
    token_file: Path | None,
    region: str | None,
    replica: str | None,
    *,
    url: str,
    place: str | os.PathLike[str],
    engine: str,
) -> HubClient | None:
    """What reports a replica to the hub of the options; None: they name none.

    Args:
        hub: Of ``--hub``, and so on.
        hub_stream: The same.
        token_file: The same.
        region: The same.
        replica: The same.
        url: The stream.
        place: What the replica's name is made of: its folder, or the engine's address.
        engine: What holds the weights.

    Raises:
        InvalidArgument: An option makes no sense, or is given without ``--hub``.
        StoreError: The token's file cannot be read.
    """
    if hub is None:
        _refuse_without_hub(hub_stream, token_file, region, replica)
        return None
    from thinwire.report import HubClient, replica_name, stream_name

    return HubClient(
        hub,
        stream_name(url) if hub_stream is None else hub_stream,
        replica=replica_name(place) if replica is None else replica,
        token=_token(token_file),
        region=region or "",
        engine=engine,
    )


@contextmanager
def reporting(client: HubClient | None, replica: Following | Driving) -> Iterator[None]:
    """Report a replica to its hub meanwhile, if it has one."""
    if client is None:
        yield
        return
    with client.reporting(replica):
        yield


@contextmanager
def notifying(
    hub: str | None, hub_stream: str | None, token_file: Path | None, url: str
) -> Iterator[HubNotifier | None]:
    """An observer that tells the hub of the options what is published; None: they name none.

    Raises:
        InvalidArgument: An option makes no sense, or is given without ``--hub``.
        StoreError: The token's file cannot be read.
    """
    if hub is None:
        _refuse_without_hub(hub_stream, token_file)
        yield None
        return
    from thinwire.report import HubNotifier, stream_name

    name = stream_name(url) if hub_stream is None else hub_stream
    with HubNotifier(hub, name, token=_token(token_file)) as notifier:
        yield notifier


def _refuse_without_hub(*given: object) -> None:
    if any(value is not None for value in given):
        raise InvalidArgument(
            "--hub-stream, --hub-token-file, --region and --replica are for --hub",
            hint="Give --hub URL, or leave them out",
        )


def _token(path: Path | None) -> str:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    from thinwire.web import read_token

    return read_token(path)
