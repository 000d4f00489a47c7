"""``thinwire hub`` as a process: options, tokens, TLS, and that it stops at once."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.errors import InvalidArgument
from thinwire.hub import Hub
from thinwire.report.naming import named_streams
from thinwire.stream.signing import SigningKey
from thinwire.web import Role

from .making import TOKENS, head_at, training


@contextmanager
def running(*options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [sys.executable, "-m", "thinwire", "hub", "--port", "0", "--json", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            yield process, json.loads(line)
        finally:
            process.terminate()
            process.communicate(timeout=30)


def refused(*options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["hub", "--port", "0", "--json", *options])
    assert done.exit_code == 2
    found: dict[str, Any] = json.loads(done.stdout)["error"]
    return found


def write_certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "hub.pem", folder / "hub.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def test_a_signed_stream_over_tls_with_tokens(tmp_path: Path) -> None:
    key = SigningKey.generate()
    certificate, private = write_certificate(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# who\nread {TOKENS[Role.READ]} grafana\n")
    with training(tmp_path, signing_key=key) as trainer:
        trainer.publish(step=3)
        options = ["--stream", f"main={trainer.url}", "--trust", key.public]
        options += ["--tokens", str(tokens), "--tls-cert", str(certificate)]
        options += ["--tls-key", str(private), "--poll", "0.05", "--max-staleness-steps", "1"]
        with running(*options) as (process, started):
            assert started["streams"] == ["main"]
            url = started["url"].replace("127.0.0.1", "localhost")
            assert url.startswith("https://")
            context = ssl.create_default_context(cafile=certificate)
            headers = {"authorization": f"Bearer {TOKENS[Role.READ]}"}
            with httpx.Client(base_url=url, verify=context, timeout=30) as client:
                assert client.get("/v1/streams").status_code == 401
                client.headers.update(headers)
                assert head_at(client, 1, "main")["head"]["step"] == 3
                reason = client.get("/v1/streams/main/ready").json()["reason"]
                assert "at most 1 steps behind" in reason
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_it_stops_at_once_although_somebody_listens(tmp_path: Path) -> None:
    with training(tmp_path) as trainer, running("--stream", trainer.url) as (process, started):
        url = f"{started['url']}/v1/streams/policy/events"
        with httpx.stream("GET", url, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": hello"
            process.send_signal(signal.SIGTERM)
            # It ends in order: what uvicorn cuts off, after five seconds, raises here.
            for _ in lines:
                pass
            assert process.wait(30) == 0


def test_what_is_refused(tmp_path: Path) -> None:
    assert "open to other machines" in refused("--stream", "a", "--host", "0.0.0.0")["message"]
    assert "belong together" in refused("--stream", "a", "--tls-cert", "x")["message"]
    assert "two streams" in refused("--stream", "a=x", "--stream", "b/a")["message"]
    (tmp_path / "tokens").write_text("read short\n")
    assert "token" in refused("--stream", "a", "--tokens", str(tmp_path / "tokens"))["message"]


def test_names() -> None:
    assert named_streams(["s3://bucket/run/policy/", "b=/data/x", "file:///a/c"]) == {
        "policy": "s3://bucket/run/policy/",
        "b": "/data/x",
        "c": "file:///a/c",
    }
    # An equals sign in a path is no name's.
    assert named_streams(["d=s3://bucket/a=1/b"]) == {"d": "s3://bucket/a=1/b"}
    assert named_streams(["s3://bucket/a=1/b"]) == {"b": "s3://bucket/a=1/b"}
    for given in (["/"], ["/a b"], ["x=/a", "x=/b"]):
        with pytest.raises(InvalidArgument):
            named_streams(given)
    for streams in ({}, {"a b": "/x"}, {f"s{n}": "/x" for n in range(65)}):
        with pytest.raises(InvalidArgument):
            Hub(streams)
    with pytest.raises(InvalidArgument):
        Hub({"a": "/x"}, history_count=0)
