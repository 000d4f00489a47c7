"""A door in front of an engine's HTTP server: any call can be held up, lost or refused at it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

_TIMEOUT_S = 60.0


class Gate:
    """Passes calls on to a port of this machine.

    ``before`` and ``after`` are called with each call's route, before it is passed on and before
    its answer is. What they raise: :class:`Lost` breaks the connection, :class:`Refused` answers
    with a server's error.
    """

    def __init__(self, port: int) -> None:
        self.before: Callable[[str], None] = _pass
        self.after: Callable[[str], None] = _pass
        gate = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def log_message(self, *arguments: Any) -> None:
                pass

            def _serve(self) -> None:
                route = self.path.split("?")[0]
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                try:
                    gate.before(route)
                    status, kind, answer = self._passed_on(port, body)
                    gate.after(route)
                except Lost:
                    self.close_connection = True
                    return
                except Refused as refused:
                    status, kind, answer = refused.status, "application/json", b"{}"
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _passed_on(self, port: int, body: bytes) -> tuple[int, str, bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
                headers = {"content-type": self.headers.get("content-type", "application/json")}
                try:
                    connection.request(self.command, self.path, body or None, headers)
                    answer = connection.getresponse()
                    kind = answer.headers.get("content-type", "application/json")
                    return answer.status, kind, answer.read()
                except (OSError, http.client.HTTPException) as error:
                    raise Lost from error
                finally:
                    connection.close()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def once(self, route: str, do: Callable[[], None], *, when: str = "before") -> None:
        """Do something at the next call of a route alone."""

        def hook(called: str) -> None:
            if called == route:
                setattr(self, when, _pass)
                do()

        setattr(self, when, hook)

    def open(self) -> None:
        """Pass everything on again."""
        self.before = self.after = _pass

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Lost(Exception):
    """The connection breaks."""


class Refused(Exception):
    """The server answers with this status."""

    def __init__(self, status: int) -> None:
        self.status = status


def lose() -> None:
    raise Lost


def refuse() -> None:
    raise Refused(500)


def not_found() -> None:
    raise Refused(404)


def _pass(route: str) -> None:
    pass
