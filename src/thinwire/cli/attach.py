"""``thinwire attach``: an inference engine, kept at the newest version of a stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import reported
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
    Workers,
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
    reporting,
)
from thinwire.cli.signals import stopped_by_signals
from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from thinwire.engines.driver import Served
    from thinwire.engines.engine import Engine

KEY_VARIABLE = "THINWIRE_ENGINE_KEY"
ADMIN_KEY_VARIABLE = "THINWIRE_ENGINE_ADMIN_KEY"


class EngineKind(StrEnum):
    """The engines that can be driven."""

    VLLM = "vllm"
    SGLANG = "sglang"


_ENDPOINTS = {
    EngineKind.VLLM: "http://127.0.0.1:8000",
    EngineKind.SGLANG: "http://127.0.0.1:30000",
}


class CacheKind(StrEnum):
    """What becomes of prefix and KV caches; see :class:`thinwire.engines.engine.Policy`."""

    KEEP = "keep"
    RESET = "reset"
    NEW_SESSIONS = "new-sessions"


class PauseKind(StrEnum):
    """What becomes of requests in flight."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class ProofKind(StrEnum):
    """What is compared after an update."""

    ALL = "all"
    CHANGES = "changes"


class WayKind(StrEnum):
    """How vLLM's weights are changed; see :mod:`thinwire.torch.ways`."""

    MAP = "map"
    DENSE = "dense"
    PATCHES = "patches"
    RELOAD = "reload"


def attach(
    engine: Annotated[EngineKind, typer.Option("--engine", help="Which engine it is.")],
    stream: Annotated[
        str,
        typer.Option(
            "--stream",
            metavar="URL",
            help="The stream: file://, s3://, gs://, az:// or a folder. Credentials come from the "
            "environment.",
        ),
    ],
    folder: Annotated[
        Path,
        typer.Option(
            "--folder",
            help="This host's copy of the model; empty, missing, or made by thinwire. The engine "
            "must see it under the same path.",
        ),
    ],
    cache: Annotated[
        CacheKind,
        typer.Option(
            "--cache",
            help="What becomes of the prefix and KV caches, filled by older weights: keep them, "
            "reset them, or let requests in flight end first and reset them (new-sessions, with "
            "--pause wait). There is no default.",
        ),
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Where it listens; default: http://127.0.0.1:8000 for vLLM, :30000 for SGLang.",
        ),
    ] = None,
    pause: Annotated[
        PauseKind,
        typer.Option("--pause", help="What becomes of requests in flight during an update."),
    ] = PauseKind.KEEP,
    way: Annotated[
        list[WayKind] | None,
        typer.Option(
            "--way",
            show_default=False,
            help="How vLLM's weights may be changed; default: the best that works. Repeatable.",
        ),
    ] = None,
    unfed: Annotated[
        list[str] | None,
        typer.Option(
            "--unfed",
            metavar="PATTERN",
            show_default=False,
            help='Parameters of vLLM like this, such as "vision_tower.*", stay as it has them: the '
            "stream does not hold them. Repeatable.",
        ),
    ] = None,
    prove: Annotated[
        ProofKind,
        typer.Option(
            "--prove",
            help="What of vLLM's weights is compared after an update: all words, or the changes.",
        ),
    ] = ProofKind.ALL,
    once: Annotated[
        bool, typer.Option("--once", help="Bring the engine to the newest version and exit.")
    ] = False,
    base: ModelCopy = None,
    accept_new_lineages: NewLineages = None,
    trust: Trust = None,
    block_cache: BlockCacheFolder = None,
    memory_limit: MemoryLimit = None,
    workers: Workers = None,
    poll: Poll = 1.0,
    ask_deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds for what the engine answers at once.")
    ] = 10.0,
    stage_deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds for preparing an update, and for the proof.")
    ] = 600.0,
    pause_deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds until nothing runs in the engine any more.")
    ] = 60.0,
    apply_deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds for changing the weights.")
    ] = 60.0,
    attach_deadline: Annotated[
        float,
        typer.Option(min=1, help="Seconds for an engine of which nothing is known: all words."),
    ] = 1800.0,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="A file that is there while the engine serves one whole version of the stream, "
            "touched at each look: for a readiness probe, which should ask for its age.",
        ),
    ] = None,
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
    """Keep a running engine at the newest version of a stream; print a line for each update.

    Fetching, decoding and verifying happen while it serves; the pause holds the change of the
    weights, the cache policy and the label. The engine's key is read from THINWIRE_ENGINE_KEY,
    SGLang's second one from THINWIRE_ENGINE_ADMIN_KEY.
    What fails is logged and tried again: the engine serves what it served, or is not ready.
    """
    with reported(as_json, is_lines=True), ExitStack() as stack:
        from thinwire.engines.driver import Deadlines, Driver
        from thinwire.engines.engine import Policy
        from thinwire.follow import open_stream
        from thinwire.follow.fetch import DEFAULT_MEMORY_BYTES
        from thinwire.stream.events import Observers

        if once and ready_file is not None:
            raise InvalidArgument(
                "--ready-file goes with the process, which --once ends",
                hint="Leave one of --once and --ready-file out",
            )
        policy = Policy(cache=cache.value, pause=pause.value)
        ways = [kind.value for kind in way or ()]
        at = endpoint or _ENDPOINTS[engine]
        driven = _engine(engine, at, ways, unfed or [], prove)
        logger, observer = stack.enter_context(observing(log_level, metrics_port))
        client = make_client(
            hub,
            hub_stream,
            hub_token_file,
            region,
            replica,
            url=stream,
            place=at,
            engine=engine.value,
        )
        on_ready = _ready_file(ready_file)
        driver = stack.enter_context(
            Driver(
                open_stream(
                    stream, trusted_keys=trust or (), relay=relay_of(relay, relay_token_file)
                ),
                driven,
                folder,
                policy=policy,
                deadlines=Deadlines(
                    ask=ask_deadline,
                    stage=stage_deadline,
                    prove=stage_deadline,
                    pause=pause_deadline,
                    apply=apply_deadline,
                    attach=attach_deadline,
                ),
                on_ready=on_ready,
                observer=Observers(observer, client),
                workers=workers,
                base=base,
                accept_new_lineages=accept_new_lineages,
                cache_dir=block_cache,
                memory_limit_bytes=DEFAULT_MEMORY_BYTES if memory_limit is None else memory_limit,
            )
        )
        stack.callback(on_ready, False)
        stack.enter_context(stopped_by_signals(driver.stop))
        stack.enter_context(reporting(client, driver))
        logger.info("attaching", url=driver.follower.stream.url, engine=engine.value)
        if once:
            served = driver.bring_to(driver.follower.catch_up())
            if served is not None:
                _print(served, as_json)
            return
        for served in driver.run(poll_s=poll):
            _print(served, as_json)
        logger.info("stopped")


