"""What the command refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app


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
