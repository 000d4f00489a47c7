"""An S3 server that answers what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "AKIALYINGSERVER00001"
SECRET = "topsecret/AND+very=LONG"
TOKEN = "sessiontokensessiontoken"


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    echo: bool = False  # puts the request's headers into the body
    cut: bool = False  # closes the connection after the body
    forever: bool = False  # repeats the body until the client goes away


class LyingServer:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.answers: list[Answer] = [Answer(404)]
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.sent_bytes = 0
        self.lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": TOKEN,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def next_answer(self) -> Answer:
        """The answers in turn; the last one again and again."""
        with self.lock:
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def lying_server() -> Iterator[LyingServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            lying.asked.append((self.command, self.path, dict(self.headers)))
            answer = lying.next_answer()
            body = answer.body
            if answer.echo:
                body += "\n".join(f"{k}: {v}" for k, v in self.headers.items()).encode()
            headers = {
                "Last-Modified": "Tue, 01 Jan 2030 00:00:00 GMT",
                "ETag": '"x"',
                "Content-Length": str(len(body)),
                **answer.headers,
            }
            self.send_response(answer.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.send_body(body, answer)

        def send_body(self, body: bytes, answer: Answer) -> None:
            if self.command == "HEAD":
                return
            try:
                self.wfile.write(body)
                lying.sent_bytes += len(body)
                while answer.forever:
                    self.wfile.write(body)
                    lying.sent_bytes += len(body)
            except OSError:
                self.close_connection = True
            if answer.cut:
                self.close_connection = True

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    lying = LyingServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield lying
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
