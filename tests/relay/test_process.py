"""The command as a process: started, killed, ended while its store is away."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx

from thinwire.store.file_store import FileStore

from .making import bits, caught_up, data_keys, large, publish, stepped, until
from .processes import options_for, running


def test_killed_and_started_again(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    publish(bucket, tmp_path / "baseline", [large()])
    options = options_for(bucket, tmp_path)
    with running(*options, end=signal.SIGKILL) as relay:
        assert relay.url.endswith("/bucket")
        assert caught_up(relay.url, tmp_path / "f") == bits(large())
        fetched = relay.metric("upstream_bytes_total")
    # The bucket is gone, but for what is held.
    (tmp_path / "bucket").rename(tmp_path / "elsewhere")
    (tmp_path / "bucket").write_bytes(b"")
    with running(*options) as relay:
        key = max(data_keys(FileStore(tmp_path / "elsewhere"), 1))
        got = httpx.get(f"{relay.url}/o/{key}", trust_env=False)
        assert got.content == (tmp_path / "elsewhere" / key).read_bytes()
        assert relay.metric("upstream_bytes_total") < fetched / 100


def test_it_ends_while_its_store_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # Takes connections, and says nothing: as an upstream that hangs.
        url = f"run=http://127.0.0.1:{listening.getsockname()[1]}"
        options = ["--stream", url, "--listen", "127.0.0.1:0", "--cache", tmp_path / "c",
                   "--limit-bytes", "64MiB"]  # fmt: skip
        with running(*options) as relay:
            health = httpx.get(f"{relay.root}/health", trust_env=False)
            assert health.status_code == 200
            answer = httpx.get(f"{relay.url}/o/head.json", trust_env=False, timeout=20)
            assert answer.status_code == 503
            assert relay.metric("upstream_up") == 0


def test_its_store_is_killed_and_comes_back(tmp_path: Path) -> None:
    """A real process on the other side of real connections, which die in the middle."""
    bucket = FileStore(tmp_path / "bucket")
    publish(bucket, tmp_path / "baseline", [large(), stepped(large(), 1)])
    options = options_for(bucket, tmp_path)
    with running(*options, end=signal.SIGKILL) as far:
        address = far.root.removeprefix("http://")
        near_options = [
            "--stream", f"run={far.url}", "--listen", "127.0.0.1:0", "--cache", tmp_path / "near",
            "--limit-bytes", "64MiB", "--poll", "0.2",
        ]  # fmt: skip
        with running(*near_options) as near:
            assert caught_up(near.url, tmp_path / "f") == bits(stepped(large(), 1))
            far.popen.send_signal(signal.SIGKILL)
            far.popen.wait(20)
            until(lambda: not near.metric("upstream_up"))
            assert caught_up(near.url, tmp_path / "g") == bits(stepped(large(), 1))
            newer = stepped(stepped(large(), 1), 2)
            publish(bucket, tmp_path / "baseline", [newer])
            options[options.index("127.0.0.1:0")] = address
            with running(*options) as again:
                assert again.root == far.root
                until(lambda: near.metric("version") == 3)
                assert caught_up(near.url, tmp_path / "g") == bits(newer)
