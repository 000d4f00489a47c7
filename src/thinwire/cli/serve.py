"""``thinwire serve``: sample from a model that follows a stream, over HTTP."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.failures import reported
from thinwire.cli.logs import LogLevel, observing
from thinwire.cli.options import (
    JsonLines,
    LogOption,
    MetricsPort,
    ModelCopy,
    NewLineages,
    Poll,
    Trust,
)
from thinwire.cli.output import print_json_line
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
)
from thinwire.cli.signals import stopped_by_signals, terminable
from thinwire.errors import InvalidArgument


def serve(
    follow: Annotated[
        str,
        typer.Option(
            metavar="URL", help="The stream to follow: file://, s3://, gs://, az:// or a folder."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Argument(
            show_default=False,
            help="A folder with the model's config and tokenizer; default: those of the stream.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; beyond this machine it needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(show_default=False, help="A file with the bearer token of requests."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="Where the published bits are kept, for a quick restart; default: a temporary "
            "folder, the size of the model.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(show_default=False, help="The model's name in the API.")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(help="torch's name of the dtype to compute in; auto: as config.json says."),
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it.")] = "cpu",
    interrupt: Annotated[
        bool,
        typer.Option(
            "--interrupt",
            help="Update between the tokens of an answer, and compute its keys and values anew; "
            "default: updates wait for answers that run.",
        ),
    ] = False,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Compare all weights with their digests after each update."),
    ] = False,
    poll: Poll = 1.0,
    timeout: Annotated[
        float, typer.Option(min=0, help="Without MODEL: seconds to wait for the first version.")
    ] = 60.0,
    update_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that an update waits for answers that run.")
    ] = 600.0,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            show_default=False,
            help="Tokens of a prompt and its answer together; default: the model's own, at most "
            "8192.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 2048,
    max_rows: Annotated[int, typer.Option(min=1, help="Answers sampled at once.")] = 64,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests open at once.")] = 64,
    base: ModelCopy = None,
    accept_new_lineages: NewLineages = None,
    trust: Trust = None,
    metrics_port: MetricsPort = None,
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
    """Serve a model that follows a stream: OpenAI's completions and chat, labelled with versions.

    Small and plain, on transformers: for tests and small runs. At SIGTERM or Ctrl-C what is being
    answered has five seconds to end.
    """
    with reported(as_json, is_lines=True), ExitStack() as stack:
        try:
            from thinwire.engines.transformers.protocol import Limits
            from thinwire.engines.transformers.serving import Settings, serving
            from thinwire.web import Listener, check_exposure, read_token
        except ImportError as error:
            raise InvalidArgument(
                f"serving needs {error.name}, which is not installed",
                hint="pip install 'thinwire[serve]'",
            ) from error
        logger, observer = stack.enter_context(observing(log_level, metrics_port))
        token = "" if token_file is None else read_token(token_file)
        check_exposure(host, bool(token))
        settings = Settings(
            url=follow,
            model=model,
            folder=folder,
            name=name,
            dtype=dtype,
            device=device,
            limits=Limits(max_tokens=max_tokens, rows=max_rows, requests=max_requests),
            context_tokens=max_model_len,
            is_interruptible=interrupt,
            proves=prove,
            update_timeout_s=update_timeout,
            first_timeout_s=timeout,
            poll_s=poll,
            base=base,
            accept_new_lineages=accept_new_lineages,
            trusted_keys=trust or (),
            relay=relay_of(relay, relay_token_file),
            token=token,
        )
        # With neither a folder nor a port, nothing is the same after a restart.
        client = make_client(
            hub,
            hub_stream,
            hub_token_file,
            region,
            replica,
            url=follow,
            place=folder or f"http://{host}:{port or os.getpid()}",
            engine="torch",
        )
        with terminable():
            app = stack.enter_context(serving(settings, logger, observer, client))
        listener = Listener(app, host, port)
        stack.enter_context(stopped_by_signals(listener.stop))
        if as_json:
            print_json_line({"url": listener.url})
        else:
            print(f"serving on {listener.url}", flush=True)
        listener.run()
        logger.info("stopped")
