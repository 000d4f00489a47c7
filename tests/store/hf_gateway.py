"""The limits of Hugging Face's S3 gateway, as its manual tells them, in front of a real S3 server.

It checks signatures and signs anew for the server behind it. What the real one does not support is
refused and noted; downloads are redirected to another origin by a URL that holds its own secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from servers import S3Server

NAMESPACE = "my-org"
REGION = "us-east-1"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<day>\d{8})/(?P<region>[^/]+)/s3/aws4_request"
    r", ?SignedHeaders=(?P<names>[^,]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)
# These clients the gateway serves itself.
_SERVED = ("aws-cli", "botocore", "aws-sdk-rust")
_BAD_KEY = re.compile(r"^\./|^/|/$|//|\.\./|\.\.$|\\|\0")


class Gateway:
    """What a test needs of it, and what it noted."""

    def __init__(self, backend: S3Server) -> None:
        self.backend = backend
        self.key, self.secret = "HFAKLOCALTEST", secrets.token_hex(16)
        self.cdn_secret = secrets.token_hex(8)
        self.endpoint = self.cdn = ""
        self.broken_rules: list[str] = []
        self.redirected: list[str] = []
        self.cdn_headers: list[dict[str, str]] = []

    @property
    def server(self) -> S3Server:
        return S3Server(self.endpoint, self.key, self.secret, self.backend.bucket)


def _signature(
    secret: str, method: str, target: str, headers: Mapping[str, str], names: str, day: str
) -> str:
    """By AWS's Signature Version 4, for S3; ``headers`` by lower-case name."""
    path, _, query = target.partition("?")
    pairs = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    lines = [method, path, "&".join(f"{name}={value}" for name, value in pairs)]
    lines += [f"{name}:{' '.join(headers.get(name, '').split())}" for name in names.split(";")]
    lines += ["", names, headers["x-amz-content-sha256"]]
    scope = f"{day}/{REGION}/s3/aws4_request"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{digest}"
    key = f"AWS4{secret}".encode()
    for part in (day, REGION, "s3", "aws4_request", text):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: Gateway
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    @property
    def sent(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except OSError:  # the client has seen enough
                self.close_connection = True

    def refuse(self, status: int, code: str) -> None:
        if status == 501:
            self.gateway.broken_rules.append(f"{self.command} {self.path}: {code}")
        self.answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())

    def ask_backend(
        self, method: str, target: str, more: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        backend = self.gateway.backend
        netloc = urlsplit(backend.endpoint).netloc
        now = datetime.now(UTC)
        headers = {
            "host": netloc,
            "x-amz-date": f"{now:%Y%m%dT%H%M%SZ}",
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            **more,
        }
        names, day = ";".join(sorted(headers)), f"{now:%Y%m%d}"
        signature = _signature(backend.secret, method, target, headers, names, day)
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={backend.key}/{day}/{REGION}/s3/aws4_request,"
            f" SignedHeaders={names}, Signature={signature}"
        )
        connection = HTTPConnection(netloc, timeout=60)
        try:
            connection.request(method, target, body or None, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        kept = ("etag", "last-modified", "content-type", "content-range", "accept-ranges")
        found = {name: value for name, value in response.getheaders() if name.lower() in kept}
        if method == "HEAD":
            found["Content-Length"] = response.headers.get("Content-Length", "0")
        return response.status, found, data


class _S3Handler(_Handler):
    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        gateway, sent = self.gateway, self.sent
        path, _, query_text = self.path.partition("?")
        query = dict(parse_qsl(query_text, keep_blank_values=True))
        found = _AUTHORIZATION.fullmatch(sent.get("authorization", ""))
        if found is None or found["key"] != gateway.key or found["region"] != REGION:
            return self.refuse(403, "InvalidAccessKeyId")
        expected = _signature(
            gateway.secret, self.command, self.path, sent, found["names"], found["day"]
        )
        if not hmac.compare_digest(expected, found["signature"]):
            return self.refuse(403, "SignatureDoesNotMatch")
        space, _, rest = path.removeprefix("/").partition("/")
        bucket, _, key = rest.partition("/")
        if space != NAMESPACE or bucket != gateway.backend.bucket:
            return self.refuse(404, "NoSuchBucket")
        fault = self.fault(sent, query, unquote(key))
        if fault:
            return self.refuse(501, fault)
        target = f"/{rest}" + (f"?{query_text}" if query_text else "")
        passed = ("content-type", "content-md5", "if-match", "if-none-match", "range")
        more = {name: sent[name] for name in passed if name in sent}
        if self.command in ("GET", "HEAD"):
            # Preconditions are honoured on PutObject only.
            more = {name: more[name] for name in more if not name.startswith("if-")}
        agent = sent.get("user-agent", "").lower()
        if self.command == "GET" and key and not any(name in agent for name in _SERVED):
            return self.redirect(target)
        self.answer(*self.ask_backend(self.command, target, more, body))
        return None

    def redirect(self, target: str) -> None:
        status, _, _ = self.ask_backend("HEAD", target, {}, b"")
        if status != 200:
            return self.refuse(status, "NoSuchKey" if status == 404 else "InternalError")
        self.gateway.redirected.append(target)
        location = f"{self.gateway.cdn}{target}?signed={self.gateway.cdn_secret}"
        return self.answer(302, {"Location": location}, b"")

    def fault(self, sent: Mapping[str, str], query: Mapping[str, str], key: str) -> str:
        """What the request wants that the gateway does not have, or nothing."""
        if "x-amz-trailer" in sent or sent["x-amz-content-sha256"].startswith("STREAMING"):
            return "TrailingChecksum"
        if "x-amz-copy-source" in sent and "partNumber" in query:
            return "UploadPartCopy"
        if any(name.startswith("x-amz-meta-") for name in sent):
            return "UserMetadata"
        if self.command == "GET" and not key and query.get("list-type") != "2":
            return "ListObjectsV1"
        if query.get("delimiter", "/") != "/":
            return "Delimiter"
        return "KeyName" if key and _BAD_KEY.search(key) else ""

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = serve


class _CdnHandler(_Handler):
    def do_GET(self) -> None:
        target, _, signed = self.path.partition("?signed=")
        self.gateway.cdn_headers.append(self.sent)
        if signed != self.gateway.cdn_secret or "authorization" in self.sent:
            return self.refuse(400, "InvalidArgument")
        more = {"range": self.sent["range"]} if "range" in self.sent else {}
        return self.answer(*self.ask_backend("GET", target, more, b""))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def hf_gateway(backend: S3Server) -> Iterator[Gateway]:
    """The gateway in front of ``backend``, on loopback."""
    gateway = Gateway(backend)
    with ExitStack() as stack:
        origins = []
        for kind in (_S3Handler, _CdnHandler):
            handler = type(kind.__name__, (kind,), {"gateway": gateway})
            server = _Server(("127.0.0.1", 0), handler)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            origins.append(f"http://127.0.0.1:{server.server_port}")
        gateway.endpoint, gateway.cdn = f"{origins[0]}/{NAMESPACE}", origins[1]
        yield gateway
