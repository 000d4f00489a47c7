"""A socket that requests come to, and the server behind it."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import InvalidArgument, StoreError, from_os_error

_LOG = logging.getLogger("thinwire")

# uvicorn says of each malformed request, and of each answer that was broken off, that it was one:
# anybody may cause a million of them. What an application did not expect is logged here.
_QUIET = "uvicorn.error"
_BACKLOG = 2048
# Files, sockets to the store and the like, beside connections.
_SPARE_DESCRIPTORS = 256


@dataclass(frozen=True, kw_only=True)
class Tls:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Refuse what no server could be started with.

        Raises:
            InvalidArgument: The files are not a certificate and its key.
            StoreError: One is not there, or cannot be read: it may be mounted later.
        """
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.certificate, self.key
            )
        except ssl.SSLError as error:
            raise InvalidArgument(
                f"{self.certificate} and {self.key} are no certificate and its key: "
                f"{error.strerror or error}",
                hint="Give PEM files, the chain's first certificate first",
            ) from None
        except OSError as error:
            raise from_os_error(
                error, "cannot read", f"{self.certificate} or {self.key}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one process takes.

    Attributes:
        connections: Open at once; beyond that requests are answered with 503.
        head_bytes: Of a request's line and headers.
        keep_alive_s: How long a connection may be idle between two requests.
        stop_within_s: How long what is being answered has when the listener stops.
    """

    connections: int = 10_000
    head_bytes: int = 16 << 10
    keep_alive_s: int = 75
    stop_within_s: int = 5


class Listener:
    """A socket that requests come to, and the server behind it.

    Connections that say nothing, and readers that read nothing, are ended; see
    :mod:`thinwire.web.protocol`.

    Args:
        app: The ASGI application.
        host: An address of this machine.
        port: 0: any free one.
        tls: Speak TLS; None: plain HTTP.
        limits: What is taken at once.

    Attributes:
        url: Where it listens.

    Raises:
        InvalidArgument: The TLS files will not do.
        StoreError: They cannot be read, or it cannot be listened on.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        tls: Tls | None = None,
        limits: Limits | None = None,
    ) -> None:
        import uvicorn

        from thinwire.web.protocol import GuardedProtocol

        limits = limits or Limits()
        if tls is not None:
            tls.check()
        self._socket = _listen(host, port)
        name = self._socket.getsockname()
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{f'[{name[0]}]' if ':' in name[0] else name[0]}:{name[1]}"
        config = uvicorn.Config(
            _telling(app),
            http=GuardedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.head_bytes,
            limit_concurrency=_connection_limit(limits.connections),
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=limits.stop_within_s,
            ssl_certfile=None if tls is None else str(tls.certificate),
            ssl_keyfile=None if tls is None else str(tls.key),
        )
        logging.getLogger(_QUIET).setLevel(logging.CRITICAL)
        # asyncio says so of each piece that is written to a connection whose client just went.
        logging.getLogger("asyncio").setLevel(logging.ERROR)

        class Server(uvicorn.Server):
            # Signals are the caller's.
            def capture_signals(self) -> Any:
                return nullcontext()

        self._server = Server(config)

    def run(self) -> None:
        """Answer requests until :meth:`stop`."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End once what is being answered is. From any thread."""
        self._server.should_exit = True


def _telling(app: Any) -> Any:
    """The application, with what it did not expect logged."""
    import h11
    from starlette.requests import ClientDisconnect

    async def told(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except (ClientDisconnect, h11.LocalProtocolError):
            raise  # its client went, or sent rubbish and has its answer
        except Exception:
            _LOG.exception("%s %.200r failed", scope.get("method"), scope.get("path"))
            raise

    return told


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's waiting off: 40 ms for each small answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # Whoever is told the address may connect at once.
        listening.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise StoreError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
            hint="Choose another port, or 0 for any free one, and an address of this machine",
        ) from error
    return listening


def _connection_limit(wanted: int) -> int:
    """As many as wanted, or as the process may have files open, if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_DESCRIPTORS
    if soft < needed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
            soft = min(needed, hard)
    limit = max(16, min(wanted, soft - _SPARE_DESCRIPTORS))
    if limit < wanted:
        _LOG.warning(
            "takes %d connections of the %d that it could: more open files would allow them "
            "(ulimit -n, LimitNOFILE=)",
            limit,
            wanted,
        )
    return limit
