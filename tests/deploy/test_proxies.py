"""deploy/proxy with the real programs: a real hub, replicas that answer by their names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest

from thinwire import Publisher

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers.py, which rooms share

from servers import free_ports

from .hubs import FOLLOW, READ, hub_at, until

PROXY = Path(__file__).resolve().parents[2] / "deploy" / "proxy"


class Replica:
    """Answers ``/ready`` with 200 or 503, and everything else with its name; or with 503."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.is_ready = True
        replica = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = replica.name.encode()
                self.send_response(200 if replica.is_ready else 503)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Replica:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: deploy/proxy was NOT tested with it")
    return found


@contextmanager
def running(command: list[str], folder: Path, **variables: str) -> Iterator[None]:
    kept = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**kept, **variables}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(10)


def answers(client: httpx.Client, port: int, count: int = 8) -> set[str]:
    """Who answers so many requests."""
    found = set()
    for _ in range(count):
        try:
            found.add(client.get(f"http://127.0.0.1:{port}/v1/models").text)
        except httpx.HTTPError as error:
            found.add(type(error).__name__)
    return found


def test_haproxy_sends_requests_to_who_is_fresh(tmp_path: Path) -> None:
    haproxy = program("haproxy")
    front, hub_port, first, second = free_ports(4)
    text = (PROXY / "haproxy.cfg").read_text()
    for given, port in (("8080", front), ("8765", hub_port), ("8001", first), ("8002", second)):
        assert given in text
        text = text.replace(given, str(port))
    path = tmp_path / "haproxy.cfg"
    # Only quicker than in production.
    path.write_text(text.replace("inter 2s", "inter 100ms"))
    url = str(tmp_path / "bucket")
    weights = np.arange(1000, dtype=np.float32)
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=5))
        publisher = stack.enter_context(Publisher(url, tmp_path / "state", maintain=False))
        replicas = [
            stack.enter_context(Replica(name, port))
            for name, port in (("sampler-1", first), ("sampler-2", second))
        ]
        for step in range(1, 6):
            weights[step] += 1
            publisher.publish({"w": weights}, step=step)
        head = publisher.head
        assert head is not None

        def beat(name: str, version: int) -> None:
            body = {
                "replica": name,
                "region": "eu",
                "lineage": head.lineage,
                "version": version,
                "step": version,
                "is_ready": True,
            }
            answer = client.post(
                f"http://127.0.0.1:{hub_port}/v1/streams/policy/heartbeats",
                content=json.dumps(body),
                headers={"authorization": f"Bearer {FOLLOW}", "content-type": "application/json"},
            )
            assert answer.status_code == 200, answer.text

        both = {"sampler-1", "sampler-2"}
        command = [haproxy, "-db", "-f", str(path)]
        stack.enter_context(running(command, tmp_path, THINWIRE_READ_TOKEN=READ))
        with hub_at(url, hub_port):
            # Neither reported: they are taken at their own word.
            until(lambda: answers(client, front) == both, "both, while the hub knows none")
            beat("sampler-1", 5)
            beat("sampler-2", 1)
            until(lambda: answers(client, front) == {"sampler-1"}, "the fresh one alone")
            beat("sampler-2", 4)
            until(lambda: answers(client, front) == both, "both, within the bound")
            beat("sampler-1", 1)
            until(lambda: answers(client, front) == {"sampler-2"}, "the other one alone")
        until(lambda: answers(client, front) == both, "both, while there is no hub")
        replicas[0].is_ready = False
        until(lambda: answers(client, front) == {"sampler-2"}, "who serves a whole version")


def test_nginx_goes_around_who_refuses(tmp_path: Path) -> None:
    nginx = program("nginx")
    front, first, second = free_ports(3)
    text = (PROXY / "nginx.conf").read_text()
    for given, port in (("8080", front), ("8001", first), ("8002", second)):
        assert given in text
        text = text.replace(given, str(port))
    path = tmp_path / "nginx.conf"
    # As nobody in particular, with everything below a folder of its own.
    paths = "\n".join(
        f"  {kind}_temp_path {tmp_path / kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = text.replace("http {", f"http {{\n  access_log off;\n{paths}")
    path.write_text(f"daemon off; pid {tmp_path / 'pid'}; error_log stderr;\n{text}")
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=5))
        one = stack.enter_context(Replica("sampler-1", first))
        stack.enter_context(Replica("sampler-2", second))
        command = [nginx, "-p", str(tmp_path), "-c", str(path)]
        stack.enter_context(running(command, tmp_path))
        both = {"sampler-1", "sampler-2"}
        until(lambda: answers(client, front) == both, "both")
        one.is_ready = False
        # Not one request is answered with 503.
        assert answers(client, front, 30) == {"sampler-2"}


def test_haproxy_takes_what_is_to_be_changed_for_tls(tmp_path: Path) -> None:
    haproxy = program("haproxy")
    text = (PROXY / "haproxy.cfg").read_text()
    (sni,), (ca,) = re.findall(r"`(ssl sni \S+)`", text), re.findall(r"`ca-file (\S+)`", text)
    if not Path(ca).exists():
        pytest.skip(f"{ca} is not here: TLS in haproxy.cfg was NOT tried")
    text = text.replace("port 8765\n", f"port 8765 {sni}\n")
    text = text.replace("default-server check", f"default-server ca-file {ca} check", 1)
    path = tmp_path / "haproxy.cfg"
    path.write_text(text)
    done = subprocess.run([haproxy, "-c", "-f", str(path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