def _engine(
    kind: EngineKind, endpoint: str, ways: list[str], unfed: list[str], prove: ProofKind
) -> Engine:
    key = os.environ.get(KEY_VARIABLE) or None
    admin_key = os.environ.get(ADMIN_KEY_VARIABLE) or None
    if kind is EngineKind.VLLM:
        from thinwire.engines.vllm import VLLM

        return VLLM(
            endpoint,
            api_key=key,
            ways=ways,
            unfed=unfed,
            prove=prove.value,
        )
    if ways or unfed or prove is not ProofKind.ALL:
        raise InvalidArgument(
            "--way, --unfed and --prove are for vLLM",
            hint="SGLang loads whole checkpoints, and shows what it likes of them",
        )
    from thinwire.engines.sglang import SGLang

    if admin_key is None:
        return SGLang(endpoint, admin_key=key)
    return SGLang(endpoint, admin_key=admin_key, api_key=key)


def _ready_file(path: Path | None) -> Callable[[bool], None]:
    from thinwire.checkpoint.disk import os_errors

    if path is not None:
        # Now, not in the middle of an update, it shows whether it can be written.
        with os_errors("cannot write", path):
            path.touch()
            path.unlink()

    def on_ready(is_ready: bool) -> None:
        if path is None:
            return
        if is_ready:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    return on_ready


def _print(served: Served, as_json: bool) -> None:
    from thinwire.cli.versions import version_json, version_line

    if as_json:
        more: dict[str, Any] = {
            "label": served.label,
            "way": served.way,
            "pause_s": round(served.pause_s, 6),
            "phases": {name: round(seconds, 6) for name, seconds in served.phases.items()},
            "cache": served.cache,
            "is_proved": served.is_proved,
        }
        print_json_line({**version_json(served.version), **more})
        return
    if served.way == "proved":
        print(f"{version_line(served.version)}; the engine is there, proved", flush=True)
        return
    phases = ", ".join(f"{name} {1000 * s:.1f}" for name, s in served.phases.items())
    proof = {True: "proved", None: "not compared", False: "WRONG"}[served.is_proved]
    print(
        f"{version_line(served.version)}; served as {served.label}, {proof}; paused for "
        f"{1000 * served.pause_s:.1f} ms (ms: {phases}); caches: {served.cache}",
        flush=True,
    )
