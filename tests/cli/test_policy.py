from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire import Publisher, SigningKey, open_stream
from thinwire.cli.app import app
from thinwire.errors import InvalidArgument, SignatureInvalid


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout


def test_shown_and_changed(tmp_path: Path) -> None:
    import numpy as np

    url = (tmp_path / "store").as_uri()
    with Publisher(url, tmp_path / "base", maintain=False) as publisher:
        publisher.publish({"w": np.zeros(9, np.float32)})
    assert "keep_versions" in run("policy", url)[1]
    code, text = run("policy", url, "--keep-versions", 7, "--merge-levels", "2,8", "--json")
    assert code == 0
    assert json.loads(text)["keep_versions"] == 7
    policy = open_stream(url).record().policy
    assert (policy.keep_versions, policy.merge_levels, policy.keep_age_s) == (7, (2, 8), 86_400)
    # The publisher goes on with it; one that asks for another is told.
    Publisher(url, tmp_path / "base", maintain=False).close()
    asking = open_stream(url, policy=type(policy)())
    with pytest.raises(InvalidArgument, match="another policy"):
        Publisher(asking, tmp_path / "base", maintain=False)


@pytest.mark.parametrize("levels", ["4,6", "1", "x", "4,4", "-4"])
def test_senseless_levels(tmp_path: Path, levels: str) -> None:
    import numpy as np

    url = (tmp_path / "store").as_uri()
    with Publisher(url, tmp_path / "base", maintain=False) as publisher:
        publisher.publish({"w": np.zeros(9, np.float32)})
    assert run("policy", url, "--merge-levels", levels)[0] == 2


def test_a_signed_stream_needs_the_key(tmp_path: Path) -> None:
    import numpy as np

    url = (tmp_path / "store").as_uri()
    key = SigningKey.generate()
    with Publisher(
        open_stream(url, signing_key=key), tmp_path / "base", maintain=False
    ) as publisher:
        publisher.publish({"w": np.zeros(9, np.float32)})
    assert run("policy", url)[0] == 0
    assert run("policy", url, "--keep-versions", 7)[0] == 2
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(key.to_pem())
    assert run("policy", url, "--keep-versions", 7, "--key", path)[0] == 0
    assert open_stream(url, trusted_keys=[key.public]).record().policy.keep_versions == 7
    with pytest.raises(SignatureInvalid):
        open_stream(url, trusted_keys=[SigningKey.generate().public]).record()
