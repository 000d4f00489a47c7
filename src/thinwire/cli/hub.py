"""``thinwire hub``: wake followers of streams, and show how stale each is, over HTTP."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from thinwire.cli.access import TlsCertificate, TlsKey, TokensFile, known_tokens, tls_of
from thinwire.cli.failures import reported
from thinwire.cli.logs import LogLevel, observing
from thinwire.cli.options import JsonLines, LogOption, Poll, Trust
from thinwire.cli.output import print_json_line
from thinwire.cli.signals import stopped_by_signals
from thinwire.errors import InvalidArgument

# A replica has two, one for what it says and one to be woken by; and there are people, too.
_MAX_CONNECTIONS = 25_000


def hub(
    stream: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]URL",
            help="A stream to watch, and its name here; default: the last part of its path. "
            "Repeatable.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Where to listen; beyond this machine it needs --tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8765,
    tokens: TokensFile = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    poll: Poll = 1.0,
    history: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many versions of each stream are shown.")
    ] = 1000,
    max_staleness_steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="How far behind a replica may be and count as ready, where a request does not "
            "say; default: any distance.",
        ),
    ] = None,
    trust: Trust = None,
    log_level: LogOption = LogLevel.INFO,
    as_json: JsonLines = False,
) -> None:
    """Wake the followers of streams, and show how stale each of them is.

    It keeps nothing of its own: versions are read from the buckets, and replicas say where they
    are every few seconds. The dashboard is at /, what can be asked at /openapi.json.
    """
    with reported(as_json, is_lines=True), ExitStack() as stack:
        try:
            from thinwire.hub import LOOK_RETRY_S, Hub, Rule
            from thinwire.web import Limits, Listener
        except ImportError as error:
            raise InvalidArgument(
                f"a hub needs {error.name}, which is not installed",
                hint="pip install 'thinwire[hub]'",
            ) from error
        from thinwire.follow import open_stream
        from thinwire.report.naming import named_streams

        tls = tls_of(tls_cert, tls_key)
        logger, _ = stack.enter_context(observing(log_level))
        known = known_tokens(tokens, host)
        streams = {
            name: open_stream(url, trusted_keys=trust or (), retry_s=LOOK_RETRY_S)
            for name, url in named_streams(stream).items()
        }
        service = Hub(
            streams,
            tokens=known,
            poll_s=poll,
            history_count=history,
            rule=Rule(max_staleness_steps),
            logger=logger,
        )
        listener = Listener(
            service.app, host, port, tls=tls, limits=Limits(connections=_MAX_CONNECTIONS)
        )

        def stop() -> None:
            service.let_go()
            listener.stop()

        stack.enter_context(stopped_by_signals(stop))
        stack.enter_context(service)
        if as_json:
            print_json_line({"url": listener.url, "streams": sorted(streams)})
        else:
            print(f"hub on {listener.url}: {', '.join(sorted(streams))}", flush=True)
        listener.run()
        logger.info("stopped")
