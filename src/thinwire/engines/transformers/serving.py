"""Everything together: a model that follows a stream, sampled from over HTTP."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.engines.transformers.following import Following, Newest
from thinwire.engines.transformers.model import Loaded, load
from thinwire.engines.transformers.protocol import Limits
from thinwire.engines.transformers.sampling import Sampler
from thinwire.engines.transformers.server import Service
from thinwire.engines.transformers.worker import Worker
from thinwire.errors import InvalidArgument, NotFound, Unavailable
from thinwire.follow import Follower, open_stream
from thinwire.report import HubClient
from thinwire.store import Store
from thinwire.stream.events import Observer, Observers
from thinwire.torch import TorchSink
from thinwire.web import Role, Tokens

# What a model may be asked to remember, where it was made for more and nobody said so.
DEFAULT_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is served, and how.

    Attributes:
        url: The stream.
        model: A folder with config and tokenizer; None: those of the stream's first version.
        folder: Where the published bits are kept; None: a temporary one.
        name: The model's name in the API; empty: that of the folder or the stream.
        dtype: That of the model, by torch's name; "auto": as its config says.
        device: Where it computes.
        limits: What requests may ask for.
        context_tokens: Tokens of a prompt and its answer together; None: the model's own, at most
            ``DEFAULT_CONTEXT_TOKENS``.
        is_interruptible: Whether updates come between the tokens of an answer.
        proves: Whether the weights are compared with their digests after each update.
        update_timeout_s: How long an update waits for answers that run.
        first_timeout_s: How long to wait for the first version, where there is no ``model``.
        poll_s: The time between two looks at the stream.
        base: Where a copy of the model is that the stream begins with by reference.
        accept_new_lineages: As of :class:`thinwire.Follower`.
        trusted_keys: As of :func:`thinwire.open_stream`.
        relay: The same.
        token: The bearer token that requests must have; empty: none.
    """

    url: str
    model: Path | None = None
    folder: Path | None = None
    name: str = ""
    dtype: str = "auto"
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    context_tokens: int | None = None
    is_interruptible: bool = False
    proves: bool = False
    update_timeout_s: float = 600.0
    first_timeout_s: float = 60.0
    poll_s: float = 1.0
    base: Path | None = None
    accept_new_lineages: bool | None = None
    trusted_keys: Sequence[str] = ()
    relay: str | Store | None = None
    token: str = ""


@contextmanager
def serving(
    settings: Settings,
    logger: Any,
    observer: Observer | None = None,
    hub: HubClient | None = None,
) -> Iterator[Any]:
    """Load the model and follow the stream for as long as the block lasts; yields the ASGI app.

    Args:
        settings: What is served, and how.
        logger: structlog's.
        observer: Told of every event.
        hub: Reports this replica, and has it woken.

    Raises:
        InvalidArgument: The model cannot be loaded.
        Deadline: No first version came.
        ThinwireError: The stream cannot be followed into the model.
    """
    with ExitStack() as stack:
        stream = open_stream(settings.url, trusted_keys=settings.trusted_keys, relay=settings.relay)
        folder = settings.folder
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="thinwire-serve-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        options: dict[str, Any] = {
            "base": settings.base or settings.model,
            "accept_new_lineages": settings.accept_new_lineages,
        }
        # Until the model is there, which may take minutes, it is a replica that serves nothing.
        loading = stack.enter_context(ExitStack())
        if settings.model is None:
            observers = Observers(observer, hub)
            with Follower(stream, folder, observer=observers, **options) as first:
                if hub is not None:
                    loading.enter_context(hub.reporting(_Loading(first)))
                first.wait_for(1, settings.first_timeout_s, poll_s=min(settings.poll_s, 1.0))
        loaded = load(settings.model or folder, dtype=settings.dtype, device=settings.device)
        sink = TorchSink(loaded.model, folder=folder, update_timeout_s=settings.update_timeout_s)
        newest = Newest()
        observers = Observers(observer, newest, hub)
        follower = stack.enter_context(Follower(stream, sink, observer=observers, **options))
        # What is in the folder already is served at once, and what does not fit is told now, unless
        # there is nobody to be asked.
        with suppress(NotFound, Unavailable):
            stream.record()
        follower.version()
        following = Following(
            follower,
            sink,
            newest,
            poll_s=settings.poll_s,
            proves=settings.proves,
            logger=logger,
            observer=observers,
        )
        limits = settings.limits._replace(context_tokens=_context_tokens(settings, loaded))
        worker = Worker(
            Sampler(loaded.model, loaded.eos_ids),
            sink.reading,
            limits,
            is_interruptible=settings.is_interruptible,
            logger=logger,
        )
        service = Service(
            loaded,
            worker,
            name=settings.name or _name_of(settings),
            served=lambda: sink.version,
            staleness=following.staleness,
            failure=lambda: following.failure,
            limits=limits,
            tokens=Tokens({settings.token: Role.READ} if settings.token else None),
        )
        # The worker ends first: an update may wait for an answer of its.
        stack.callback(following.close)
        stack.callback(worker.close)
        worker.start()
        with ExitStack() as reported:
            loading.close()
            if hub is not None:
                reported.enter_context(hub.reporting(following))
            following.start()
            yield service.app()


class _Loading:
    """A replica whose model is not there yet, as a hub sees it: an engine that serves nothing."""

    is_ready = False

    def __init__(self, follower: Follower) -> None:
        self.follower = follower


def _context_tokens(settings: Settings, loaded: Loaded) -> int:
    own = loaded.context_tokens
    if settings.context_tokens is None:
        return min(own or DEFAULT_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS)
    if own is not None and settings.context_tokens > own:
        raise InvalidArgument(f"the model was made for {own} tokens, not {settings.context_tokens}")
    return settings.context_tokens


def _name_of(settings: Settings) -> str:
    source = str(settings.model) if settings.model is not None else settings.url
    return source.rstrip("/").rpartition("/")[2] or "model"
