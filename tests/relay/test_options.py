"""What the command refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.relay.files import own


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--listen": "nowhere"}, "HOST:PORT"),
        ({"--listen": "0.0.0.0:0"}, "open to other machines"),
        ({"--limit-bytes": "many"}, "many"),
        ({"--limit-bytes": "10"}, "16MiB"),
        ({"--stream": "list=memory://x"}, "cannot be called"),
        ({"--stream": "http://user:hunter22@host/x"}, "holds a user"),
        ({"--region": "north"}, "--hub"),
        ({"--tls-cert": "x.pem"}, "belong together"),
        ({"--tokens": "none.txt"}, "none.txt"),
    ],
)
def test_options_that_do_not_fit(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    given = {
        "--stream": "memory://run",
        "--listen": "127.0.0.1:0",
        "--cache": str(tmp_path / "cache"),
        "--limit-bytes": "64MiB",
    } | changed
    arguments = [part for pair in given.items() for part in pair]
    done = CliRunner().invoke(app, ["relay", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code in (2, 5)
    assert message in done.stderr
    assert "hunter22" not in done.stderr
    assert isinstance(done.exception, SystemExit)


def test_a_cache_in_use_is_no_wrong_command_line(tmp_path: Path) -> None:
    """The old one may still be ending; deploy/systemd gives up on exit code 2 alone."""
    descriptor = own(tmp_path)
    try:
        arguments = ["--stream", "memory://run", "--cache", str(tmp_path), "--limit-bytes", "64MiB"]
        done = CliRunner().invoke(app, ["relay", *arguments, "--listen", "127.0.0.1:0"])
    finally:
        os.close(descriptor)
    assert done.exit_code == 5
    assert "another relay uses" in done.stderr
