"""keygen, signing and pinning."""

from __future__ import annotations

import json
import os

import pytest

from thinwire.follow import key_files
from thinwire.stream.signing import SigningKey

from .conftest import Run, read_json
from .streams import Lab


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_keygen(umask: int, lab: Lab, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lab.root / "key.pem"
    write_all, modes = key_files.write_all, []

    def watched(descriptor: int, data: bytes) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        write_all(descriptor, data)

    monkeypatch.setattr(key_files, "write_all", watched)
    before = os.umask(umask)
    try:
        done = run("keygen", "-o", path)
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.stderr
    assert modes == [0o600]
    assert path.stat().st_mode & 0o777 == 0o600
    assert done.stdout == f"{SigningKey.from_pem(path.read_bytes()).public}\n"
    assert not [name for name in lab.root.iterdir() if name.name.startswith(".")]


def test_keygen_replaces_only_when_told(lab: Lab, run: Run) -> None:
    path = lab.root / "key.pem"
    path.write_text("precious")
    path.chmod(0o644)
    refused = run("keygen", "-o", path, "--json")
    assert refused.exit_code == 5
    assert read_json(refused)["error"]["code"] == "already-exists"
    assert path.read_text() == "precious"
    content = read_json(run("keygen", "-o", path, "--force", "--json"))
    assert content == {
        "out": str(path),
        "public_key": SigningKey.from_pem(path.read_bytes()).public,
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert run("keygen", "-o", lab.root / "nowhere" / "key.pem").exit_code == 5


def test_signed_from_end_to_end(lab: Lab, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lab.root / "key.pem"
    public = run("keygen", "-o", path).stdout.strip()
    state, work = ["--state", lab.root / "state"], ["--work-dir", lab.root / "work"]
    outputs = [
        run("publish", lab.checkpoints[0], lab.url, *state, "--key", path, "--trust", public)
    ]
    monkeypatch.setenv("THINWIRE_SIGNING_KEY", str(path))
    outputs += [
        run("publish", lab.checkpoints[1], lab.url, *state, "--json"),
        run("maintain", lab.url, *work, "--trust", public),
        run("log", lab.url, "--trust", public),
        run("follow", lab.url, lab.root / "folder", "--once", "--trust", public),
        run("cat", lab.url, "small", "--trust", public, "--json"),
        run("fsck", lab.url, "--deep", "--trust", public),
    ]
    assert [output.exit_code for output in outputs] == [0] * 7
    assert outputs[3].stdout.count(public[:8]) == 2
    secret = path.read_bytes().splitlines()[1]
    written = [file.read_bytes() for file in lab.store.rglob("*") if file.is_file()]
    assert not any(secret in text for text in [*written, *(o.output.encode() for o in outputs)])
    other = SigningKey.generate().public
    for command in (
        ["follow", lab.url, lab.root / "other", "--once"],
        ["log", lab.url],
        ["cat", lab.url, "small"],
        ["fsck", lab.url],
    ):
        refused = run(*command, "--trust", other, "--json")
        assert refused.exit_code == 6
        assert json.loads(refused.stdout)["error"]["code"] == "signature-invalid"


@pytest.mark.parametrize(
    ("mode", "content", "exit_code", "code"),
    [
        (0o640, None, 5, "access-denied"),
        (0o604, None, 5, "access-denied"),
        (0o620, None, 5, "access-denied"),
        (0o600, b"", 2, "invalid-argument"),
        (0o600, b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", 2, None),
        (0o600, b"\xff" * 100_000, 2, "invalid-argument"),
    ],
)
def test_bad_keys(
    mode: int, content: bytes | None, exit_code: int, code: str | None, lab: Lab, run: Run
) -> None:
    path = lab.root / "key.pem"
    key = SigningKey.generate().to_pem()
    path.write_bytes(key if content is None else content)
    path.chmod(mode)
    arguments = ["publish", lab.checkpoints[0], lab.url, "--state", lab.root / "state"]
    done = run(*arguments, "--key", path, "--json")
    assert done.exit_code == exit_code
    assert read_json(done)["error"]["code"] == (code or "invalid-argument")
    assert key.splitlines()[1].decode() not in done.output
    assert not lab.store.exists()
    assert run("maintain", lab.url, "--work-dir", path, "--key", path).exit_code == exit_code


def test_a_key_that_is_no_file(lab: Lab, run: Run) -> None:
    arguments = ["publish", lab.checkpoints[0], lab.url, "--state", lab.root / "state"]
    assert run(*arguments, "--key", lab.root / "none.pem").exit_code == 5
    assert run(*arguments, "--key", lab.root).exit_code == 2
    os.mkfifo(lab.root / "pipe", 0o600)
    assert run(*arguments, "--key", lab.root / "pipe").exit_code == 2
