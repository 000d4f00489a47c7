"""``thinwire relay``: one download for all followers of a region."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.access import TlsCertificate, TlsKey, TokensFile, known_tokens, tls_of
from thinwire.cli.failures import reported
from thinwire.cli.logs import LogLevel, observing
from thinwire.cli.options import JsonLines, LogOption, Poll, Trust, parse_size
from thinwire.cli.output import print_json_line
from thinwire.cli.reporting import (
    TOKEN_VARIABLE,
    HubTokenFile,
    HubUrl,
    Region,
    Replica,
)
from thinwire.cli.signals import stopped_by_signals
from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from thinwire.relay.relay import StreamRelay

_MAX_PORT = 65_535
# Of 250 followers that fetch at once; one that takes nothing costs up to 200 KB.
_MAX_CONNECTIONS = 4_000


def relay(
    stream: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]URL",
            help="A stream to pass on, and its name here; default: the last part of its path. "
            "Repeatable.",
        ),
    ],
    cache: Annotated[Path, typer.Option(help="A folder for what was fetched; this relay's own.")],
    limit_bytes: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="What that folder may take.")
    ],
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; port 0: any free one. Beyond this machine it needs --tokens.",
        ),
    ] = "127.0.0.1:8766",
    tokens: TokensFile = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    prefetch: Annotated[
        bool,
        typer.Option(
            "--prefetch/--no-prefetch",
            help="Whether to fetch a new version's delta before anybody asks for it.",
        ),
    ] = True,
    poll: Poll = 1.0,
    trust: Trust = None,
    hub: HubUrl = None,
    hub_token_file: HubTokenFile = None,
    region: Region = None,
    replica: Replica = None,
    log_level: LogOption = LogLevel.INFO,
    as_json: JsonLines = False,
) -> None:
    """Pass streams on to the followers nearby: each byte is fetched once, proved, and kept.

    Followers give --relay http://HOST:PORT/NAME beside the stream's own URL, and go to that one
    while the relay is away. What is held is served also while the store is away. Metrics are at
    /metrics.
    """
    with reported(as_json, is_lines=True), ExitStack() as stack:
        try:
            from thinwire.relay.server import RESERVED_NAMES, RelayApp
            from thinwire.web import Limits, Listener
        except ImportError as error:
            raise InvalidArgument(
                f"a relay needs {error.name}, which is not installed",
                hint="pip install 'thinwire[hub]'",
            ) from error
        from thinwire.relay.files import own
        from thinwire.relay.relay import MIN_CACHE_BYTES, Folders, StreamRelay
        from thinwire.report.naming import named_streams
        from thinwire.store import open_store

        host, port = _host_and_port(listen)
        tls = tls_of(tls_cert, tls_key)
        logger, _ = stack.enter_context(observing(log_level))
        known = known_tokens(tokens, host)
        streams = named_streams(stream)
        if reserved := RESERVED_NAMES & set(streams):
            raise InvalidArgument(
                f"a stream cannot be called {min(reserved)!r} here", hint="Give NAME=URL"
            )
        if limit_bytes < MIN_CACHE_BYTES:
            raise InvalidArgument(
                f"--limit-bytes {limit_bytes} is too little for a relay",
                hint=f"Give at least {MIN_CACHE_BYTES >> 20}MiB; better an anchor, and the deltas "
                "of a day",
            )
        stack.callback(os.close, own(cache))
        folders = Folders.at(cache, limit_bytes)
        if not trust:
            logger.warning(
                "without --trust nothing proves records: followers without keys of their own read "
                "them from the bucket, and get only data here"
            )
        relays = [
            StreamRelay(
                name,
                open_store(url, retry_s=0),
                folders,
                trusted_keys=trust or (),
                poll_s=poll,
                fetches=prefetch,
            )
            for name, url in streams.items()
        ]
        limits = Limits(connections=_MAX_CONNECTIONS)
        listener = Listener(RelayApp(relays, known), host, port, tls=tls, limits=limits)
        stack.enter_context(stopped_by_signals(listener.stop))
        for one in relays:
            stack.callback(one.stop)
            one.start()
        _tell(stack, relays, cache, hub, hub_token_file, region, replica)
        urls = {name: f"{listener.url}/{name}" for name in streams}
        if as_json:
            print_json_line({"url": listener.url, "streams": urls})
        else:
            print(f"relay on {listener.url}: {', '.join(sorted(urls.values()))}", flush=True)
        listener.run()
        logger.info("stopped")


def _tell(
    stack: ExitStack,
    relays: Sequence[StreamRelay],
    cache: Path,
    hub: str | None,
    token_file: Path | None,
    region: str | None,
    replica: str | None,
) -> None:
    """Report to the hub of the options while the stack is open, if there is one."""
    if hub is None:
        if any(option is not None for option in (token_file, region, replica)):
            raise InvalidArgument(
                "--hub-token-file, --region and --replica are for --hub",
                hint="Give --hub URL, or leave them out",
            )
        return
    from thinwire.relay.telling import Telling
    from thinwire.report.naming import replica_name
    from thinwire.web import read_token

    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token_file is not None:
        token = read_token(token_file)
    name = replica_name(cache) if replica is None else replica
    for one in relays:
        telling = Telling(hub, one, replica=name, stream=one.name, token=token, region=region or "")
        stack.enter_context(telling.telling())


def _host_and_port(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise InvalidArgument(
            f"--listen {listen[:80]!r} is no HOST:PORT", hint="Write for example 127.0.0.1:8766"
        )
    return host, int(port)
